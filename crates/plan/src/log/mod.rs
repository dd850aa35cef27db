//! Reads real start-up logs and explains how they differ from the plan.
//!
//! Only lines of formats that were seen in a real log are read; every [`pattern::Pattern`] names one. A log is
//! streamed: memory does not grow with it.
//!
//! - [`read`]: a log to a [`Reading`], one start of one engine.
//! - [`start`]: the same start as a [`crate::engines::setup::Setup`].
//! - [`compare`]: the plan of that start against the log, line by line.

pub mod compare;
pub mod facts;
mod lines;
pub mod llamacpp;
pub mod name;
pub mod pattern;
pub mod reason;
pub mod report;
pub mod sglang;
pub mod start;
pub mod trtllm;
pub mod vllm;
pub mod vllm_v0;
pub mod vllm_v1;

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;
use std::sync::OnceLock;

use regex::Regex;

use facts::{Facts, Quantity, Word};
use pattern::{Compiled, Pattern, Role};

/// Most writers whose loaded models are counted.
const LIMIT_WRITERS: usize = 1024;

/// An engine and the tables of its lines.
struct Format {
    /// As [`crate::engines::find`] names it.
    engine: &'static str,
    /// In messages.
    shown: &'static str,
    /// Tables of lines: a generation's where it has one.
    tables: &'static [(Option<&'static str>, &'static [Pattern])],
}

const FORMATS: [Format; 4] = [
    Format {
        engine: "vllm",
        shown: "vLLM (V0 and V1)",
        tables: &[
            (None, vllm::PATTERNS),
            (Some("V0"), vllm_v0::PATTERNS),
            (Some("V1"), vllm_v1::PATTERNS),
        ],
    },
    Format { engine: "sglang", shown: "SGLang", tables: &[(None, sglang::PATTERNS)] },
    Format { engine: "llamacpp", shown: "llama.cpp", tables: &[(None, llamacpp::PATTERNS)] },
    Format { engine: "trtllm", shown: "TensorRT-LLM", tables: &[(None, trtllm::PATTERNS)] },
];

/// Why a log cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The input failed.
    #[error("cannot read the log: {0}")]
    Input(#[from] std::io::Error),
    /// No line of any known format.
    #[error(
        "no start-up log of an engine that we know ({lines} lines read). Looked for: {looked_for}"
    )]
    Unsupported {
        /// Lines read.
        lines: u64,
        /// Engines with a line that each prints.
        looked_for: String,
    },
    /// An engine's lines, but none about memory.
    #[error("a log of {engine} that says nothing about memory. Looked for: {looked_for}")]
    NoMemory {
        /// The engine.
        engine: &'static str,
        /// Texts of the lines that would have.
        looked_for: String,
    },
}

/// What a log says about the last start in it.
#[derive(Debug)]
pub struct Reading {
    /// Engine, as [`crate::engines::find`] names it.
    pub engine: &'static str,
    /// `V0` or `V1` of vLLM.
    pub generation: Option<String>,
    /// Everything that was read.
    pub facts: Facts,
    /// Lines of the log.
    pub lines: u64,
    /// Starts of this engine in the log; the last is read.
    pub starts: u64,
    /// What to know about how it was read.
    pub notes: Vec<String>,
}

/// One engine's view of the log.
struct Candidate {
    format: &'static Format,
    patterns: Vec<(Option<&'static str>, Compiled)>,
    hits: BTreeSet<usize>,
    facts: Facts,
    starts: u64,
    /// Models loaded, by writer.
    models: BTreeMap<String, u64>,
    draft_line: Option<u64>,
}

impl Candidate {
    fn new(format: &'static Format) -> Candidate {
        let compiled = format.tables.iter().flat_map(|(generation, patterns)| {
            patterns.iter().map(|pattern| (*generation, Compiled::new(pattern)))
        });
        Candidate {
            format,
            patterns: compiled.collect(),
            hits: BTreeSet::new(),
            facts: Facts::default(),
            starts: 0,
            models: BTreeMap::new(),
            draft_line: None,
        }
    }

