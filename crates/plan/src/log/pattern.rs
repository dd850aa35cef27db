//! One kind of log line: how it is found, what is taken from it, and the real log it was seen in.

use std::sync::OnceLock;

use regex::Regex;

use super::facts::{Facts, Join, Quantity, Word};

/// Bytes of a GiB; logs that write `GB` for it say so at their pattern.
pub const GIB: f64 = (1_u64 << 30) as f64;
/// Bytes of a MiB.
pub const MIB: f64 = (1_u64 << 20) as f64;
/// A number as logs print it, thousands with commas; short enough for any number to be exact.
const NUMBER: &str = r"([0-9][0-9,]{0,18}(?:\.[0-9]{1,12})?)";

/// What a capture group is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Take {
    /// A number times a scale.
    Number(Quantity, f64, Join),
    /// A text; a later line replaces it.
    Text(Word),
    /// A text; the first line counts.
    FirstText(Word),
    /// The whole line says it: keep the match.
    Line(Word),
}

/// One kind of line. `#` in the expression stands for a number.
#[derive(Debug)]
pub struct Pattern {
    /// Text that every such line contains.
    pub marker: &'static str,
    /// Regular expression with one group per entry of `takes` (none for [`Take::Line`]).
    pub expression: &'static str,
    /// What the groups are.
    pub takes: &'static [Take],
    /// A real log with such a line.
    pub source: &'static str,
    /// What else the line tells.
    pub role: Role,
}

/// What a line tells beside its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Nothing.
    Plain,
    /// A start begins here: after a pool was read, what was read is of an earlier start.
    Begins,
    /// A model is loaded: the second of a writer is a draft model, whose buffers do not add up with those
    /// of the first.
    Model,
}

impl Pattern {
    /// A line that tells no more than its numbers.
    pub const fn new(
        marker: &'static str,
        expression: &'static str,
        takes: &'static [Take],
        source: &'static str,
    ) -> Pattern {
        Pattern { marker, expression, takes, source, role: Role::Plain }
    }
}

/// A number as it is, the latest line of its writer counts.
pub const fn plain(quantity: Quantity) -> Take {
    Take::Number(quantity, 1.0, Join::Last)
}

/// GiB, the latest line of its writer counts.
pub const fn gib(quantity: Quantity) -> Take {
    Take::Number(quantity, GIB, Join::Last)
}

/// A pattern with its expression compiled on first use.
pub struct Compiled {
    pattern: &'static Pattern,
    regex: OnceLock<Regex>,
}

impl Compiled {
    /// Not compiled yet: most logs need the patterns of one engine.
    pub fn new(pattern: &'static Pattern) -> Compiled {
        Compiled { pattern, regex: OnceLock::new() }
    }

    /// The pattern.
    pub fn pattern(&self) -> &'static Pattern {
        self.pattern
    }

    /// Whether the line is of this kind.
    pub fn matches(&self, text: &str) -> bool {
        text.contains(self.pattern.marker) && self.regex().is_match(text)
    }

    /// Takes what the line says, for the `rank` that wrote it. `closed`: buffers no longer add up.
    pub fn take(&self, text: &str, (rank, closed): (&str, bool), line: u64, facts: &mut Facts) {
        for found in self.regex().captures_iter(text) {
            for (group, take) in self.pattern.takes.iter().enumerate() {
                let index = if matches!(take, Take::Line(_)) { 0 } else { group + 1 };
                let Some(captured) = found.get(index).map(|group| group.as_str()) else {
                    continue;
                };
                match *take {
                    Take::Number(_, _, Join::Sum) if closed => {}
                    Take::Number(quantity, scale, join) => {
                        if let Some(value) = number(captured, scale) {
                            facts.add(quantity, rank, value, line, join);
                        }
                    }
                    Take::Text(word) | Take::Line(word) => {
                        facts.add_word(word, captured, line, false);
                    }
                    Take::FirstText(word) => facts.add_word(word, captured, line, true),
                }
            }
        }
    }

    fn regex(&self) -> &Regex {
        self.regex.get_or_init(|| {
            let expression = self.pattern.expression.replace('#', NUMBER);
            Regex::new(&expression).expect("patterns are constants that a test compiles")
        })
    }
}

/// A printed number with half its last digit, both times `scale`.
fn number(text: &str, scale: f64) -> Option<(f64, f64)> {
    let plain = text.replace(',', "");
    let value: f64 = plain.parse().ok()?;
    let half_step = match plain.split_once('.') {
        Some((_, digits)) => 0.5 * 10_f64.powi(-(digits.len() as i32)),
        // Whole bytes, tokens and blocks are exact; a whole number of MiB or GiB is rounded.
        None if scale > 1.0 => 0.5,
        None => 0.0,
    };
    Some((value * scale, half_step * scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_know_their_rounding() {
        assert_eq!(number("1,823,372", 1.0), Some((1_823_372.0, 0.0)));
        assert_eq!(number("3.81", 100.0), Some((381.0, 0.5)));
        assert_eq!(number("40", 10.0), Some((400.0, 5.0)));
    }
}
