//! The append-only record of each step down: what, why, what it bought.

use crate::ladder::Rung;

/// Why a block gave way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Predicted demand exceeded free bytes.
    Demand,
    /// The kept tokens would have exceeded the trained context.
    Context,
    /// `--kv-format`: every sealed block is brought to one format.
    FormatAtSeal,
    /// `--budget`: at most so many tokens are kept.
    TokenBudget,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Reason; 4] =
        [Reason::Demand, Reason::Context, Reason::FormatAtSeal, Reason::TokenBudget];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Demand => "demand",
            Reason::Context => "context",
            Reason::FormatAtSeal => "format_at_seal",
            Reason::TokenBudget => "token_budget",
        }
    }
}

/// One step down of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LedgerEntry {
    /// The engine's step number before which it happened.
    pub step: u64,
    /// The request.
    pub request: u64,
    /// What was done.
    pub rung: Rung,
    /// Blocks it was done to (per KV group for re-encoding; over all full groups for drops, where the
    /// pages dropped in single layers count once they make up a block).
    pub blocks: usize,
    /// Bytes of pages it gave back; of a block that several requests hold, in the ledger of each.
    pub bytes: usize,
    /// Why.
    pub reason: Reason,
    /// Expected rise of the negative log-likelihood in nats per later token, by the pool's
    /// [`HarmTable`](crate::HarmTable), against the context held at that moment. Harms of re-encodes add
    /// up; those of drops do so only while the context lasts, for in a text without end what was dropped
    /// long ago would have left the mind of the model anyway.
    pub harm: f64,
}

/// Most entries one step can add: one per rung and reason.
const ENTRIES_A_STEP: usize = Rung::ALL.len() * Reason::ALL.len();

/// The entries of one request, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    entries: Vec<LedgerEntry>,
}

impl Ledger {
    /// Makes room for what the next step's relief can record, so that relief itself never allocates.
    pub(crate) fn reserve(&mut self) {
        self.entries.reserve(ENTRIES_A_STEP);
    }

    /// The same entries as another request's.
    pub(crate) fn of_request(&self, request: u64) -> Ledger {
        let entries = self.entries.iter().map(|entry| LedgerEntry { request, ..*entry });
        Ledger { entries: entries.collect() }
    }

    /// Adds `entry`; merged into the last one of the same step, rung and reason.
    pub(crate) fn record(&mut self, entry: LedgerEntry) {
        let same = self.entries.iter_mut().rev().take_while(|e| e.step == entry.step).find(|e| {
            e.request == entry.request && e.rung == entry.rung && e.reason == entry.reason
        });
        match same {
            Some(last) => {
                last.blocks += entry.blocks;
                last.bytes += entry.bytes;
                last.harm += entry.harm;
            }
            None => self.entries.push(entry),
        }
    }

    /// All entries, oldest first.
    pub fn entries(&self) -> &[LedgerEntry] {
        &self.entries
    }

    /// Blocks that climbed down `rung` so far.
    pub fn blocks(&self, rung: Rung) -> usize {
        self.entries.iter().filter(|e| e.rung == rung).map(|e| e.blocks).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_entries_of_one_step_and_rung() {
        let entry = |step, rung| LedgerEntry {
            step,
            request: 7,
            rung,
            blocks: 1,
            bytes: 100,
            reason: Reason::Demand,
            harm: 0.25,
        };
        let mut ledger = Ledger::default();
        for (step, rung) in [(1, Rung::Int8), (1, Rung::Evict), (1, Rung::Int8), (2, Rung::Int8)] {
            ledger.record(entry(step, rung));
        }
        assert_eq!(ledger.entries().len(), 3);
        assert_eq!(ledger.entries()[0].blocks, 2);
        assert_eq!(ledger.entries()[0].bytes, 200);
        assert_eq!(ledger.entries()[0].harm, 0.5);
        assert_eq!(ledger.blocks(Rung::Int8), 3);
    }
}
