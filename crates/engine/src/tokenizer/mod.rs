//! Text to tokens and back.
//!
//! Owns the vocabulary, the special tokens and how a stream of tokens becomes text. Must not know:
//! models, prompts' formats. A GGUF file's own tokenizer is used as it stands: `gpt2` (byte-level
//! BPE with merges) and `llama` (SentencePiece with scores); the bundled model reads bytes.

mod bpe;
mod spm;
mod stream;

pub use stream::DecodeStream;

use crate::{
    error::{EngineError, Result, TokenizerError},
    gguf::Metadata,
};
use std::path::PathBuf;

/// What sort of token an entry of a GGUF vocabulary is.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// Texts of tokens that end a turn, for files that name only one of several.
const END_OF_GENERATION: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
    "</s>",
];

#[derive(Debug)]
enum Model {
    Bytes,
    Bpe(Box<bpe::Bpe>),
    Spm(spm::Spm),
}

#[derive(Debug)]
struct Special {
    text: String,
    token: u32,
    /// Only found in a prompt when special tokens are asked for.
    control: bool,
}

/// A tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    model: Model,
    /// The bytes of each token as text; empty for control tokens.
    pieces: Vec<Vec<u8>>,
    /// Tokens that are found in a text before anything else, the longest first.
    specials: Vec<Special>,
    bos: Option<u32>,
    add_bos: bool,
    add_space_prefix: bool,
    end: Vec<u32>,
}

enum Fragment<'a> {
    Text(&'a str),
    Token(u32),
}

impl Tokenizer {
    /// The byte tokenizer: token n is byte n. `bos` begins every prompt, `eos` ends a text.
    #[must_use]
    pub fn bytes(bos: u32, eos: u32) -> Self {
        let pieces = (0..=255)
            .map(|byte| if u32::from(byte) == bos || u32::from(byte) == eos { Vec::new() } else { vec![byte] });
        Self {
            model: Model::Bytes,
            pieces: pieces.collect(),
            specials: Vec::new(),
            bos: Some(bos),
            add_bos: true,
            add_space_prefix: false,
            end: vec![eos],
        }
    }