    fn line(&mut self, number: u64, text: &str, rank: &str) {
        for index in 0..self.patterns.len() {
            if !self.patterns[index].1.matches(text) {
                continue;
            }
            self.hits.insert(index);
            match self.patterns[index].1.pattern().role {
                Role::Plain => {}
                Role::Begins => self.begin(),
                Role::Model => self.model(number, rank),
            }
            let closed = self.models.get(rank).is_some_and(|models| *models > 1);
            self.patterns[index].1.take(text, (rank, closed), number, &mut self.facts);
        }
    }

    fn begin(&mut self) {
        if self.starts == 0 || self.facts.has_pool() {
            self.starts += 1;
        }
        if self.facts.has_pool() {
            self.facts.clear();
            self.models.clear();
            self.draft_line = None;
        }
    }

    fn model(&mut self, number: u64, rank: &str) {
        if self.models.len() < LIMIT_WRITERS || self.models.contains_key(rank) {
            let models = self.models.entry(rank.to_string()).or_default();
            *models += 1;
            if *models == 2 {
                self.draft_line.get_or_insert(number);
            }
        }
    }

    /// The generation that the log names, else the one that more kinds of its lines were seen of.
    fn generation(&self) -> Option<String> {
        if let Some((named, _)) = self.facts.word(Word::Generation) {
            return Some(named.to_string());
        }
        let seen = |generation| {
            self.hits.iter().filter(|hit| self.patterns[**hit].0 == Some(generation)).count()
        };
        match (seen("V0"), seen("V1")) {
            (0, 0) => None,
            (first, second) => Some(if first > second { "V0" } else { "V1" }.to_string()),
        }
    }

    fn reading(self, lines: u64) -> Result<Reading, LogError> {
        let memory = [Quantity::Kv, Quantity::Tokens, Quantity::Blocks, Quantity::Weights];
        let generation = self.generation();
        if !memory.iter().any(|quantity| self.facts.has(*quantity)) {
            let engine = self.format.shown;
            return Err(LogError::NoMemory { engine, looked_for: markers(self.format, 12) });
        }
        let mut notes = Vec::new();
        if self.starts > 1 {
            notes.push(format!("the log holds {} starts: the last one is read", self.starts));
        }
        if let Some(line) = self.draft_line {
            notes.push(format!(
                "a second model is loaded at line {line} (a draft model, or another start): its buffers \
                 are not counted"
            ));
        }
        Ok(Reading {
            engine: self.format.engine,
            generation,
            facts: self.facts,
            lines,
            starts: self.starts.max(1),
            notes,
        })
    }
}

/// Reads a log to its end. The engine is the one that most kinds of lines were seen of.
///
/// # Errors
/// A failing input, a log of no known engine, or one without a line about memory; both name what was
/// looked for.
pub fn read(input: &mut dyn BufRead) -> Result<Reading, LogError> {
    let mut candidates: Vec<Candidate> = FORMATS.iter().map(Candidate::new).collect();
    let mut last = 0;
    lines::each(input, |number, text| {
        last = number;
        if !any_marker().is_match(text) {
            return;
        }
        let rank = rank(text);
        for candidate in &mut candidates {
            candidate.line(number, text, &rank);
        }
    })?;
    // The first of equals: `max_by_key` would give the last.
    candidates.reverse();
    match candidates.into_iter().max_by_key(|candidate| candidate.hits.len()) {
        Some(best) if !best.hits.is_empty() => best.reading(last),
        _ => {
            let formats =
                FORMATS.iter().map(|format| format!("{}: {}", format.shown, markers(format, 3)));
            let looked_for = formats.collect::<Vec<_>>().join("; ");
            Err(LogError::Unsupported { lines: last, looked_for })
        }
    }
}

/// Some of the texts that an engine's lines about memory contain.
fn markers(format: &Format, most: usize) -> String {
    let patterns = format.tables.iter().flat_map(|(_, patterns)| patterns.iter());
    let memory = patterns.filter(|pattern| {
        pattern.takes.iter().any(|take| match take {
            pattern::Take::Number(quantity, ..) => {
                matches!(quantity, Quantity::Kv | Quantity::Weights | Quantity::Tokens)
            }
            _ => false,
        })
    });
    let mut texts: Vec<String> = memory.map(|p| format!("`{}`", p.marker.trim())).collect();
    texts.dedup();
    texts.truncate(most);
    texts.join(", ")
}

/// One search for every marker at once: few lines of a long log go further.
fn any_marker() -> &'static Regex {
    static MARKERS: OnceLock<Regex> = OnceLock::new();
    MARKERS.get_or_init(|| {
        let patterns = FORMATS.iter().flat_map(|format| format.tables).flat_map(|table| table.1);
        let texts: BTreeSet<String> = patterns.map(|p| regex::escape(p.marker)).collect();
        let texts: Vec<String> = texts.into_iter().collect();
        Regex::new(&texts.join("|")).expect("escaped texts")
    })
}

