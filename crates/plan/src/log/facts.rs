//! What a log says, quantity by quantity and rank by rank, with the lines that it was read from.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::figure::{Figure, Unit};

/// Most ranks, or other writers of lines, that are told apart; the lines of more are not read.
const LIMIT_RANKS: usize = 1024;
/// Most lines that a sum names.
const LIMIT_LINES_NAMED: usize = 6;
/// Most characters kept of a text out of a log.
const LIMIT_TEXT: usize = 600;

/// A number that start-up logs print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Memory of the device, bytes.
    Total,
    /// Share of it that the engine may use.
    Utilization,
    /// The same in bytes.
    Reserved,
    /// Weights, bytes.
    Weights,
    /// Peak of the tensor library during the profile, weights included, bytes.
    PeakTorch,
    /// Activation peak, or llama.cpp's compute and output buffers, bytes.
    Activation,
    /// Memory outside the tensor library, bytes.
    NonTorch,
    /// CUDA graphs, bytes.
    Graphs,
    /// The KV pool, bytes.
    Kv,
    /// States of recurrent layers beside the pool, bytes.
    States,
    /// Bytes that one request of the longest length needs.
    KvNeeded,
    /// Bytes of a token in the pool.
    BytesPerToken,
    /// Tokens of the pool as printed.
    Tokens,
    /// Blocks of the pool.
    Blocks,
    /// Tokens of a block.
    BlockSize,
    /// Requests of the longest length at once.
    Concurrency,
    /// Longest request, tokens.
    MaxModelLen,
    /// Longest request that would have started, tokens.
    MaxLen,
    /// Tokens of a step.
    BatchedTokens,
    /// Sequences at once.
    Sequences,
    /// Tokens of llama.cpp's micro-batch.
    MicroBatch,
    /// Ranks that split each layer.
    TensorParallel,
    /// Ranks that split the stack.
    PipelineParallel,
    /// Replicas of the attention.
    DataParallel,
    /// Ranks that split a sequence.
    ContextParallel,
    /// Tokens drafted a step.
    DraftTokens,
}

impl Quantity {
    /// What it counts.
    pub fn unit(self) -> Unit {
        match self {
            Quantity::Utilization => Unit::Ratio,
            Quantity::BytesPerToken => Unit::BytesPerToken,
            Quantity::Blocks => Unit::Blocks,
            Quantity::Concurrency => Unit::Sequences,
            Quantity::Sequences
            | Quantity::TensorParallel
            | Quantity::PipelineParallel
            | Quantity::DataParallel
            | Quantity::ContextParallel => Unit::Count,
            Quantity::Tokens
            | Quantity::BlockSize
            | Quantity::MaxModelLen
            | Quantity::MaxLen
            | Quantity::BatchedTokens
            | Quantity::MicroBatch
            | Quantity::DraftTokens => Unit::Tokens,
            _ => Unit::Bytes,
        }
    }

    /// Whether the smallest rank decides: every rank gets the pool that fits on all.
    fn is_of_the_smallest(self) -> bool {
        matches!(
            self,
            Quantity::Kv
                | Quantity::Tokens
                | Quantity::Blocks
                | Quantity::MaxLen
                | Quantity::Concurrency
        )
    }
}

/// A text that start-up logs print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// Version of the engine.
    Version,
    /// `V0` or `V1` of vLLM.
    Generation,
    /// Model, as the engine was given it.
    Model,
    /// Name of the model in its file, or its class.
    Architecture,
    /// Number format of the computation.
    Dtype,
    /// Weight format.
    Quantization,
    /// KV format, or that of keys.
    KvDtype,
    /// KV format of values, where it may differ.
    ValueDtype,
    /// Device.
    Device,
    /// Whether prefix caching is on.
    PrefixCaching,
    /// Whether CUDA graphs are off.
    Eager,
    /// Who drafts.
    Draft,
    /// Window layers hold the whole context, by choice.
    FullWindows,
    /// Why the engine did not start.
    Refusal,
}

