//! Byte-level BPE, `tokenizer.ggml.model = gpt2`.

use crate::error::{Result, TokenizerError};
use std::{collections::HashMap, sync::LazyLock};
use tokenizers::{
    PreTokenizerWrapper, Tokenizer,
    models::bpe::BPE,
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
    tokenizer::SplitDelimiterBehavior,
};

const SUPPORTED: &str = "gpt-2, smollm and llama-bpe";

/// How Llama 3 cuts a text into words.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Which family of pre-tokenizer a name stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pre {
    Gpt2,
    /// Each digit is a word.
    SmolLm,
    Llama3,
}

fn pre(name: &str) -> Option<Pre> {
    match name {
        "gpt-2" | "gpt2" => Some(Pre::Gpt2),
        "smollm" => Some(Pre::SmolLm),
        "llama-bpe" | "llama3" | "llama-v3" => Some(Pre::Llama3),
        _ => None,
    }
}

/// Whether texts begin with BOS where a file does not say.
pub(super) fn adds_bos(name: &str) -> bool {
    pre(name) == Some(Pre::Llama3)
}

/// The symbols that stand for the 256 bytes: printable ones for themselves, the others from U+0100 on.
static SYMBOLS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let code = match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => byte as u32,
            _ => {
                next += 1;
                next - 1
            }
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
});

static BYTES: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| SYMBOLS.iter().enumerate().map(|(byte, symbol)| (*symbol, byte as u8)).collect());

/// The symbol that stands for a byte.
#[cfg(test)]
pub(super) fn symbol(byte: u8) -> char {
    SYMBOLS[byte as usize]
}

/// The bytes that a token stands for; characters that stand for no byte stand for themselves.
pub(super) fn bytes_of(token: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for symbol in token.chars() {
        match BYTES.get(&symbol) {
            Some(byte) => bytes.push(*byte),
            None => bytes.extend_from_slice(symbol.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

#[derive(Debug)]
pub(super) struct Bpe {
    tokenizer: Tokenizer,
}

impl Bpe {
    pub(super) fn new(tokens: &[&str], merges: &[&str], name: &str) -> Result<Self> {
        let pre =
            pre(name).ok_or_else(|| TokenizerError::UnsupportedPre { found: name.to_owned(), supported: SUPPORTED })?;
        let vocabulary = |reason: String| TokenizerError::Vocabulary { reason };
        let mut pairs = Vec::with_capacity(merges.len());
        for merge in merges {
            // A symbol may itself be made of spaces' stand-ins, but never holds a space.
            let (left, right) =
                merge.split_once(' ').ok_or_else(|| vocabulary(format!("merge '{merge}' is not two symbols")))?;
            pairs.push((left.to_owned(), right.to_owned()));
        }
        let vocab: HashMap<String, u32> =
            tokens.iter().enumerate().map(|(index, token)| ((*token).to_owned(), index as u32)).collect();
        let model = BPE::builder()
            .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), pairs)
            .ignore_merges(pre == Pre::Llama3)
            .build()
            .map_err(|error| vocabulary(error.to_string()))?;
        let byte_level = |use_regex: bool| PreTokenizerWrapper::from(ByteLevel::new(false, false, use_regex));
        let steps = match pre {
            Pre::Gpt2 => vec![byte_level(true)],
            Pre::SmolLm => vec![Digits::new(true).into(), byte_level(true)],
            Pre::Llama3 => {
                let pattern = SplitPattern::Regex(LLAMA3.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                    .map_err(|error| vocabulary(error.to_string()))?;
                vec![split.into(), byte_level(false)]
            }
        };
        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
        Ok(Self { tokenizer })
    }

    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<()> {
        let encoding = self
            .tokenizer
            .encode_fast(text, false)
            .map_err(|error| TokenizerError::Encode { reason: error.to_string() })?;
        tokens.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}
