//! One continuation: its tokens become text until it ends.

use std::sync::Arc;

use reef_engine::FinishReason;
use reef_engine::stop::{Matched, StopMatcher};
use reef_model::tokenizer::{Decode, Detokenizer, Tokenizer};

use super::TextOptions;

/// The end of a continuation.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its index.
    pub choice: u32,
    /// Text that was held back.
    pub text: String,
    /// Why.
    pub reason: FinishReason,
    /// The stop string that ended it.
    pub stop: Option<String>,
}

/// What the next token led to.
pub(super) struct Pushed {
    /// Text that can be shown.
    pub text: String,
    /// Characters that the token completed.
    pub chars: usize,
    /// A stop string ended it.
    pub stop: bool,
}

/// A continuation as it grows.
pub(super) struct Choice {
    detokenizer: Detokenizer<Arc<Tokenizer>>,
    stops: StopMatcher,
    include_stop: bool,
    min_tokens: usize,
    stopped_at: Option<String>,
    tokens: usize,
    ended: bool,
}

impl Choice {
    pub(super) fn new(tokenizer: &Arc<Tokenizer>, options: &TextOptions) -> Choice {
        let decode = Decode { show_special: options.show_special, continues: true };
        Choice {
            detokenizer: Detokenizer::new(tokenizer.clone(), decode),
            stops: StopMatcher::new(&options.stops),
            include_stop: options.include_stop,
            min_tokens: options.min_tokens,
            stopped_at: None,
            tokens: 0,
            ended: false,
        }
    }

    /// Takes the next token. `None` after the end.
    pub(super) fn push(&mut self, token: u32) -> Option<Pushed> {
        if self.ended {
            return None;
        }
        self.tokens += 1;
        let piece = self.detokenizer.push(token);
        let chars = piece.chars().count();
        if self.tokens <= self.min_tokens {
            return Some(Pushed { text: piece, chars, stop: false });
        }
        Some(match self.stops.push(&piece) {
            Matched::Text(text) => Pushed { text, chars, stop: false },
            Matched::Stop { mut text, stop } => {
                if self.include_stop {
                    text += &stop;
                }
                self.stopped_at = Some(stop);
                Pushed { text, chars, stop: true }
            }
        })
    }

    /// Ends it; `None` if it has ended.
    pub(super) fn end(&mut self, choice: u32, reason: FinishReason) -> Option<Ended> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        let stop = self.stopped_at.take();
        let text = match stop {
            Some(_) => String::new(),
            None => self.stops.finish() + &self.detokenizer.clone().finish(),
        };
        Some(Ended { choice, text, reason, stop })
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Tokens taken before the end.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }
}
