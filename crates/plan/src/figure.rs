//! A number that says where it comes from: measured, derived or assumed.

use serde::Serialize;

/// What a [`Figure`]'s value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Bytes of memory.
    Bytes,
    /// Bytes of KV memory per token.
    BytesPerToken,
    /// Tokens.
    Tokens,
    /// KV blocks.
    Blocks,
    /// Sequences (requests) at once; fractions as engines print them.
    Sequences,
    /// A share between 0 and 1, or another plain ratio.
    Ratio,
    /// Milliseconds.
    Milliseconds,
    /// Seconds.
    Seconds,
    /// Tokens per second.
    TokensPerSecond,
    /// Requests per second.
    RequestsPerSecond,
    /// Bytes per second.
    BytesPerSecond,
    /// Floating-point operations per second.
    FlopPerSecond,
    /// Floating-point operations per byte.
    FlopPerByte,
    /// A count of anything else, named by the line it stands in.
    Count,
}

/// Where a number comes from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "provenance", rename_all = "snake_case")]
pub enum Provenance {
    /// Read from a log or a flag that the user gave.
    Measured {
        /// The log line, flag or file it was read from.
        source: String,
    },
    /// Follows from other figures.
    Derived {
        /// The formula with the numbers put in.
        formula: String,
    },
    /// A model of what an engine does, with the range that it is expected to stay in.
    Assumed {
        /// Why this value and this range.
        reason: String,
    },
}

/// A number with its unit, its range and where it comes from. `low == high == value` where nothing
/// uncertain went into it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Best estimate.
    pub value: f64,
    /// Smallest value that the inputs allow.
    pub low: f64,
    /// Largest value that the inputs allow.
    pub high: f64,
    /// What it counts.
    pub unit: Unit,
    /// Where it comes from.
    #[serde(flatten)]
    pub provenance: Provenance,
}

impl Figure {
    /// A number that somebody measured or set; `source` says who and where.
    pub fn measured(value: f64, unit: Unit, source: impl Into<String>) -> Figure {
        let provenance = Provenance::Measured { source: source.into() };
        Figure { value, low: value, high: value, unit, provenance }
    }

    /// A number that follows from others; `formula` shows how, with the numbers put in.
    pub fn derived(value: f64, unit: Unit, formula: impl Into<String>) -> Figure {
        let provenance = Provenance::Derived { formula: formula.into() };
        Figure { value, low: value, high: value, unit, provenance }
    }

    /// A number that is a model's estimate, expected in `low..=high`.
    pub fn assumed(
        value: f64,
        low: f64,
        high: f64,
        unit: Unit,
        reason: impl Into<String>,
    ) -> Figure {
        let provenance = Provenance::Assumed { reason: reason.into() };
        Figure { value, low, high, unit, provenance }
    }

    /// The same figure with the range that its inputs leave it.
    pub fn within(self, low: f64, high: f64) -> Figure {
        Figure { low: low.min(high), high: low.max(high), ..self }
    }

    /// Whether the figure is known exactly.
    pub fn is_exact(&self) -> bool {
        self.low == self.high
    }

    /// One word for tables: `measured`, `derived` or `assumed`.
    pub fn provenance_word(&self) -> &'static str {
        match self.provenance {
            Provenance::Measured { .. } => "measured",
            Provenance::Derived { .. } => "derived",
            Provenance::Assumed { .. } => "assumed",
        }
    }

    /// The source, formula or reason behind the number.
    pub fn explanation(&self) -> &str {
        match &self.provenance {
            Provenance::Measured { source } => source,
            Provenance::Derived { formula } => formula,
            Provenance::Assumed { reason } => reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_names_the_provenance_and_its_words() {
        let figure = Figure::derived(6.0, Unit::Bytes, "2 * 3").within(7.0, 5.0);
        let json = serde_json::to_value(&figure).unwrap();
        assert_eq!(json["provenance"], "derived");
        assert_eq!(json["formula"], "2 * 3");
        assert_eq!((figure.low, figure.high), (5.0, 7.0));
        assert!(!figure.is_exact());
    }
}
