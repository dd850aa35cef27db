//! A compiled grammar as the engine uses it.

use std::fmt;

use llguidance::Matcher;
use reef_engine::constraint::{Constraint, TokenMask};

/// Where a text stands in its grammar.
///
/// llguidance catches its own panics and counts its own work; once it has failed, nothing is allowed any
/// more and the request fails.
pub(super) struct Grammar {
    matcher: Matcher,
    /// Tokens of the vocabulary.
    tokens: usize,
}

impl Grammar {
    pub(super) fn new(matcher: Matcher, tokens: usize) -> Grammar {
        Grammar { matcher, tokens }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grammar {{ stopped: {:?} }}", self.matcher.stop_reason())
    }
}

impl Constraint for Grammar {
    fn allow(&mut self, mask: &mut TokenMask) {
        // The error stays in the matcher, where `fault` finds it.
        let Ok(allowed) = self.matcher.compute_mask_or_eos() else { return };
        for (word, from) in mask.words_mut().iter_mut().zip(allowed.as_slice()) {
            *word |= from;
        }
        // A model may have more logits than its vocabulary has tokens.
        let beyond = self.tokens % 32;
        if let Some(last) = mask.words_mut().get_mut(self.tokens / 32)
            && beyond > 0
        {
            *last &= (1 << beyond) - 1;
        }
    }

    fn accept(&mut self, token: u32) {
        if self.matcher.is_stopped() {
            return;
        }
        if let Err(error) = self.matcher.consume_token(token) {
            tracing::warn!(token, %error, "a grammar failed");
        }
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }

    fn fault(&self) -> Option<String> {
        self.matcher.get_error().map(|error| super::one_line(&error))
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        // The plain clone shares its lexer behind a lock, and with it the limit of lexer states.
        Box::new(Grammar { matcher: self.matcher.deep_clone(), tokens: self.tokens })
    }
}
