//! Finding special tokens in text before it is tokenized, as llama.cpp does.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::roles;
use super::vocabulary::{TokenType, Vocabulary};

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Bytes of the text to be tokenized; never empty.
    Text(Range<usize>),
    /// A token that stood in the text.
    Token(u32),
}

/// The tokens that are cut out of texts.
#[derive(Debug)]
pub(super) struct CutOuts {
    /// Their ids, ordered by their texts.
    by_text: Vec<u32>,
    /// Bytes that one of them starts with.
    first_bytes: Box<[bool; 256]>,
    /// Those that take the spaces after them along.
    take_spaces: Vec<u32>,
}

impl CutOuts {
    /// The tokens of `vocabulary` that can be cut out; all of them (but the end of text) take the spaces
    /// after them along if `take_spaces`, which Phi-3's training did.
    pub(super) fn new(vocabulary: &Vocabulary, take_spaces: bool) -> CutOuts {
        let mut first_bytes = Box::new([false; 256]);
        let mut by_text = Vec::new();
        for id in 0..vocabulary.len() as u32 {
            let text = vocabulary.text(id).unwrap_or_default();
            let cut_out =
                vocabulary.token_type(id).is_some_and(|kind| roles::is_cut_out(kind, true));
            if cut_out && !text.is_empty() {
                first_bytes[usize::from(text.as_bytes()[0])] = true;
                by_text.push(id);
            }
        }
        by_text.sort_by_key(|id| vocabulary.text(*id));
        let keeps = ["<unk>", "<s>", "<|endoftext|>"];
        let is_taker = |id: &u32| !keeps.contains(&vocabulary.text(*id).unwrap_or_default());
        let takers = by_text.iter().copied().filter(|id| take_spaces && is_taker(id)).collect();
        CutOuts { by_text, first_bytes, take_spaces: takers }
    }

    /// Cuts `text` into tokens and the text between them. Longer tokens are found first wherever they
    /// are, then the leftmost. Control and unknown tokens are left in the text unless `parse_special`.
    pub(super) fn split(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        parse_special: bool,
    ) -> Vec<Part> {
        let mut taken: BTreeMap<usize, (usize, u32)> = BTreeMap::new();
        for (Reverse(len), id, start) in self.matches(vocabulary, text, parse_special) {
            let before = taken.range(..start + len).next_back();
            if before.is_some_and(|(_, (end, _))| *end > start) {
                continue;
            }
            let mut end = start + len;
            if self.take_spaces.contains(&id) {
                let free = taken.range(end..).next().map_or(text.len(), |(start, _)| *start);
                let is_space = |byte: &&u8| byte.is_ascii_whitespace() || **byte == b'\x0b';
                end += text.as_bytes()[end..free].iter().take_while(is_space).count();
            }
            taken.insert(start, (end, id));
        }
        let mut parts = Vec::with_capacity(2 * taken.len() + 1);
        let mut done = 0;
        for (start, (end, id)) in taken {
            parts.extend((done < start).then_some(Part::Text(done..start)));
            parts.push(Part::Token(id));
            done = end;
        }
        parts.extend((done < text.len()).then_some(Part::Text(done..text.len())));
        parts
    }

    /// Every place of `text` where a token stands, in the order in which they are taken.
    fn matches(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        parse_special: bool,
    ) -> Vec<(Reverse<usize>, u32, usize)> {
        let bytes = text.as_bytes();
        let kind = |id| vocabulary.token_type(id).unwrap_or(TokenType::Normal);
        let mut matches = Vec::new();
        for start in (0..bytes.len()).filter(|at| self.first_bytes[usize::from(bytes[*at])]) {
            // Narrow the sorted tokens to those that agree with the text in their first `len` bytes.
            let mut agreeing = &self.by_text[..];
            for (len, byte) in bytes[start..].iter().enumerate() {
                let at = |id: &u32| vocabulary.text(*id).and_then(|text| text.as_bytes().get(len));
                let low = agreeing.partition_point(|id| at(id) < Some(byte));
                let high = agreeing.partition_point(|id| at(id) <= Some(byte));
                agreeing = &agreeing[low..high];
                let Some(first) = agreeing.first() else { break };
                // The shortest of the agreeing tokens comes first; its equals follow it.
                let is_whole =
                    |id: &&u32| vocabulary.text(**id).is_some_and(|t| t.len() == len + 1);
                if !is_whole(&first) {
                    continue;
                }
                let whole = agreeing.iter().take_while(is_whole);
                let cut_out = whole.filter(|id| roles::is_cut_out(kind(**id), parse_special));
                matches.extend(cut_out.map(|id| (Reverse(len + 1), *id, start)));
            }
        }
        matches.sort_unstable();
        matches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::vocabulary::SpecialIds;

    fn split(tokens: &[(&str, i32)], take_spaces: bool, text: &str, parse: bool) -> Vec<String> {
        let types: Vec<i32> = tokens.iter().map(|(_, number)| *number).collect();
        let texts = tokens.iter().map(|(text, _)| *text);
        let vocabulary = Vocabulary::new(texts, &types, SpecialIds::default()).unwrap();
        let parts = CutOuts::new(&vocabulary, take_spaces).split(&vocabulary, text, parse);
        let shown = |part: Part| match part {
            Part::Text(range) => text[range].to_owned(),
            Part::Token(id) => format!("#{id}"),
        };
        parts.into_iter().map(shown).collect()
    }

    #[test]
    fn longer_tokens_win_wherever_they_are() {
        let tokens = [("abc", 4), ("cdefg", 4), ("a", 4), ("x", 1)];
        assert_eq!(split(&tokens, false, "abcdefgx", true), ["#2", "b", "#1", "x"]);
        assert_eq!(
            split(&[("\n", 4), ("\n\n\n", 4)], false, "a\n\n\n\nb", true),
            ["a", "#1", "#0", "b"]
        );
    }

    #[test]
    fn control_tokens_stay_text_unless_parsed() {
        let tokens = [("<c>", 3), ("<u>", 4), ("<n>", 1), ("<?>", 2)];
        let text = "<c><u><n><?>";
        assert_eq!(split(&tokens, false, text, true), ["#0", "#1", "<n>", "#3"]);
        assert_eq!(split(&tokens, false, text, false), ["<c>", "#1", "<n><?>"]);
        assert_eq!(split(&tokens, false, "", true), [""; 0]);
    }

    #[test]
    fn phi_takes_the_spaces_after_a_token_along() {
        let tokens = [("<|end|>", 3), ("<s>", 3)];
        assert_eq!(split(&tokens, true, "<|end|> \n a<s> b", true), ["#0", "a", "#1", " b"]);
        assert_eq!(split(&tokens, true, "<|end|>  <s>", true), ["#0", "#1"]);
    }
}
