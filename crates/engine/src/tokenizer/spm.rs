//! SentencePiece with scores, `tokenizer.ggml.model = llama`: of all neighbours that form a piece,
//! the pair with the best score is merged first, the leftmost of equals; what no piece covers
//! becomes bytes.

use crate::error::{Result, TokenizerError};
use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap},
};

/// Stands for a space inside pieces.
pub(super) const SPACE: char = '▁';

/// The bytes that a piece stands for.
pub(super) fn bytes_of(token: &str, is_byte: bool) -> Vec<u8> {
    match token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')) {
        Some(digits) if is_byte => u8::from_str_radix(digits, 16).map_or_else(|_| Vec::new(), |byte| vec![byte]),
        _ => token.replace(SPACE, " ").into_bytes(),
    }
}

#[derive(Debug)]
pub(super) struct Spm {
    ids: HashMap<String, u32>,
    scores: Vec<f32>,
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
}

/// A stretch of the text that is one symbol so far; a doubly linked list.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    /// 0: merged into its left neighbour.
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that form a piece.
struct Bigram {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of both when they were found: differs once one of them has grown.
    len: usize,
}

impl PartialEq for Bigram {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Bigram {}
impl PartialOrd for Bigram {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Bigram {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl Spm {
    pub(super) fn new(tokens: &[&str], scores: &[f32], unknown: Option<u32>) -> Result<Self> {
        if tokens.len() != scores.len() {
            let reason = format!("{} tokens and {} scores", tokens.len(), scores.len());
            return Err(TokenizerError::Vocabulary { reason }.into());
        }
        let ids: HashMap<String, u32> =
            tokens.iter().enumerate().map(|(index, token)| ((*token).to_owned(), index as u32)).collect();
        let byte = |byte: u8| {
            let single = char::from(byte).to_string();
            ids.get(&format!("<0x{byte:02X}>")).or_else(|| byte.is_ascii().then(|| ids.get(&single))?).copied()
        };
        let bytes = (0..=255).map(byte).collect();
        Ok(Self { ids, scores: scores.to_vec(), bytes, unknown })
    }

    pub(super) fn encode(&self, text: &str, space_prefix: bool, tokens: &mut Vec<u32>) -> Result<()> {
        let mut escaped = String::with_capacity(text.len() + 8);
        if space_prefix {
            escaped.push(SPACE);
        }
        escaped.extend(text.chars().map(|symbol| if symbol == ' ' { SPACE } else { symbol }));
        let text = escaped.as_str();
        let mut symbols: Vec<Symbol> = Vec::new();
        for (start, character) in text.char_indices() {
            let index = symbols.len();
            if let Some(last) = symbols.last_mut() {
                last.next = Some(index);
            }
            symbols.push(Symbol { start, len: character.len_utf8(), previous: index.checked_sub(1), next: None });
        }
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            self.offer(text, &symbols, Some(right - 1), Some(right), &mut queue);
        }
        while let Some(bigram) = queue.pop() {
            let (left, right) = (symbols[bigram.left], symbols[bigram.right]);
            if left.len == 0 || right.len == 0 || left.len + right.len != bigram.len {
                // One of them has been merged meanwhile.
                continue;
            }
            symbols[bigram.left].len += right.len;
            symbols[bigram.right].len = 0;
            symbols[bigram.left].next = right.next;
            if let Some(next) = right.next {
                symbols[next].previous = Some(bigram.left);
            }
            self.offer(text, &symbols, left.previous, Some(bigram.left), &mut queue);
            self.offer(text, &symbols, Some(bigram.left), right.next, &mut queue);
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            let piece = &text[symbol.start..symbol.start + symbol.len];
            match self.ids.get(piece) {
                Some(id) => tokens.push(*id),
                None => self.fall_back(piece, tokens)?,
            }
        }
        Ok(())
    }

    fn offer(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: Option<usize>,
        right: Option<usize>,
        queue: &mut BinaryHeap<Bigram>,
    ) {
        let (Some(left), Some(right)) = (left, right) else { return };
        let len = symbols[left].len + symbols[right].len;
        let start = symbols[left].start;
        if let Some(id) = self.ids.get(&text[start..start + len]) {
            queue.push(Bigram { score: self.scores[*id as usize], left, right, len });
        }
    }

    /// A character without a piece: its bytes, or the unknown token where a byte has no token.
    fn fall_back(&self, piece: &str, tokens: &mut Vec<u32>) -> Result<()> {
        let bytes: Option<Vec<u32>> = piece.bytes().map(|byte| self.bytes[byte as usize]).collect();
        match (bytes, self.unknown) {
            (Some(bytes), _) => tokens.extend(bytes),
            (None, Some(unknown)) => tokens.push(unknown),
            (None, None) => {
                let reason = format!("the vocabulary has no token for '{piece}' and none for unknown characters");
                return Err(TokenizerError::Encode { reason }.into());
            }
        }
        Ok(())
    }
}
