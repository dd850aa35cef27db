//! Cutting text into words before byte-level BPE, by the name in `tokenizer.ggml.pre`.
//!
//! The expressions are those that the models were trained with (GPT-2, Llama 3, Qwen 2, StarCoder). They
//! end in `\s+(?!\S)|\s+`: a run of spaces keeps its last one for the word that follows. The linear-time
//! `regex` crate has no look-ahead, so `\s+` stands there and the last space is given back by hand.

use std::ops::Range;

use regex::Regex;

use super::TokenizerError;

/// How one family of vocabularies cuts text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Gpt2,
    /// GPT-2 after every digit has been cut off.
    SingleDigits,
    Llama3,
    Qwen2,
    /// Qwen 2 with combining marks as letters.
    Qwen35,
    /// Words begin anew at a capital letter.
    Tekken,
    /// Tekken with short forms, and digits by three.
    Gpt4o,
    Falcon,
    /// What llama.cpp uses when a file does not say: punctuation, GPT-2, digits by three.
    Default,
}

/// A name of `tokenizer.ggml.pre` and what it means.
struct Known {
    name: &'static str,
    family: Family,
    /// A word that is a token as a whole is not built from merges.
    whole_words: bool,
}

const fn known(name: &'static str, family: Family) -> Known {
    Known { name, family, whole_words: false }
}

const fn whole(name: &'static str, family: Family) -> Known {
    Known { name, family, whole_words: true }
}

/// Every name that Reef knows, with the aliases that llama.cpp's converter writes.
const KNOWN: &[Known] = &[
    known("gpt-2", Family::Gpt2),
    known("phi-2", Family::Gpt2),
    known("mpt", Family::Gpt2),
    known("olmo", Family::Gpt2),
    known("gigachat", Family::Gpt2),
    known("jina-v2-es", Family::Gpt2),
    known("jina-v2-de", Family::Gpt2),
    known("a.x-4.0", Family::Gpt2),
    known("mellum", Family::Gpt2),
    known("trillion", Family::Gpt2),
    known("granite-docling", Family::Gpt2),
    known("smollm", Family::SingleDigits),
    known("starcoder", Family::SingleDigits),
    known("refact", Family::SingleDigits),
    known("command-r", Family::SingleDigits),
    known("codeshell", Family::SingleDigits),
    known("exaone", Family::SingleDigits),
    known("minerva-7b", Family::SingleDigits),
    whole("llama-bpe", Family::Llama3),
    whole("llama3", Family::Llama3),
    whole("llama-v3", Family::Llama3),
    whole("falcon3", Family::Llama3),
    whole("pixtral", Family::Llama3),
    whole("falcon-h1", Family::Llama3),
    whole("midm-2.0", Family::Llama3),
    whole("lfm2", Family::Llama3),
    known("dbrx", Family::Llama3),
    known("smaug-bpe", Family::Llama3),
    known("qwen2", Family::Qwen2),
    known("deepseek-r1-qwen", Family::Qwen2),
    known("stablelm2", Family::Qwen2),
    known("megrez", Family::Qwen2),
    known("kormo", Family::Qwen2),
    known("qwen35", Family::Qwen35),
    whole("tekken", Family::Tekken),
    known("gpt-4o", Family::Gpt4o),
    known("llama4", Family::Gpt4o),
    known("falcon", Family::Falcon),
    known("default", Family::Default),
];

/// English short forms in either case.
macro_rules! short_forms {
    () => {
        r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
    };
}

/// Punctuation with what may follow it, lines and spaces.
macro_rules! punctuation_and_spaces {
    ($after:literal) => {
        concat!(r"| ?[^\s\p{L}\p{N}]+", $after, r"*|\s*[\r\n]+|\s+")
    };
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LLAMA3: &str = concat!(
    short_forms!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    punctuation_and_spaces!(r"[\r\n]"),
);
const QWEN2: &str = concat!(
    short_forms!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    punctuation_and_spaces!(r"[\r\n]"),
);
const QWEN35: &str = concat!(
    short_forms!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*|\p{N}",
    punctuation_and_spaces!(r"[\r\n/]"),
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+(?:",
    short_forms!(),
    r")?|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*(?:",
    short_forms!(),
    r")?|\p{N}{1,3}",
    punctuation_and_spaces!(r"[\r\n/]"),
);

impl Family {
    /// Expressions to cut by, one after the other, each within the pieces of the one before.
    fn expressions(self) -> &'static [&'static str] {
        match self {
            Family::Gpt2 => &[GPT2],
            Family::SingleDigits => &[r"\p{N}", GPT2],
            Family::Llama3 => &[LLAMA3],
            Family::Qwen2 => &[QWEN2],
            Family::Qwen35 => &[QWEN35],
            Family::Tekken => &[TEKKEN],
            Family::Gpt4o => &[GPT4O],
            Family::Falcon => &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
            Family::Default => &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        }
    }
}

/// One expression to cut by.
#[derive(Debug)]
struct Stage {
    expression: Regex,
    /// Whether it has `\s*[\r\n]+` before `\s+`: a run of spaces that ends a line is then taken whole.
    takes_lines: bool,
}

/// Cuts text into words.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    stages: Vec<Stage>,
    /// A word that is a token as a whole is not built from merges (HF's `ignore_merges`).
    pub(super) whole_words: bool,
    /// Whether the files that use it begin texts with the BOS token when they do not say.
    pub(super) adds_bos: bool,
}

