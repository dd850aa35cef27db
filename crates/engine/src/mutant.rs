//! Deliberate mistakes, for tests of the tests: each must be caught by the simulation. Compiled only with the
//! feature `mutants`, which nothing that ships enables.

use std::cell::Cell;

/// A mistake that can be switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// A completion is taken for whichever run has its slot, whatever its step and generation.
    TakeAnyCompletion,
    /// A preempted run draws its random numbers from the first one again.
    FreshSampler,
    /// Drafts are kept without a look at what was sampled.
    TrustDrafts,
    /// What the spill store reads is not compared with its checksum.
    SkipChecksum,
    /// A run that leaves keeps its slot.
    LeakSlot,
}

impl Mutant {
    /// Every one.
    pub const ALL: [Mutant; 5] = [
        Mutant::TakeAnyCompletion,
        Mutant::FreshSampler,
        Mutant::TrustDrafts,
        Mutant::SkipChecksum,
        Mutant::LeakSlot,
    ];
}

thread_local! {
    static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// Makes this mistake on this thread from now on, and no other.
pub fn activate(mutant: Option<Mutant>) {
    ACTIVE.set(mutant);
}

/// Whether this mistake is to be made.
pub(crate) fn is_active(mutant: Mutant) -> bool {
    ACTIVE.get() == Some(mutant)
}
