//! Prefixes computed before.

pub mod chain;
pub mod identity;
pub mod index;
pub mod radix;
pub mod tree;

pub use chain::ChainIndex;
pub use identity::{BlockHash, BlockHasher, PrefixIdentity, PrefixRoot};
pub use index::{IndexKind, PrefixIndex};
pub use radix::RadixIndex;
pub use tree::{EntryId, EntryTree};