impl PreTokenizer {
    /// The pre-tokenizer called `name` in `tokenizer.ggml.pre`; `None` means `default`.
    pub(super) fn named(name: Option<&str>) -> Result<PreTokenizer, TokenizerError> {
        let name = name.unwrap_or("default");
        let Some(found) = KNOWN.iter().find(|known| known.name == name) else {
            let known = KNOWN.iter().map(|known| known.name).collect::<Vec<_>>().join(" ");
            return Err(TokenizerError::UnknownPreTokenizer {
                name: crate::gguf::escape(name),
                known,
            });
        };
        let compile = |expression: &&str| Stage {
            expression: Regex::new(expression).expect("a constant that tests compile"),
            takes_lines: expression.contains(r"\s*[\r\n]+"),
        };
        Ok(PreTokenizer {
            stages: found.family.expressions().iter().map(compile).collect(),
            whole_words: found.whole_words,
            adds_bos: found.whole_words,
        })
    }

    /// Gives the words of `text` in order, as byte ranges that cover it without gaps.
    pub(super) fn words(&self, text: &str, mut each: impl FnMut(&str)) {
        cut(text, 0..text.len(), &self.stages, &mut each);
    }
}

/// Cuts `range` of `text` by the first of `stages`, and the pieces by the rest.
fn cut(text: &str, range: Range<usize>, stages: &[Stage], each: &mut impl FnMut(&str)) {
    let Some((stage, rest)) = stages.split_first() else {
        if !range.is_empty() {
            each(&text[range]);
        }
        return;
    };
    let piece = &text[range.clone()];
    let mut done = 0;
    while let Some(found) = stage.expression.find_at(piece, done) {
        let (start, end) = (found.start(), stage.end(piece, found.range()));
        // Text that no expression matches is a word of its own.
        cut(text, range.start + done..range.start + start, rest, each);
        cut(text, range.start + start..range.start + end, rest, each);
        done = end;
    }
    cut(text, range.start + done..range.end, rest, each);
}

impl Stage {
    /// Where the match `found` in `piece` would end if the expression ended in `\s+(?!\S)|\s+`: a run
    /// of two or more spaces that is followed by something else leaves its last one.
    fn end(&self, piece: &str, found: Range<usize>) -> usize {
        let before_text =
            piece[found.end..].chars().next().is_some_and(|char| !char.is_whitespace());
        let spaces = &piece[found.clone()];
        let Some(last) = spaces.chars().next_back() else { return found.end };
        let is_line = self.takes_lines && matches!(last, '\r' | '\n');
        let is_one = spaces.len() == last.len_utf8();
        if !before_text || is_line || is_one || !spaces.chars().all(char::is_whitespace) {
            return found.end;
        }
        found.end - last.len_utf8()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        PreTokenizer::named(Some(name)).unwrap().words(text, |word| words.push(word.to_owned()));
        assert_eq!(words.concat(), text);
        words
    }

    #[test]
    fn spaces_leave_their_last_one_to_the_next_word() {
        assert_eq!(words("gpt-2", "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(words("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(words("llama-bpe", "a \n\nb \n  c"), ["a", " \n\n", "b", " \n", " ", " c"]);
        assert_eq!(words("qwen2", "\t\tx \u{3000}y"), ["\t", "\tx", " ", "\u{3000}y"]);
        assert_eq!(words("gpt-2", ""), [""; 0]);
    }

    #[test]
    fn digits_are_cut_as_each_family_does() {
        assert_eq!(words("gpt-2", "x 2024!"), ["x", " 2024", "!"]);
        assert_eq!(words("smollm", "x 2024!"), ["x", " ", "2", "0", "2", "4", "!"]);
        assert_eq!(words("llama-bpe", "x 2024!"), ["x", " ", "202", "4", "!"]);
        assert_eq!(words("qwen2", "x 2024!"), ["x", " ", "2", "0", "2", "4", "!"]);
        assert_eq!(words("default", "x 2024!"), ["x", " ", "202", "4", "!"]);
    }

    #[test]
    fn short_forms_are_words() {
        assert_eq!(words("gpt-2", "I'll DON'T"), ["I", "'ll", " DON", "'", "T"]);
        assert_eq!(words("llama-bpe", "I'll DON'T"), ["I", "'ll", " DON", "'T"]);
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let message = PreTokenizer::named(Some("tea\nleaves")).unwrap_err().to_string();
        assert!(message.contains("tea\\nleaves") && message.contains("smollm"), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
}
