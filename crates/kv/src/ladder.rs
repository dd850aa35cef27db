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
    /// Pages down to 4 bits a value.
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
        let strictest = match format {
            PageFormat::F16 => Fidelity::Exact,
            PageFormat::Int8 | PageFormat::Fp8E4M3 | PageFormat::Fp8E5M2 => Fidelity::Int8,
            PageFormat::K8V4 | PageFormat::Int4 => Fidelity::Int4,
        };
        self >= strictest
    }

    /// The smallest format that a sealed block may reach.
    pub fn floor(self) -> PageFormat {
        match self {
            Fidelity::Exact => PageFormat::F16,
            Fidelity::Int8 => PageFormat::Int8,
            Fidelity::Int4 | Fidelity::Evict => PageFormat::Int4,
        }
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rung {
    /// Sealed blocks re-encoded to 8 bits a value.
    Int8,
    /// Sealed blocks re-encoded to 8 bits for K and 4 for V.
    K8V4,
    /// Sealed blocks re-encoded to 4 bits a value.
    Int4,
    /// Blocks dropped.
    Evict,
}

impl Rung {
    /// Every rung, in the order in which a ladder is climbed down.
    pub const ALL: [Rung; 4] = [Rung::Int8, Rung::K8V4, Rung::Int4, Rung::Evict];

    /// The name in the ledger, in JSON and in `--ladder`.
    pub fn name(self) -> &'static str {
        match self {
            Rung::Int8 => "int8",
            Rung::K8V4 => "k8v4",
            Rung::Int4 => "int4",
            Rung::Evict => "evict",
        }
    }

    /// The strictest contract that permits it.
    pub fn requires(self) -> Fidelity {
        match self {
            Rung::Int8 => Fidelity::Int8,
            Rung::K8V4 | Rung::Int4 => Fidelity::Int4,
            Rung::Evict => Fidelity::Evict,
        }
    }

    /// The format that the rung brings blocks to; `None` where it drops them.
    pub fn format(self) -> Option<PageFormat> {
        match self {
            Rung::Int8 => Some(PageFormat::Int8),
            Rung::K8V4 => Some(PageFormat::K8V4),
            Rung::Int4 => Some(PageFormat::Int4),
            Rung::Evict => None,
        }
    }

    /// The rung that a re-encode to `format` counts as; `None` for f16, which no relief leads to. FP8
    /// has no rung of its own: it is 8 bits, asked for by `--kv-format`.
    pub fn to_format(format: PageFormat) -> Option<Rung> {
        match format {
            PageFormat::F16 => None,
            PageFormat::Int8 | PageFormat::Fp8E4M3 | PageFormat::Fp8E5M2 => Some(Rung::Int8),
            PageFormat::K8V4 => Some(Rung::K8V4),
            PageFormat::Int4 => Some(Rung::Int4),
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
            for rung in Rung::ALL {
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
