//! Deliberate mistakes, for tests of the tests: each must be caught by the simulation. Compiled only with the
//! feature `mutants`, which nothing that ships enables.

use std::cell::Cell;

/// A mistake that can be switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// Pages given back during a step are used again at once.
    SkipFence,
    /// Attaching a cached block does not count as holding it.
    DropOwner,
    /// A shared open block is written in place.
    NoCopyOnWrite,
    /// A lookup finds blocks that the contract forbids.
    IgnoreFidelity,
    /// A hash that is equal is taken for equal tokens.
    SkipTokenCompare,
    /// All tenants' chains begin alike.
    ForgetSalt,
    /// A block counts as sealed one token early.
    SealEarly,
    /// What a block's computation has attended is forgotten.
    IgnoreContext,
    /// A window lets a block go while the next token still attends it.
    EarlyWindow,
    /// A commit accepts rejected drafts too.
    KeepRejected,
    /// A hit may cover the last token.
    LastToken,
    /// A compaction moves pages and tells no view.
    MoveUntold,
}

impl Mutant {
    /// Every one.
    pub const ALL: [Mutant; 12] = [
        Mutant::SkipFence,
        Mutant::DropOwner,
        Mutant::NoCopyOnWrite,
        Mutant::IgnoreFidelity,
        Mutant::SkipTokenCompare,
        Mutant::ForgetSalt,
        Mutant::SealEarly,
        Mutant::IgnoreContext,
        Mutant::EarlyWindow,
        Mutant::KeepRejected,
        Mutant::LastToken,
        Mutant::MoveUntold,
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
