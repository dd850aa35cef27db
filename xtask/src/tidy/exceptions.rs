//! The listed exceptions: `RULE SUBJECT REASON…`, one a line.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};

use super::Finding;

/// The file's words that a reason must have at least: a name alone is none.
const REASON_WORDS: usize = 3;

/// All exceptions of the file.
pub struct Exceptions(Vec<Exception>);

struct Exception {
    rule: String,
    subject: String,
    line: usize,
    used: Cell<bool>,
}

impl Exceptions {
    /// Reads the file; blank lines and `#` lines mean nothing.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut exceptions = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let is_whole = words.len() >= 2 + REASON_WORDS;
            ensure!(is_whole, "tidy-exceptions.txt:{}: want RULE SUBJECT REASON", index + 1);
            let (rule, subject) = (words[0].to_string(), words[1].to_string());
            exceptions.push(Exception { rule, subject, line: index + 1, used: Cell::new(false) });
        }
        Ok(Self(exceptions))
    }

    /// The findings that no exception covers, and one more for each exception that covers none.
    pub fn apply(self, findings: Vec<Finding>) -> Vec<Finding> {
        let is_open = |finding: &Finding| {
            let covers = |e: &&Exception| e.rule == finding.rule && e.subject == finding.subject;
            let covering = self.0.iter().find(covers);
            covering.inspect(|exception| exception.used.set(true)).is_none()
        };
        let mut open: Vec<Finding> = findings.into_iter().filter(is_open).collect();
        open.extend(self.0.iter().filter(|exception| !exception.used.get()).map(|exception| {
            Finding {
                rule: "exceptions",
                subject: "xtask/tidy-exceptions.txt".into(),
                line: exception.line,
                message: format!(
                    "{} {} excuses nothing; remove it",
                    exception.rule, exception.subject
                ),
            }
        }));
        open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(subject: &str) -> Finding {
        Finding { rule: "file-length", subject: subject.into(), line: 0, message: String::new() }
    }

    #[test]
    fn exceptions_need_a_reason_and_a_use() {
        assert!(Exceptions::parse("file-length a.rs because").is_err());
        let text = "# comment\nfile-length a.rs one table of data\nfile-length c.rs was long once upon a time\n";
        let open = Exceptions::parse(text).unwrap().apply(vec![finding("a.rs"), finding("b.rs")]);
        let subjects: Vec<&str> = open.iter().map(|finding| finding.subject.as_str()).collect();
        assert_eq!(subjects, ["b.rs", "xtask/tidy-exceptions.txt"]);
        assert_eq!(open[1].line, 3);
    }
}
