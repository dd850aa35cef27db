//! Several continuations of one prompt, or the best of a beam search: shown when all have ended.

use std::ops::ControlFlow;
use std::time::Instant;

use reef_engine::event::{Continuation, FinishReason};
use reef_engine::stop::{Matched, StopMatcher};
use reef_engine::{Engine, Request};
use reef_model::tokenizer::{Decode, Tokenizer};
use serde_json::{Value, json};

use super::{Args, usage};
use crate::output::{note, print_json, print_line};
use crate::sizes::display;

/// Runs `request` to the end of all its branches and shows them.
pub fn run(
    args: &Args,
    tokenizer: &Tokenizer,
    engine: &mut Engine,
    request: Request,
) -> anyhow::Result<()> {
    let start = Instant::now();
    let outcome = engine.run_to_end(&request, &mut |_| ControlFlow::Continue(()))?;
    let seconds = start.elapsed().as_secs_f64();
    let shown: Vec<Shown> =
        outcome.continuations.iter().map(|of| Shown::new(of, tokenizer, &args.stop)).collect();
    let usage = &outcome.usage;
    if args.common.json {
        let first = shown.first().map(Shown::document).unwrap_or_default();
        let document = json!({
            "text": first["text"],
            "token_ids": first["token_ids"],
            "finish_reason": first["finish_reason"],
            "choices": shown.iter().map(Shown::document).collect::<Vec<_>>(),
            "usage": usage::document_of_usage(usage, usage.completion_tokens),
            "timings": { "total_ms": seconds * 1e3 },
        });
        return print_json(&document);
    }
    for (index, one) in shown.iter().enumerate() {
        if shown.len() > 1 {
            print_line(&format!("--- {} of {} ---", index + 1, shown.len()))?;
        }
        print_line(&one.text)?;
    }
    note(&format!(
        "{} prompt + {} generated tokens in {seconds:.1} s; KV memory: {} of {} at the peak, shared by \
         all branches",
        usage.prompt_tokens,
        usage.completion_tokens,
        display(usage.kv.peak_bytes as u64),
        display(usage.budget_bytes as u64),
    ));
    Ok(())
}

/// A continuation as it is shown.
struct Shown<'a> {
    continuation: &'a Continuation,
    text: String,
    reason: FinishReason,
}

impl<'a> Shown<'a> {
    fn new(continuation: &'a Continuation, tokenizer: &Tokenizer, stops: &[String]) -> Shown<'a> {
        let mut detokenizer =
            tokenizer.detokenizer(Decode { continues: true, ..Decode::default() });
        let mut text: String =
            continuation.token_ids.iter().map(|id| detokenizer.push(*id)).collect();
        text += &detokenizer.finish();
        let mut matcher = StopMatcher::new(stops);
        let (text, reason) = match matcher.push(&text) {
            Matched::Stop { text, .. } => (text, FinishReason::Stop),
            Matched::Text(text) => (text + &matcher.finish(), continuation.finish_reason),
        };
        Shown { continuation, text, reason }
    }

    fn document(&self) -> Value {
        json!({
            "text": self.text,
            "token_ids": self.continuation.token_ids,
            "finish_reason": self.reason.name(),
            "cumulative_logprob": self.continuation.cumulative_logprob,
        })
    }
}
