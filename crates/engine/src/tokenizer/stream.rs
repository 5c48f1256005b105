//! Tokens' bytes to text, piece by piece.

/// Text from bytes that arrive in pieces which may end inside a character.
#[derive(Debug, Default, Clone)]
pub struct DecodeStream {
    /// The beginning of a character whose end has not come yet: at most 3 bytes.
    pending: Vec<u8>,
}

impl DecodeStream {
    /// The text that `bytes` completes. What can never become a character turns into U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut start = 0;
        loop {
            match std::str::from_utf8(&self.pending[start..]) {
                Ok(valid) => {
                    text.push_str(valid);
                    start = self.pending.len();
                    break;
                }
                Err(error) => {
                    let valid = start + error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.pending[start..valid]));
                    start = valid;
                    match error.error_len() {
                        Some(length) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            start += length;
                        }
                        // The rest may still become a character.
                        None => break,
                    }
                }
            }
        }
        self.pending.drain(..start);
        text
    }

    /// What is left at the end: U+FFFD for an unfinished character.
    pub fn finish(&mut self) -> String {
        let unfinished = !std::mem::take(&mut self.pending).is_empty();
        if unfinished { char::REPLACEMENT_CHARACTER.to_string() } else { String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_cut_gives_the_same_text(bytes in proptest::collection::vec(any::<u8>(), 0..40), cut in 1_usize..5) {
            let mut whole = DecodeStream::default();
            let mut expected = whole.push(&bytes);
            expected.push_str(&whole.finish());
            let mut pieces = DecodeStream::default();
            let mut found: String = bytes.chunks(cut).map(|piece| pieces.push(piece)).collect();
            found.push_str(&pieces.finish());
            prop_assert_eq!(&found, &expected);
            prop_assert_eq!(found, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn a_character_appears_when_its_last_byte_does() {
        let mut stream = DecodeStream::default();
        let crab = "🦀".as_bytes();
        assert_eq!(stream.push(&crab[..3]), "");
        assert_eq!(stream.push(&crab[3..]), "🦀");
        assert_eq!(stream.push(&crab[..2]), "");
        assert_eq!(stream.push(b"x"), "\u{fffd}x");
        assert_eq!(stream.finish(), "");
    }
}
