//! What happens in a prefix cache, for whoever keeps a model of it (a router, a test).

use crate::ladder::Fidelity;

use super::identity::BlockHash;

/// Events that wait to be fetched at most.
const MOST_WAITING: usize = 1 << 16;

/// A change of a prefix cache. Replaying all of them, from an empty model on, gives its entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrefixEvent {
    /// An entry is there: new, or known already and now as said here.
    Stored {
        /// Identity of the block.
        hash: BlockHash,
        /// Identity of the block before; the root's bytes for the first one.
        parent: BlockHash,
        /// Tokens of the block.
        tokens: Vec<u32>,
        /// The strictest contract that can use it. Relief may lower it later; the entry is then told again.
        fidelity: Fidelity,
        /// Every window group's block is there too. A prefix can end only where the blocks of a window
        /// are; it can lead on where they are not.
        whole: bool,
    },
    /// An entry has gone. Those behind it went before.
    Removed {
        /// Identity of the block.
        hash: BlockHash,
    },
    /// All entries have gone.
    Cleared,
}

/// Events not yet fetched. Records nothing before the first fetch, nor after an overflow until the next:
/// a fetch then begins with [`PrefixEvent::Cleared`] and every entry.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    waiting: Vec<PrefixEvent>,
    recording: bool,
}

impl EventQueue {
    /// Whether changes are recorded: otherwise the next fetch tells everything.
    pub(crate) fn is_recording(&self) -> bool {
        self.recording
    }

    /// Records `event`.
    pub(crate) fn push(&mut self, event: PrefixEvent) {
        if !self.recording {
            return;
        }
        self.waiting.push(event);
        if self.waiting.len() >= MOST_WAITING {
            self.waiting = Vec::new();
            self.recording = false;
        }
    }

    /// Begins to record, with what an empty model must hear first.
    pub(crate) fn begin(&mut self, everything: impl Iterator<Item = PrefixEvent>) {
        self.waiting.clear();
        self.waiting.push(PrefixEvent::Cleared);
        self.waiting.extend(everything);
        self.recording = true;
    }

    pub(crate) fn drain(&mut self) -> std::vec::Drain<'_, PrefixEvent> {
        self.waiting.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_nobody_fetches_stays_small_and_tells_everything_later() {
        let mut queue = EventQueue::default();
        queue.push(PrefixEvent::Cleared);
        assert_eq!(queue.drain().count(), 0);
        queue.begin(std::iter::empty());
        let hash = BlockHash([1; 32]);
        for _ in 0..3 * MOST_WAITING {
            queue.push(PrefixEvent::Removed { hash });
            assert!(queue.waiting.len() < MOST_WAITING);
        }
        assert!(!queue.is_recording());
        queue.begin(std::iter::once(PrefixEvent::Removed { hash }));
        let told: Vec<PrefixEvent> = queue.drain().collect();
        assert_eq!(told, [PrefixEvent::Cleared, PrefixEvent::Removed { hash }]);
    }
}