/// Who wrote a line: `(Worker_TP1 pid=53)`, `(VllmWorker rank=0 pid=85)`, `(VllmWorkerProcess pid=521)`,
/// `(EngineCore_DP1 pid=9)` of vLLM, `[2025-10-16 09:06:09 DP0 TP7]` of SGLang, `[RANK 0]` of
/// TensorRT-LLM; else empty. (vllm#38820, vllm#15255, vllm#14447, vllm#26612, sglang#17157,
/// TensorRT-LLM#15734.)
fn rank(text: &str) -> String {
    static WRITER: OnceLock<Regex> = OnceLock::new();
    let writer = WRITER.get_or_init(|| {
        Regex::new(concat!(
            r"\(((?:Ray|Vllm)?Worker[^)]{0,80}|EngineCore_DP[0-9]{1,4}[^)]{0,60})\)",
            r"|\[[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}((?: [A-Z_]{1,10}[0-9]{1,5})+)\]",
            r"|\[(RANK [0-9]{1,5})\]",
        ))
        .expect("a constant that a test compiles")
    });
    let Some(found) = writer.captures(text) else {
        return String::new();
    };
    let label =
        (1..=3).find_map(|group| found.get(group)).map_or("", |group| group.as_str()).trim();
    match label.split_once(" pid=") {
        // The process id tells apart only writers that have no number of their own.
        Some((name, _)) if name.contains(|c: char| c.is_ascii_digit()) => name.to_string(),
        _ => label.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_compiles_and_has_a_group_per_take() {
        for (_, patterns) in FORMATS.iter().flat_map(|format| format.tables) {
            for pattern in *patterns {
                let number = "([0-9])";
                let regex = Regex::new(&pattern.expression.replace('#', number)).unwrap();
                let lines =
                    pattern.takes.iter().filter(|take| matches!(take, pattern::Take::Line(_)));
                let groups = pattern.takes.len() - lines.count();
                assert_eq!(regex.captures_len() - 1, groups, "{}", pattern.expression);
                assert!(!pattern.marker.is_empty() && pattern.source.contains(['#', '.']));
            }
        }
    }

    #[test]
    fn writers_are_told_apart() {
        for (line, wanted) in [
            ("(Worker_TP1 pid=53) INFO 05-07", "Worker_TP1"),
            ("(VllmWorker rank=0 pid=85) INFO", "VllmWorker rank=0"),
            ("(VllmWorkerProcess pid=521) INFO", "VllmWorkerProcess pid=521"),
            ("[2026-01-15 13:56:49 DP1 TP1] Load", "DP1 TP1"),
            ("[2026-01-15 13:56:49] Load", ""),
            ("[TRT-LLM] [I] [batchmgr][RANK 3] [MemUsageChange]", "RANK 3"),
            ("(EngineCore pid=7476) INFO", ""),
            ("(EngineCore_DP2 pid=7476) INFO", "EngineCore_DP2"),
        ] {
            assert_eq!(rank(line), wanted);
        }
    }

    #[test]
    fn logs_of_nobody_say_what_was_looked_for() {
        let error = read(&mut &b"hello\nworld\n"[..]).unwrap_err().to_string();
        assert!(
            error.contains("2 lines read") && error.contains("`KV Cache is allocated.`"),
            "{error}"
        );
        let header = b"INFO Initializing an LLM engine (v0.5.4) with config: x\n";
        let error = read(&mut &header[..]).unwrap_err().to_string();
        assert!(error.contains("vLLM") && error.contains("nothing about memory"), "{error}");
    }
}
