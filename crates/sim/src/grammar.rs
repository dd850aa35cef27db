//! A toy grammar with state: what comes next depends on how many came before, so that a sequence that
//! goes on with another's state, or with a stale one, leaves it.

use reef_engine::constraint::{Constraint, TokenMask};

/// Of every four neighbouring tokens one is barred, another one at each place.
#[derive(Clone, Debug, Default)]
pub struct Turning {
    accepted: u32,
}

impl Constraint for Turning {
    fn allow(&mut self, mask: &mut TokenMask) {
        let barred = self.accepted % 4;
        (0..mask.tokens() as u32).filter(|token| token % 4 != barred).for_each(|t| mask.insert(t));
    }

    fn accept(&mut self, _token: u32) {
        self.accepted += 1;
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Whether `tokens` are of this grammar.
pub fn is_turning(tokens: &[u32]) -> bool {
    tokens.iter().zip(0..).all(|(token, place)| token % 4 != place % 4)
}
