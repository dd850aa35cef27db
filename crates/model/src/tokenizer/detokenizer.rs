//! Token ids back to text, one at a time.

use std::ops::Deref;

use super::Tokenizer;

/// How tokens become text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decode {
    /// Show control and unknown tokens as they are written (`<|im_end|>`) instead of nothing.
    pub show_special: bool,
    /// The tokens go on a text that is there already, such as a prompt: a leading space stays. At the
    /// start of a text, SentencePiece vocabularies begin with a space that was not in the text.
    pub continues: bool,
}

/// Turns tokens into text as they come, and never gives out half a character. `T` is how it holds its
/// tokenizer: a reference, or an `Arc` where it outlives the caller.
#[derive(Clone, Debug)]
pub struct Detokenizer<T> {
    tokenizer: T,
    options: Decode,
    /// Bytes that may begin a character; under 4 between two calls.
    pending: Vec<u8>,
    /// Whether the next piece is the first of a text that the tokenizer put a space before.
    strips_space: bool,
}

impl<T: Deref<Target = Tokenizer>> Detokenizer<T> {
    /// At the start of a text.
    pub fn new(tokenizer: T, options: Decode) -> Detokenizer<T> {
        let strips_space = tokenizer.adds_space_prefix && !options.continues;
        Detokenizer { tokenizer, options, pending: Vec::new(), strips_space }
    }

    /// Takes the next token and gives the text that is complete with it, often none: the bytes of an
    /// unfinished character wait. Bytes that can become no character are U+FFFD at once. An id that is
    /// no token is no text.
    pub fn push(&mut self, id: u32) -> String {
        if !self.tokenizer.is_hidden(id) || self.options.show_special {
            let start = self.pending.len();
            self.tokenizer.append_bytes(id, &mut self.pending);
            if self.strips_space && self.pending.get(start) == Some(&b' ') {
                self.pending.remove(start);
            }
            self.strips_space = false;
        }
        let mut text = String::new();
        self.pending.drain(..take_characters(&self.pending, &mut text));
        text
    }

    /// Ends the text: U+FFFD if it stops inside a character, else nothing.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Appends the characters that `bytes` begin with to `text`, U+FFFD for each run of bytes that is none.
/// Returns how many bytes were used; the rest may be the start of a character.
fn take_characters(bytes: &[u8], text: &mut String) -> usize {
    let mut used = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        used += chunk.valid().len();
        let invalid = chunk.invalid();
        let is_last = used + invalid.len() == bytes.len();
        let error = std::str::from_utf8(invalid).err();
        if is_last && error.is_some_and(|error| error.error_len().is_none()) {
            return used;
        }
        if !invalid.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
        used += invalid.len();
    }
    used
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pushed(bytes: &[u8]) -> Vec<(String, usize)> {
        let mut pending = Vec::new();
        let mut outcomes = Vec::new();
        for byte in bytes {
            pending.push(*byte);
            let mut text = String::new();
            pending.drain(..take_characters(&pending, &mut text));
            outcomes.push((text, pending.len()));
        }
        outcomes
    }

    #[test]
    fn characters_come_whole() {
        let crab = pushed("\u{1f980}".as_bytes());
        let expected = [("", 1), ("", 2), ("", 3), ("\u{1f980}", 0)];
        assert_eq!(crab, expected.map(|(text, left)| (text.to_owned(), left)));
    }

    #[test]
    fn hopeless_bytes_are_replaced_at_once() {
        let outcomes = pushed(&[0xFF, 0xE2, b'a', 0xF0, 0x80]);
        let expected =
            [("\u{fffd}", 0), ("", 1), ("\u{fffd}a", 0), ("", 1), ("\u{fffd}\u{fffd}", 0)];
        assert_eq!(outcomes, expected.map(|(text, left)| (text.to_owned(), left)));
    }
}
