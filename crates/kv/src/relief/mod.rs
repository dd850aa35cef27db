//! Relief: what gives way when predicted demand exceeds free bytes.
//!
//! [`plan_relief`] and its siblings are pure: they look and return moves. [`apply_relief`] carries
//! the moves out between steps: it reserves target pages, has the caller's kernel encode into them,
//! swaps the table entries, then frees the old pages. It never allocates outside the arena's reserve,
//! and a panic in the kernel leaves the old pages live and leaks nothing.

mod apply;
mod batch;
mod convert;
mod demand;
mod drops;
mod forecast;
mod holders;
mod order;
mod plan;
mod stage;
mod victim;

pub use apply::{ReliefError, ReliefOutcome, StepDown, StepsDown, apply_relief};
pub use batch::{BATCH_PAGES, EncodeJob};
pub use demand::{Demand, relief_needed_bytes};
pub use drops::{DropTarget, plan_token_budget};
pub use order::plan_format_at_seal;
pub use plan::{held_bytes_together, plan_quota, plan_relief};
pub(crate) use victim::Zone;

use crate::ladder::Rung;
use crate::ledger::Reason;
use crate::page::PageFormat;
use crate::pool::Shortage;

/// Blocks dropped at once at least (the low-water mark), so that relief comes in batches and the run
/// numbering is not redone at every block.
pub const EVICT_BATCH_BLOCKS: usize = 4;

/// What a move does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveKind {
    /// Re-encode the pages of one block of one KV group that can become the format and are neither pinned
    /// nor refused.
    Encode {
        /// KV group.
        group: usize,
        /// Format to encode to.
        format: PageFormat,
    },
    /// Drop one block, or its page of one layer.
    Drop(DropTarget),
}

/// One move of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// The request whose block gives way; of several that share it, the first of the highest priority.
    pub request: u64,
    /// Original position of the block's first token.
    pub first: usize,
    /// What is done.
    pub kind: MoveKind,
    /// Bytes of pages it gives back.
    pub bytes: usize,
    /// Expected rise of the negative log-likelihood in nats per later token, over all that hold it.
    pub harm: f64,
    /// Why.
    pub reason: Reason,
    /// Where the block's record is likely to be found; of a drop in several KV groups, that of the first.
    pub(crate) likely_block: u32,
}

impl Move {
    /// The rung this move belongs to.
    pub fn rung(&self) -> Rung {
        match self.kind {
            MoveKind::Drop(_) => Rung::Evict,
            // Plans never encode to f16.
            MoveKind::Encode { format, .. } => Rung::to_format(format).unwrap_or(Rung::Int8),
        }
    }
}

/// Moves in the order in which they are carried out; they may be none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReliefPlan {
    /// Drops first, because they make room, then re-encodes.
    pub moves: Vec<Move>,
    /// `Some`: the moves do not suffice, by these numbers (after the moves). Ask for less (a smaller
    /// chunk) or make the request wait.
    pub shortage: Option<Shortage>,
    /// Pages per size class that must fit afterwards.
    pub(crate) demand_pages: Vec<usize>,
    /// Partly filled spans must be emptied even without a move.
    pub(crate) compaction: bool,
    /// By request, ascending: the weight of its pages, by which the harm to a block that several hold is
    /// shared out. Empty where no move is of such a block.
    pub(crate) weights: Vec<(u64, f64)>,
}

impl ReliefPlan {
    /// Whether there is nothing to carry out.
    pub fn is_empty(&self) -> bool {
        self.moves.is_empty() && !self.compaction
    }

    /// Bytes of pages that the moves give back.
    pub fn gained_bytes(&self) -> usize {
        self.moves.iter().map(|planned| planned.bytes).sum()
    }

    /// Expected rise of the negative log-likelihood in nats per later token, over all requests.
    pub fn harm(&self) -> f64 {
        self.moves.iter().map(|planned| planned.harm).sum()
    }
}
