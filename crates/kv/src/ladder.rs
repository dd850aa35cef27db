//! Rungs (kinds of relief), contracts (what a request allows to be done to its KV) and the ladder (which
//! rungs a pool has, in what order, and what each costs).

use std::str::FromStr;

use crate::harm::HarmTable;
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

    /// The strictest contract that permits pages in `format`.
    pub fn of_format(format: PageFormat) -> Fidelity {
        match format {
            PageFormat::F16 => Fidelity::Exact,
            PageFormat::Int8 | PageFormat::Fp8E4M3 | PageFormat::Fp8E5M2 => Fidelity::Int8,
            PageFormat::K8V4 | PageFormat::Int4 => Fidelity::Int4,
        }
    }

    /// Whether a page of this request may be in `format`.
    pub fn permits_format(self, format: PageFormat) -> bool {
        self >= Fidelity::of_format(format)
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

/// Which rungs a pool climbs down, in what order, and what each is expected to cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Ladder {
    /// Enabled rungs, in the order in which they are used; each at most once.
    pub rungs: Vec<Rung>,
    /// Whether this model bears 4-bit keys; otherwise no page goes below [`PageFormat::K8V4`].
    pub four_bit_keys: bool,
    /// Expected harm per format and of dropping.
    pub harm: HarmTable,
}

impl Default for Ladder {
    fn default() -> Ladder {
        Ladder { rungs: Rung::ALL.to_vec(), four_bit_keys: true, harm: HarmTable::default() }
    }
}

impl Ladder {
    /// The ladder of `--ladder LIST`: comma-separated names of [`Rung`]s in the order of use, each at
    /// most once; those left out are disabled. `none` is the ladder without a rung.
    ///
    /// # Errors
    /// An unknown name, or a rung named twice.
    pub fn parse(list: &str) -> Result<Ladder, LadderError> {
        let mut rungs = Vec::new();
        let names = list.split(',').map(str::trim);
        for name in names.filter(|_| list.trim() != "none") {
            let Some(rung) = Rung::ALL.into_iter().find(|rung| rung.name() == name) else {
                return Err(LadderError::Unknown(name.to_string()));
            };
            if rungs.contains(&rung) {
                return Err(LadderError::Twice(rung.name()));
            }
            rungs.push(rung);
        }
        Ok(Ladder { rungs, ..Ladder::default() })
    }

    /// Whether relief may climb down `rung` for a request of `contract`: the rung is enabled, the
    /// contract permits it and the model bears it.
    pub fn permits(&self, contract: Fidelity, rung: Rung) -> bool {
        let borne = rung != Rung::Int4 || self.four_bit_keys;
        borne && contract.permits(rung) && self.rungs.contains(&rung)
    }

    /// The smallest format that relief may bring a sealed block of `contract` to.
    pub fn floor(&self, contract: Fidelity) -> PageFormat {
        let rungs = self.rungs.iter().filter(|rung| self.permits(contract, **rung));
        rungs.filter_map(|rung| rung.format()).max().unwrap_or(PageFormat::F16)
    }
}

/// A `--ladder` that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LadderError {
    /// Not the name of a rung.
    #[error("ladder: rung `{0}` is unknown: use a list of int8, k8v4, int4 and evict, or none")]
    Unknown(String),
    /// A rung that is named twice.
    #[error("ladder: rung `{0}` is named twice: name each rung at most once")]
    Twice(&'static str),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ladder_is_a_list_of_rungs() {
        let ladder = Ladder::parse("evict, int8").unwrap();
        assert_eq!(ladder.rungs, [Rung::Evict, Rung::Int8]);
        assert_eq!(ladder.floor(Fidelity::Evict), PageFormat::Int8);
        assert!(!ladder.permits(Fidelity::Evict, Rung::Int4));
        assert_eq!(Ladder::parse("none").unwrap().floor(Fidelity::Evict), PageFormat::F16);
        assert_eq!(Ladder::parse("int8,k8v4,int4,evict"), Ok(Ladder::default()));
        for (list, found) in [("int8,q4", "`q4`"), ("", "``"), ("int4,int4", "named twice")] {
            assert!(Ladder::parse(list).unwrap_err().to_string().contains(found), "{list}");
        }
    }

    #[test]
    fn the_floor_follows_contract_rungs_and_model() {
        let mut ladder = Ladder::default();
        let floors = |ladder: &Ladder| Fidelity::ALL.map(|contract| ladder.floor(contract));
        use PageFormat::{F16, Int4, Int8, K8V4};
        assert_eq!(floors(&ladder), [F16, Int8, Int4, Int4]);
        ladder.four_bit_keys = false;
        assert_eq!(floors(&ladder), [F16, Int8, K8V4, K8V4]);
        ladder.rungs.retain(|rung| *rung != Rung::K8V4);
        assert_eq!(floors(&ladder), [F16, Int8, Int8, Int8]);
    }

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