/// One number as one writer printed it.
#[derive(Clone, Debug, PartialEq)]
struct Sighting {
    value: f64,
    /// Half of the last printed digit: the value may be off by it.
    half_step: f64,
    lines: Vec<u64>,
    count: usize,
}

/// All that the log says about one start of one engine.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    numbers: BTreeMap<Quantity, BTreeMap<String, Sighting>>,
    words: BTreeMap<Word, (String, u64)>,
    ranks: BTreeSet<String>,
}

/// How a number joins one that its writer printed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// The later line counts.
    Last,
    /// The first line counts: later ones are of a draft model.
    First,
    /// Lines add up: one per buffer or pool.
    Sum,
}

impl Facts {
    /// Forgets everything: a new start begins.
    pub fn clear(&mut self) {
        *self = Facts::default();
    }

    /// Whether the size of a pool has been read: what follows may be another start.
    pub fn has_pool(&self) -> bool {
        [Quantity::Kv, Quantity::Tokens, Quantity::Blocks].iter().any(|q| self.has(*q))
    }

    /// Whether a quantity has been read.
    pub fn has(&self, quantity: Quantity) -> bool {
        self.numbers.contains_key(&quantity)
    }

    /// Adds a number that `rank` printed on a line.
    pub fn add(
        &mut self,
        quantity: Quantity,
        rank: &str,
        (value, half_step): (f64, f64),
        line: u64,
        join: Join,
    ) {
        if !value.is_finite() || (self.ranks.len() >= LIMIT_RANKS && !self.ranks.contains(rank)) {
            return;
        }
        self.ranks.insert(rank.to_string());
        let seen = self.numbers.entry(quantity).or_default();
        let fresh = Sighting { value, half_step, lines: vec![line], count: 1 };
        match (seen.get_mut(rank), join) {
            (None, _) | (Some(_), Join::Last) => {
                seen.insert(rank.to_string(), fresh);
            }
            (Some(_), Join::First) => {}
            (Some(sum), Join::Sum) => {
                sum.value += value;
                sum.half_step += half_step;
                sum.count += 1;
                if sum.lines.len() < LIMIT_LINES_NAMED {
                    sum.lines.push(line);
                }
            }
        }
    }

    /// Adds a text; the first one stays where `keep_first`.
    pub fn add_word(&mut self, word: Word, text: &str, line: u64, keep_first: bool) {
        let short: String = text.trim().chars().take(LIMIT_TEXT).collect();
        if !(short.is_empty() || keep_first && self.words.contains_key(&word)) {
            self.words.insert(word, (short, line));
        }
    }

    /// A text and its line.
    pub fn word(&self, word: Word) -> Option<(&str, u64)> {
        self.words.get(&word).map(|(text, line)| (text.as_str(), *line))
    }

    /// A number over all ranks: the smallest rank's where the smallest decides, else that of the rank with
    /// the smallest pool, else the largest. Its range is that of the rounding of the log.
    pub fn figure(&self, quantity: Quantity) -> Option<Figure> {
        let seen = self.numbers.get(&quantity)?;
        let smallest = |of: &BTreeMap<String, Sighting>| -> Option<String> {
            least(of).map(|(r, _)| r.clone())
        };
        let pool = self.numbers.get(&Quantity::Kv).and_then(smallest);
        let (rank, chosen) = match pool.and_then(|rank| seen.get_key_value(&rank)) {
            _ if quantity.is_of_the_smallest() => least(seen)?,
            Some(of_pool) => of_pool,
            None => seen.iter().max_by(|a, b| a.1.value.total_cmp(&b.1.value))?,
        };
        let mut source = lines_named(chosen);
        if seen.len() > 1 {
            let values = || seen.values().map(|sighting| sighting.value);
            let (low, high) = values().fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
            let unit = quantity.unit();
            let shown = |value| crate::report::shown(value, unit);
            source += &format!(" ({rank}; {} ranks say ", seen.len());
            source += &match low == high {
                true => format!("{})", shown(low)),
                false => format!("{} to {})", shown(low), shown(high)),
            };
        } else if !rank.is_empty() {
            source += &format!(" ({rank})");
        }
        let figure = Figure::measured(chosen.value, quantity.unit(), source);
        Some(figure.within(chosen.value - chosen.half_step, chosen.value + chosen.half_step))
    }

