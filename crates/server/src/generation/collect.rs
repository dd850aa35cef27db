//! A request's whole answer, for responses that are not streamed.

use reef_engine::event::{Continuation, TokenLogprobs};
use reef_engine::{FinishReason, Usage};

use super::choice::Choice;
use super::{Finish, Generation, Update};
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
    /// The text that each token let out, in order: they make up `text`, less what was held back to the end.
    pub pieces: Vec<String>,
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
            pieces: Vec::new(),
            logprobs: Vec::new(),
            reason: FinishReason::Cancelled,
            stop: None,
        }
    }

    fn push(&mut self, token: u32, text: String, logprobs: Option<TokenLogprobs>) {
        self.text += &text;
        self.token_ids.push(token);
        self.pieces.push(text);
        self.logprobs.extend(logprobs);
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
                let one = &mut completed[piece.choice as usize];
                one.push(piece.token_id, piece.text, piece.logprobs);
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
    for &token in &continuation.token_ids {
        let Some((text, stopped)) = choice.push(token) else { break };
        completed.push(token, text, logprobs.next().cloned());
        if stopped {
            completed.reason = FinishReason::Stop;
            completed.stop = choice.end(0, FinishReason::Stop).and_then(|ended| ended.stop);
            return completed;
        }
    }
    completed.reason = continuation.finish_reason;
    completed.text += &choice.end(0, completed.reason).map(|ended| ended.text).unwrap_or_default();
    completed
}
