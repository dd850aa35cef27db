//! Rungs (kinds of relief) and contracts (what a request allows to be done to its KV).

use std::str::FromStr;

use crate::page::PageFormat;

/// What a request allows to be done to its KV. Ordered: each permits what those before it permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fidelity {
    /// Nothing lossy.
    Exact,
    /// Pages down to 8 bits a value.
    Int8,
    /// Pages down to 4 bits a value (until 4-bit pages exist it stops at 8).
    Int4,
    /// Blocks may be dropped.
    Evict,
}

impl Fidelity {
    /// Every contract, strictest first.
    pub const ALL: [Fidelity; 4] =
        [Fidelity::Exact, Fidelity::Int8, Fidelity::Int4, Fidelity::Evict];

    /// The name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Fidelity::Exact => "exact",
            Fidelity::Int8 => "int8",
            Fidelity::Int4 => "int4",
            Fidelity::Evict => "evict",
        }
    }

    /// Whether relief may climb down `rung` for a request of this contract.
    pub fn permits(self, rung: Rung) -> bool {
        self >= rung.requires()
    }

    /// Whether a page of this request may be in `format`.
    pub fn permits_format(self, format: PageFormat) -> bool {
        match format {
            PageFormat::F16 => true,
            PageFormat::Int8 => self.permits(Rung::Int8),
        }
    }

    /// The smallest format that a sealed block may reach.
    pub fn floor(self) -> PageFormat {
        if self.permits(Rung::Int8) { PageFormat::Int8 } else { PageFormat::F16 }
    }
}

/// A contract's name that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fidelity `{0}` is unknown: use exact, int8, int4 or evict")]
pub struct UnknownFidelity(String);

impl FromStr for Fidelity {
    type Err = UnknownFidelity;
    fn from_str(name: &str) -> Result<Fidelity, UnknownFidelity> {
        Fidelity::ALL
            .into_iter()
            .find(|fidelity| fidelity.name() == name)
            .ok_or_else(|| UnknownFidelity(name.to_string()))
    }
}

/// One kind of relief.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rung {
    /// Sealed f16 blocks re-encoded to 8 bits a value.
    Int8,
    /// Blocks dropped, all layers of every full-attention group.
    Evict,
}

impl Rung {
    /// The name in the ledger and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Rung::Int8 => "int8",
            Rung::Evict => "evict",
        }
    }

    /// The strictest contract that permits it.
    pub fn requires(self) -> Fidelity {
        match self {
            Rung::Int8 => Fidelity::Int8,
            Rung::Evict => Fidelity::Evict,
        }
    }

    /// The rung that brings a block to `format`; `None` for f16, which no relief leads to.
    pub fn to_format(format: PageFormat) -> Option<Rung> {
        match format {
            PageFormat::F16 => None,
            PageFormat::Int8 => Some(Rung::Int8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contracts_are_ordered_and_parse_their_names() {
        for pair in Fidelity::ALL.windows(2) {
            assert!(pair[0] < pair[1]);
            for rung in [Rung::Int8, Rung::Evict] {
                assert!(!pair[0].permits(rung) || pair[1].permits(rung));
            }
        }
        for fidelity in Fidelity::ALL {
            assert_eq!(fidelity.name().parse(), Ok(fidelity));
        }
        assert!("f16".parse::<Fidelity>().unwrap_err().to_string().contains("use exact"));
        assert!(!Fidelity::Exact.permits(Rung::Int8));
        assert!(!Fidelity::Int4.permits(Rung::Evict));
    }
}