    /// A number as a whole one, where it can be.
    pub fn whole(&self, quantity: Quantity) -> Option<u64> {
        let value = self.figure(quantity)?.value;
        (0.0..1e15).contains(&value).then_some(value as u64)
    }

    /// How far apart the ranks are: smallest and largest value, where more than one rank printed it.
    pub fn spread(&self, quantity: Quantity) -> Option<(f64, f64)> {
        let seen = self.numbers.get(&quantity).filter(|seen| seen.len() > 1)?;
        let values = || seen.values().map(|sighting| sighting.value);
        Some((values().fold(f64::MAX, f64::min), values().fold(f64::MIN, f64::max)))
    }

    /// Every number in order, over all ranks.
    pub fn figures(&self) -> impl Iterator<Item = (Quantity, Figure)> {
        self.numbers.keys().filter_map(|quantity| Some((*quantity, self.figure(*quantity)?)))
    }

    /// Every text in order, with its line.
    pub fn words(&self) -> impl Iterator<Item = (Word, &str, u64)> {
        self.words.iter().map(|(word, (text, line))| (*word, text.as_str(), *line))
    }
}

fn least(seen: &BTreeMap<String, Sighting>) -> Option<(&String, &Sighting)> {
    seen.iter().min_by(|a, b| a.1.value.total_cmp(&b.1.value))
}

fn lines_named(sighting: &Sighting) -> String {
    let [first, rest @ ..] = &sighting.lines[..] else {
        return "log".into();
    };
    if rest.is_empty() {
        return format!("log line {first}");
    }
    let named: Vec<String> = sighting.lines.iter().map(u64::to_string).collect();
    let more = match sighting.count - sighting.lines.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("log lines {}{more}, summed", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_rank_decides_the_pool_and_names_itself() {
        let mut facts = Facts::default();
        facts.add(Quantity::Kv, "TP0", (7.0, 0.5), 3, Join::Last);
        facts.add(Quantity::Kv, "TP1", (6.0, 0.5), 4, Join::Last);
        facts.add(Quantity::Weights, "TP0", (9.0, 0.5), 1, Join::Last);
        facts.add(Quantity::Weights, "TP1", (8.0, 0.5), 2, Join::Last);
        let kv = facts.figure(Quantity::Kv).unwrap();
        assert_eq!((kv.value, kv.low, kv.high), (6.0, 5.5, 6.5));
        assert_eq!(kv.explanation(), "log line 4 (TP1; 2 ranks say 6 B to 7 B)");
        assert_eq!(facts.figure(Quantity::Weights).unwrap().value, 8.0);
        assert_eq!(facts.spread(Quantity::Kv), Some((6.0, 7.0)));
    }

    #[test]
    fn sums_first_and_last_lines() {
        let mut facts = Facts::default();
        for (line, join) in [(1, Join::Sum), (2, Join::Sum), (3, Join::Sum)] {
            facts.add(Quantity::Kv, "", (2.0, 0.1), line, join);
        }
        assert_eq!(facts.figure(Quantity::Kv).unwrap().value, 6.0);
        assert!(facts.figure(Quantity::Kv).unwrap().explanation().contains("1, 2, 3, summed"));
        for (line, value) in [(1, 5.0), (2, 6.0)] {
            facts.add(Quantity::Weights, "", (value, 0.0), line, Join::First);
            facts.add(Quantity::Tokens, "", (value, 0.0), line, Join::Last);
        }
        assert_eq!(facts.whole(Quantity::Weights), Some(5));
        assert_eq!(facts.whole(Quantity::Tokens), Some(6));
    }
}