    /// The tokenizer that a GGUF file carries.
    ///
    /// # Errors
    /// For kinds that are not supported and vocabularies that contradict themselves.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self> {
        let gguf = |source| EngineError::Gguf { path: PathBuf::from("tokenizer"), source };
        let kind = metadata.string("tokenizer.ggml.model").map_err(gguf)?;
        let tokens = metadata.strings("tokenizer.ggml.tokens").map_err(gguf)?;
        let types = match metadata.has("tokenizer.ggml.token_type") {
            true => metadata.integers("tokenizer.ggml.token_type").map_err(gguf)?,
            false => vec![1; tokens.len()],
        };
        if types.len() != tokens.len() || tokens.is_empty() {
            let reason = format!("{} tokens and {} token types", tokens.len(), types.len());
            return Err(TokenizerError::Vocabulary { reason }.into());
        }
        let id = |key: &str| -> Result<Option<u32>> {
            if !metadata.has(key) {
                return Ok(None);
            }
            let id = metadata.u32(key).map_err(gguf)?;
            if id as usize >= tokens.len() {
                let reason = format!("{key} is {id}; there are {} tokens", tokens.len());
                return Err(TokenizerError::Vocabulary { reason }.into());
            }
            Ok(Some(id))
        };
        let mut specials: Vec<Special> = tokens
            .iter()
            .zip(&types)
            .enumerate()
            .filter(|(_, (text, sort))| matches!(**sort, UNKNOWN | CONTROL | USER_DEFINED) && !text.is_empty())
            .map(|(index, (text, sort))| Special {
                text: (*text).to_owned(),
                token: index as u32,
                control: *sort != USER_DEFINED,
            })
            .collect();
        specials.sort_by_key(|special| std::cmp::Reverse(special.text.len()));
        let (model, pieces, add_bos, add_space_prefix) = match kind {
            "gpt2" => {
                let pre = if metadata.has("tokenizer.ggml.pre") {
                    metadata.string("tokenizer.ggml.pre").map_err(gguf)?
                } else {
                    "default"
                };
                let merges = metadata.strings("tokenizer.ggml.merges").map_err(gguf)?;
                let model = bpe::Bpe::new(&tokens, &merges, pre)?;
                let pieces = tokens.iter().map(|token| bpe::bytes_of(token)).collect::<Vec<_>>();
                (Model::Bpe(Box::new(model)), pieces, bpe::adds_bos(pre), false)
            }
            "llama" => {
                let scores = metadata.floats("tokenizer.ggml.scores").map_err(gguf)?;
                let unknown = id("tokenizer.ggml.unknown_token_id")?;
                let model = spm::Spm::new(&tokens, &scores, unknown)?;
                let pieces = tokens
                    .iter()
                    .zip(&types)
                    .map(|(token, sort)| spm::bytes_of(token, *sort == BYTE))
                    .collect::<Vec<_>>();
                (Model::Spm(model), pieces, true, true)
            }
            other => return Err(TokenizerError::Unsupported { found: other.to_owned() }.into()),
        };
        let mut pieces = pieces;
        for (piece, (text, sort)) in pieces.iter_mut().zip(tokens.iter().zip(&types)) {
            match *sort {
                CONTROL => piece.clear(),
                // Stored as they are, not in the model's own spelling of bytes.
                USER_DEFINED => *piece = text.replace(spm::SPACE, " ").into_bytes(),
                _ => {}
            }
        }
        let mut end: Vec<u32> = Vec::new();
        for key in ["eos", "eot", "eom"] {
            end.extend(id(&format!("tokenizer.ggml.{key}_token_id"))?);
        }
        let known = specials.iter().filter(|special| END_OF_GENERATION.contains(&special.text.as_str()));
        end.extend(known.map(|special| special.token));
        end.sort_unstable();
        end.dedup();
        let bos = id("tokenizer.ggml.bos_token_id")?;
        let add_bos = metadata.bool_or("tokenizer.ggml.add_bos_token", add_bos).map_err(gguf)?;
        if add_bos && bos.is_none() {
            let reason =
                "each text shall begin with a BOS token, and tokenizer.ggml.bos_token_id is missing".to_owned();
            return Err(TokenizerError::Vocabulary { reason }.into());
        }
        let add_space_prefix = metadata.bool_or("tokenizer.ggml.add_space_prefix", add_space_prefix).map_err(gguf)?;
        Ok(Self { model, pieces, specials, bos, add_bos, add_space_prefix, end })
    }

    /// Tokens of the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Tokens that end a text.
    #[must_use]
    pub fn end_tokens(&self) -> &[u32] {
        &self.end
    }

    /// The token that begins a text, where the vocabulary has one.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// A prompt's tokens: begins with BOS where the file says so, and finds special tokens by their
    /// text (so that a chat format can be written out).
    ///
    /// # Errors
    /// When the text cannot be encoded.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        if self.add_bos {
            tokens.extend(self.bos);
        }
        self.encode_plain(text, true, &mut tokens)?;
        Ok(tokens)
    }

    /// A text's tokens without BOS; `specials`: control tokens are found by their text.
    ///
    /// # Errors
    /// When the text cannot be encoded.
    pub fn encode_plain(&self, text: &str, specials: bool, tokens: &mut Vec<u32>) -> Result<()> {
        // A text begins with a space where the file says so, and so does one after a special token.
        let mut after_special = true;
        for fragment in self.fragments(text, specials) {
            match fragment {
                Fragment::Token(token) => {
                    tokens.push(token);
                    after_special = true;
                }
                Fragment::Text(text) => {
                    match &self.model {
                        Model::Bytes => tokens.extend(text.bytes().map(u32::from)),
                        Model::Bpe(model) => model.encode(text, tokens)?,
                        Model::Spm(model) => model.encode(text, self.add_space_prefix && after_special, tokens)?,
                    }
                    after_special = false;
                }
            }
        }
        Ok(())
    }

    fn fragments<'a>(&self, text: &'a str, control: bool) -> Vec<Fragment<'a>> {
        let mut fragments = vec![Fragment::Text(text)];
        for special in self.specials.iter().filter(|special| control || !special.control) {
            if !text.contains(&special.text) {
                continue;
            }
            let mut next = Vec::new();
            for fragment in fragments {
                let Fragment::Text(mut rest) = fragment else {
                    next.push(fragment);
                    continue;
                };
                while let Some(at) = rest.find(&special.text) {
                    if at > 0 {
                        next.push(Fragment::Text(&rest[..at]));
                    }
                    next.push(Fragment::Token(special.token));
                    rest = &rest[at + special.text.len()..];
                }
                if !rest.is_empty() {
                    next.push(Fragment::Text(rest));
                }
            }
            fragments = next;
        }
        fragments.retain(|fragment| !matches!(fragment, Fragment::Text("")));
        fragments
    }

    /// The bytes of a token; none for control tokens and tokens outside the vocabulary.
    #[must_use]
    pub fn piece(&self, token: u32) -> &[u8] {
        self.pieces.get(token as usize).map_or(&[], Vec::as_slice)
    }

    /// The text of tokens from the beginning of a text. Bytes that are no UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = DecodeStream::default();
        let mut text = String::new();
        for token in tokens {
            text.push_str(&stream.push(self.piece(*token)));
        }
        text.push_str(&stream.finish());
        if self.add_space_prefix && text.starts_with(' ') {
            text.remove(0);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::gguf_file::Value;
    use std::collections::HashMap;

    fn metadata(entries: Vec<(&str, Value)>) -> Metadata {
        Metadata::new(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<HashMap<_, _>>())
    }

    fn texts(items: &[&str]) -> Value {
        Value::Array(items.iter().map(|item| Value::String((*item).to_owned())).collect())
    }

    /// A SentencePiece vocabulary: 0 unknown, 1 end, 2 begin, 3 … 258 bytes, then pieces.
    fn spm(space_prefix: bool) -> Tokenizer {
        let mut tokens = vec!["<unk>".to_owned(), "<eos>".to_owned(), "<bos>".to_owned()];
        tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        let words = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁▁", "[mark]"];
        tokens.extend(words.map(str::to_owned));
        let mut types = vec![UNKNOWN, CONTROL, CONTROL];
        types.extend([BYTE; 256]);
        types.extend([1; 9]);
        types.push(USER_DEFINED);
        let mut scores = vec![0.0; 259];
        scores.extend([-10.0, -11.0, -12.0, -13.0, -1.0, -0.5, -2.0, -3.0, -4.0, 0.0]);
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let metadata = metadata(vec![
            ("tokenizer.ggml.model", Value::String("llama".into())),
            ("tokenizer.ggml.tokens", texts(&tokens)),
            (
                "tokenizer.ggml.token_type",
                Value::Array(types.into_iter().map(|sort| Value::I32(sort as i32)).collect()),
            ),
            ("tokenizer.ggml.scores", Value::Array(scores.into_iter().map(Value::F32).collect())),
            ("tokenizer.ggml.bos_token_id", Value::U32(2)),
            ("tokenizer.ggml.eos_token_id", Value::U32(1)),
            ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
            ("tokenizer.ggml.add_space_prefix", Value::Bool(space_prefix)),
        ]);
        Tokenizer::from_gguf(&metadata).expect("a good vocabulary")
    }

    #[test]
    fn sentence_pieces_merge_by_score_not_by_length() {
        let tokenizer = spm(false);
        // "bc" has a better score than "ab", so that a + bc is found, and then abc.
        assert_eq!(tokenizer.encode("abc").unwrap(), [2, 265]);
        assert_eq!(tokenizer.encode("abab").unwrap(), [2, 263, 263]);
        assert_eq!(tokenizer.encode(" a").unwrap(), [2, 266]);
        assert_eq!(spm(true).encode("a").unwrap(), [2, 266]);
        assert_eq!(tokenizer.encode("").unwrap(), [2]);
    }

    #[test]
    fn what_no_piece_covers_falls_back_to_bytes() {
        let tokenizer = spm(false);
        assert_eq!(tokenizer.encode("é").unwrap(), [2, 3 + 0xc3, 3 + 0xa9]);
        for text in ["abc é 漢字 🦀 a  b", "\n\t", "  a"] {
            for tokenizer in [spm(false), spm(true)] {
                let tokens = tokenizer.encode(text).unwrap();
                assert_eq!(tokenizer.decode(&tokens), text);
            }
        }
    }

    #[test]
    fn special_tokens_are_found_first_and_control_ones_only_on_demand() {
        let tokenizer = spm(false);
        assert_eq!(tokenizer.encode("a[mark]<eos>b").unwrap(), [2, 260, 268, 1, 261]);
        let mut tokens = Vec::new();
        tokenizer.encode_plain("[mark]<eos>", false, &mut tokens).unwrap();
        assert_eq!(tokens[0], 268);
        assert!(!tokens.contains(&1));
        assert_eq!(tokenizer.end_tokens(), [1]);
        assert_eq!(tokenizer.decode(&[2, 260, 268, 1]), "a[mark]", "control tokens have no text");
    }

    fn gpt2(pre: &str) -> Result<Tokenizer> {
        // The 256 byte symbols in their order, then merges.
        let mut tokens: Vec<String> = (0..=255_u8).map(|byte| bpe::symbol(byte).to_string()).collect();
        tokens.extend(["Ġa", "he", "Ġthe", "th", "Ġt", "<|end|>"].map(str::to_owned));
        let mut types = vec![1; 261];
        types.push(CONTROL);
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        Tokenizer::from_gguf(&metadata(vec![
            ("tokenizer.ggml.model", Value::String("gpt2".into())),
            ("tokenizer.ggml.pre", Value::String(pre.into())),
            ("tokenizer.ggml.tokens", texts(&tokens)),
            (
                "tokenizer.ggml.token_type",
                Value::Array(types.into_iter().map(|sort| Value::I32(sort as i32)).collect()),
            ),
            ("tokenizer.ggml.merges", texts(&["Ġ a", "h e", "Ġ t", "Ġt he", "t h"])),
            ("tokenizer.ggml.eos_token_id", Value::U32(261)),
        ]))
    }

    #[test]
    fn byte_level_bpe_round_trips() {
        let tokenizer = gpt2("smollm").unwrap();
        assert_eq!(tokenizer.encode(" the a").unwrap(), [258, 256]);
        assert_eq!(tokenizer.encode("12<|end|>").unwrap(), [u32::from(b'1'), u32::from(b'2'), 261]);
        for text in ["the cat, 1984! é 漢字 🦀\n\n  x", "don't", ""] {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()), text);
        }
    }

    #[test]
    fn an_unknown_pre_tokenizer_is_refused_by_name() {
        let error = gpt2("klingon").unwrap_err().to_string();
        assert!(error.contains("klingon") && error.contains("smollm"), "{error}");
    }

    #[test]
    fn vocabularies_that_contradict_themselves_are_refused() {
        let base = || {
            vec![
                ("tokenizer.ggml.model", Value::String("llama".into())),
                ("tokenizer.ggml.tokens", texts(&["a", "b"])),
                ("tokenizer.ggml.scores", Value::Array(vec![Value::F32(0.0); 2])),
                ("tokenizer.ggml.bos_token_id", Value::U32(0)),
            ]
        };
        assert!(Tokenizer::from_gguf(&metadata(base())).is_ok());
        for (key, value) in [
            ("tokenizer.ggml.model", Value::String("unigram".into())),
            ("tokenizer.ggml.scores", Value::Array(vec![Value::F32(0.0)])),
            ("tokenizer.ggml.bos_token_id", Value::U32(2)),
            ("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1)])),
            ("tokenizer.ggml.tokens", Value::Array(Vec::new())),
            ("tokenizer.ggml.tokens", Value::U32(1)),
        ] {
            let mut entries = base();
            entries.retain(|(found, _)| *found != key);
            entries.push((key, value));
            assert!(Tokenizer::from_gguf(&metadata(entries)).is_err(), "{key}");
        }
    }

    #[test]
    fn bytes_are_their_own_tokens() {
        let tokenizer = Tokenizer::bytes(0, 0);
        let tokens = tokenizer.encode("é!").unwrap();
        assert_eq!(tokens, [0, 0xc3, 0xa9, u32::from(b'!')]);
        assert_eq!(tokenizer.decode(&tokens), "é!");
        assert_eq!(tokenizer.piece(999), b"");
    }
}
