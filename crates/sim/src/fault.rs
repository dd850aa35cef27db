//! What the fake executor lets go wrong, and how often.

use crate::random::Random;

/// Faults in percent of the occasions for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRates {
    /// A step takes a multiple of its time.
    pub delay: u64,
    /// Completions come in another order.
    pub reorder: u64,
    /// No completion of a step comes.
    pub lose_step: u64,
    /// The completion of one piece of work never comes.
    pub lose: u64,
    /// It comes twice, the second time perhaps steps later.
    pub duplicate: u64,
    /// It comes after the executor has said that it is idle.
    pub late: u64,
    /// The encode kernel finds NaN in a page.
    pub refuse_page: u64,
}

/// What becomes of one piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Computed and told.
    InTime,
    /// Computed in so many layers, not told.
    Lost {
        /// Layers whose KV was written.
        layers: usize,
    },
    /// Computed and told twice.
    Twice,
    /// Computed and told when the executor is idle already.
    Late,
}

impl FaultRates {
    /// What becomes of a piece of work.
    pub fn fate(&self, random: &mut Random) -> Fate {
        let draw = random.between(0, 99);
        if draw < self.lose {
            Fate::Lost { layers: random.size(0, 6) }
        } else if draw < self.lose + self.duplicate {
            Fate::Twice
        } else if draw < self.lose + self.duplicate + self.late {
            Fate::Late
        } else {
            Fate::InTime
        }
    }
}
