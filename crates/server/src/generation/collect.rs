//! A request's whole answer, for responses that are not streamed.

use reef_engine::event::{Continuation, TokenLogprobs};
use reef_engine::{FinishReason, Usage};

use super::choice::{Choice, Pushed};
use super::{Finish, Generation, Piece, Update};
use crate::error::ApiError;

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Collected {
    /// The continuations asked for, by index; best first where they were ranked.
    pub completed: Vec<Completed>,
    /// Of each prompt token but the first, where asked for.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Generated tokens of the continuations.
    pub completion_tokens: usize,
    /// What it took.
    pub usage: Usage,
}

/// A whole continuation.
#[derive(Clone, Debug)]
pub struct Completed {
    /// Its text.
    pub text: String,
    /// Its tokens, without the one that ended it.
    pub token_ids: Vec<u32>,
    /// Of each token the characters that it completed.
    pub chars: Vec<usize>,
    /// Of each token, where asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub reason: FinishReason,
    /// The stop string that ended it.
    pub stop: Option<String>,
}

impl Completed {
    fn empty() -> Completed {
        Completed {
            text: String::new(),
            token_ids: Vec::new(),
            chars: Vec::new(),
            logprobs: Vec::new(),
            reason: FinishReason::Cancelled,
            stop: None,
        }
    }

    fn push(&mut self, piece: Piece) {
        self.text += &piece.text;
        self.token_ids.push(piece.token_id);
        self.chars.push(piece.chars);
        self.logprobs.extend(piece.logprobs);
    }
}

pub(super) async fn collect(mut generation: Generation) -> Result<Collected, ApiError> {
    let mut completed: Vec<Completed> =
        generation.choices.iter().map(|_| Completed::empty()).collect();
    let mut prompt_logprobs = Vec::new();
    while let Some(update) = generation.next().await {
        match update {
            Update::Admitted { .. } | Update::Paused(_) | Update::Resumed => {}
            Update::PromptLogprobs(more) => prompt_logprobs.extend(more),
            Update::Piece(piece) => {
                completed[piece.choice as usize].push(piece);
            }
            Update::Ended(ended) => {
                let one = &mut completed[ended.choice as usize];
                one.text += &ended.text;
                (one.reason, one.stop) = (ended.reason, ended.stop);
            }
            Update::Failed(error) => return Err(error),
            Update::Finished(finish) => {
                let Finish { completion_tokens, outcome } = *finish;
                if completed.is_empty() {
                    let ranked = outcome.continuations.iter();
                    completed = ranked.map(|one| retell(&generation, one)).collect();
                }
                let usage = outcome.usage;
                return Ok(Collected { completed, prompt_logprobs, completion_tokens, usage });
            }
        }
    }
    Err(ApiError::internal("the request ended without a word"))
}

/// The text of a continuation whose tokens are all there.
fn retell(generation: &Generation, continuation: &Continuation) -> Completed {
    let mut choice = Choice::new(&generation.tokenizer, &generation.text);
    let mut completed = Completed::empty();
    let mut logprobs = continuation.logprobs.iter();
    for &token_id in &continuation.token_ids {
        let Some(Pushed { text, chars, stop }) = choice.push(token_id) else { break };
        completed.push(Piece {
            choice: 0,
            text,
            chars,
            token_id,
            logprobs: logprobs.next().cloned(),
        });
        if stop {
            completed.reason = FinishReason::Stop;
            completed.stop = choice.end(0, FinishReason::Stop).and_then(|ended| ended.stop);
            return completed;
        }
    }
    completed.reason = continuation.finish_reason;
    completed.text += &choice.end(0, completed.reason).map(|ended| ended.text).unwrap_or_default();
    completed
}
