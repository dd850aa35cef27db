//! An engine that says what a test wrote down, at once.

use std::sync::{Arc, Mutex};

use reef_engine::event::{Continuation, Event, Outcome, Pause, Token, TokenLogprobs, Usage};
use reef_engine::handle::Listener;
use reef_engine::{EngineError, FinishReason, Refusal, Request};
use reef_kv::{ByFormat, KvUsage};
use reef_server::door::{Door, Look};

/// What the engine says to every request.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// Texts of the continuations, a token a byte.
    pub texts: Vec<String>,
    /// They end by themselves; else at the limit.
    pub ends: bool,
    /// Stands still after the first token.
    pub pause: Option<Pause>,
    /// Tokens of the KV that were dropped in the end.
    pub dropped_tokens: f64,
    /// Says no instead.
    pub refusal: Option<Refusal>,
    /// Log-probability of every generated token; -0.5 where none is given.
    pub logprob: Option<f32>,
    /// Goes silent after the texts, and ends when it is told to.
    pub hangs: bool,
}

impl Script {
    /// One continuation that ends by itself.
    pub fn says(text: &str) -> Script {
        Script { texts: vec![text.into()], ends: true, ..Script::default() }
    }
}

/// An engine that follows a script.
pub struct ScriptedDoor {
    script: Script,
    /// What was asked.
    pub asked: Mutex<Vec<Request>>,
    /// Who was ended.
    pub ended: Mutex<Vec<(u64, FinishReason)>>,
    /// Which continuations were ended.
    pub ended_branches: Mutex<Vec<(u64, u32)>>,
    /// Listeners of those who hang, and how these will end.
    hanging: Mutex<Vec<(Listener, Outcome)>>,
}

impl ScriptedDoor {
    pub fn new(script: Script) -> ScriptedDoor {
        let (asked, ended, ended_branches, hanging) = Default::default();
        ScriptedDoor { script, asked, ended, ended_branches, hanging }
    }

    /// Lets go of those who hang, as an engine does when it has ended them.
    pub fn let_go(&self) {
        self.hanging.lock().unwrap().clear();
    }

    /// Ends those who hang.
    pub fn finish(&self) {
        for (mut listener, outcome) in self.hanging.lock().unwrap().drain(..) {
            listener(Event::Finished(Box::new(outcome)));
        }
    }

    fn logprobs(&self, request: &Request, id: u32) -> Option<TokenLogprobs> {
        let top = (0..request.logprobs?).map(|place| (b'a' as u32 + place as u32, -1.0));
        Some(TokenLogprobs { id, logprob: self.script.logprob.unwrap_or(-0.5), top: top.collect() })
    }

    /// Tells all of the script; gives the continuations.
    fn tell(&self, request: &Request, say: &mut dyn FnMut(Event)) -> Vec<Continuation> {
        let limit = request.max_tokens.unwrap_or(usize::MAX);
        say(Event::Admitted { max_tokens: limit, cached_tokens: 0 });
        if request.prompt_logprobs.is_some() {
            let tokens = request.prompt.iter().skip(1);
            let known = tokens.map(|id| TokenLogprobs { id: *id, logprob: -2.0, top: Vec::new() });
            say(Event::PromptLogprobs(known.collect()));
        }
        let mut continuations = Vec::new();
        for (branch, text) in self.script.texts.iter().enumerate() {
            let ids: Vec<u32> = text.bytes().map(u32::from).take(limit).collect();
            let ended = self.script.ends && ids.len() == text.len();
            let finish_reason = if ended { FinishReason::Stop } else { FinishReason::Length };
            for (place, &id) in ids.iter().enumerate() {
                let logprobs = self.logprobs(request, id);
                let is_last = !ended && place + 1 == ids.len();
                say(Event::Token(Token { branch: branch as u32, id, logprobs, is_last }));
                if let Some(pause) = self.script.pause.filter(|_| branch == 0 && place == 0) {
                    say(Event::Paused(pause));
                    say(Event::Resumed { branch: 0, recomputed_tokens: 0, paused_us: 5 });
                }
            }
            if branch + 1 < self.script.texts.len() {
                say(Event::Ended { branch: branch as u32, reason: finish_reason });
            }
            continuations.push(Continuation {
                logprobs: ids.iter().filter_map(|id| self.logprobs(request, *id)).collect(),
                token_ids: ids,
                finish_reason,
                cumulative_logprob: None,
            });
        }
        continuations
    }

    fn usage(&self, request: &Request, continuations: &[Continuation]) -> Usage {
        Usage {
            prompt_tokens: request.prompt.len(),
            completion_tokens: continuations.iter().map(|one| one.token_ids.len()).sum(),
            cached_tokens: 0,
            fidelity: request.fidelity,
            budget_bytes: 1 << 20,
            max_tokens_limit: request.max_tokens.unwrap_or(1024),
            kv: KvUsage {
                tokens_by_format: ByFormat::default(),
                dropped_tokens: self.script.dropped_tokens,
                held_bytes: 0,
                peak_bytes: 4096,
                bytes_at_f16: 4096,
                relief: Vec::new(),
            },
            pauses: self.script.pause.into_iter().collect(),
            recomputed_tokens: 0,
            drafts: (0, 0),
        }
    }
}

impl Door for ScriptedDoor {
    fn submit(&self, request: Request, mut listener: Listener) -> Result<u64, EngineError> {
        let mut asked = self.asked.lock().unwrap();
        let key = asked.len() as u64;
        asked.push(request.clone());
        if let Some(refusal) = &self.script.refusal {
            listener(Event::Failed(Arc::new(refusal.clone().into())));
            return Ok(key);
        }
        listener(Event::Accepted);
        let continuations = self.tell(&request, &mut |event| {
            // Who does not listen is ended through `end`.
            let _ = listener(event);
        });
        let usage = self.usage(&request, &continuations);
        let outcome = Outcome { continuations, usage };
        match self.script.hangs {
            true => self.hanging.lock().unwrap().push((listener, outcome)),
            false => drop(listener(Event::Finished(Box::new(outcome)))),
        }
        Ok(key)
    }

    fn end(&self, key: u64, reason: FinishReason) {
        self.ended.lock().unwrap().push((key, reason));
    }

    fn end_branch(&self, key: u64, branch: u32, _: FinishReason) {
        self.ended_branches.lock().unwrap().push((key, branch));
    }

    fn look(&self, look: Look) {
        look(None);
    }

    fn now_us(&self) -> u64 {
        1000
    }

    fn is_alive(&self) -> bool {
        true
    }
}
