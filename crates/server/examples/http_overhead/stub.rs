//! An engine that computes nothing: it tells all streams their next token, step by step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reef_engine::event::{Continuation, Event, Outcome, Token, Usage};
use reef_engine::handle::Listener;
use reef_engine::{EngineError, FinishReason, Request};
use reef_kv::{ByFormat, Fidelity, KvUsage};
use reef_server::door::{Door, Look};

/// When the next step comes.
#[derive(Clone, Copy, Debug, Default)]
pub enum Pace {
    /// When the server has looked at what it was told.
    #[default]
    AsTaken,
    /// So long after the last.
    Every(Duration),
    /// Each stream's first token so long after it was asked for, the others at once.
    Delayed(Duration),
}

/// What was told since [`StubDoor::set`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Told {
    /// Tokens.
    pub tokens: usize,
    /// From the first step to the end of the last.
    pub elapsed: Duration,
    /// Of that, in listeners: what the server takes of an engine's thread.
    pub telling: Duration,
}

/// Name of its thread.
pub const THREAD: &str = "stub-engine";

#[derive(Default)]
struct State {
    pace: Pace,
    /// Streams that must be there before the first step.
    together: usize,
    told: Told,
}

/// The door to it.
pub struct StubDoor {
    streams: Mutex<Sender<Stream>>,
    state: Mutex<State>,
    /// From asking to telling, in nanoseconds, of the last stream's first token.
    first_token_ns: AtomicU64,
}

struct Stream {
    listener: Listener,
    asked: Instant,
    told: usize,
    most: usize,
    fidelity: Fidelity,
}

impl StubDoor {
    /// An engine's thread that says `ids` again and again; `runtime` is the server's.
    pub fn start(ids: Vec<u32>, runtime: tokio::runtime::Handle) -> Arc<StubDoor> {
        let (sender, streams) = channel();
        let door = Arc::new(StubDoor {
            streams: Mutex::new(sender),
            state: Mutex::new(State::default()),
            first_token_ns: AtomicU64::new(0),
        });
        let teller = door.clone();
        let run = move || teller.run(&ids, &streams, &runtime);
        let thread = std::thread::Builder::new().name(THREAD.into());
        // It ends with the process.
        drop(thread.spawn(run).expect("a thread"));
        door
    }

    /// How the next streams are told, of which `together` start as one.
    pub fn set(&self, pace: Pace, together: usize) {
        *self.state.lock().expect("not poisoned") = State { pace, together, told: Told::default() };
    }

    /// What was told.
    pub fn told(&self) -> Told {
        self.state.lock().expect("not poisoned").told
    }

    /// From asking to telling, of the last stream's first token.
    pub fn first_token(&self) -> Duration {
        Duration::from_nanos(self.first_token_ns.load(Ordering::Acquire))
    }

    fn run(&self, ids: &[u32], streams: &Receiver<Stream>, runtime: &tokio::runtime::Handle) {
        while let Ok(first) = streams.recv() {
            let (pace, together) = {
                let state = self.state.lock().expect("not poisoned");
                (state.pace, state.together)
            };
            let mut live = vec![first];
            while live.len() < together {
                live.push(streams.recv().expect("the server lives"));
            }
            let start = Instant::now();
            let mut told = Told::default();
            while !live.is_empty() {
                wait(pace, &live, start, runtime);
                if live[0].told == 0 {
                    let first = live[0].asked.elapsed().as_nanos() as u64;
                    self.first_token_ns.store(first, Ordering::Release);
                }
                told.tokens += live.len();
                let before = Instant::now();
                live.retain_mut(|stream| stream.tell(ids));
                told.telling += before.elapsed();
            }
            told.elapsed = start.elapsed();
            self.state.lock().expect("not poisoned").told = told;
        }
    }
}

fn wait(pace: Pace, live: &[Stream], start: Instant, runtime: &tokio::runtime::Handle) {
    match pace {
        Pace::AsTaken => {
            // Tasks run in the order in which they were woken: behind all that the last step woke.
            let (sender, looked) = channel();
            runtime.spawn(async move { sender.send(()) });
            looked.recv().expect("the server lives");
        }
        Pace::Every(step) => {
            let due = step * (live[0].told as u32 + 1);
            std::thread::sleep(due.saturating_sub(start.elapsed()));
        }
        Pace::Delayed(first) if live[0].told == 0 => {
            std::thread::sleep(first.saturating_sub(live[0].asked.elapsed()));
        }
        Pace::Delayed(_) => {}
    }
}

impl Stream {
    /// Tells the next token; `false` behind the last.
    fn tell(&mut self, ids: &[u32]) -> bool {
        let id = ids[self.told % ids.len()];
        self.told += 1;
        let is_last = self.told == self.most;
        let listens =
            (self.listener)(Event::Token(Token { branch: 0, id, logprobs: None, is_last }));
        if listens && !is_last {
            return true;
        }
        let outcome = Box::new(self.outcome());
        (self.listener)(Event::Finished(outcome));
        false
    }

    fn outcome(&self) -> Outcome {
        let continuation = Continuation {
            token_ids: vec![0; self.told],
            finish_reason: FinishReason::Length,
            cumulative_logprob: None,
            logprobs: Vec::new(),
        };
        let kv = KvUsage {
            tokens_by_format: ByFormat::default(),
            dropped_tokens: 0.0,
            held_bytes: 0,
            peak_bytes: 0,
            bytes_at_f16: 0,
            relief: Vec::new(),
        };
        let usage = Usage {
            prompt_tokens: 1,
            completion_tokens: self.told,
            cached_tokens: 0,
            fidelity: self.fidelity,
            budget_bytes: 1 << 30,
            max_tokens_limit: self.most,
            kv,
            pauses: Vec::new(),
            recomputed_tokens: 0,
            drafts: (0, 0),
        };
        Outcome { continuations: vec![continuation], usage }
    }
}

impl Door for StubDoor {
    fn submit(&self, request: Request, mut listener: Listener) -> Result<u64, EngineError> {
        listener(Event::Accepted);
        let most = request.max_tokens.unwrap_or(1);
        listener(Event::Admitted { max_tokens: most, cached_tokens: 0 });
        let fidelity = request.fidelity;
        let stream = Stream { listener, asked: Instant::now(), told: 0, most, fidelity };
        // The stub's thread lives as long as the process.
        let _ = self.streams.lock().expect("not poisoned").send(stream);
        Ok(0)
    }

    fn end(&self, _: u64, _: FinishReason) {}

    fn end_branch(&self, _: u64, _: u32, _: FinishReason) {}

    fn look(&self, look: Look) {
        look(None);
    }

    fn now_us(&self) -> u64 {
        0
    }

    fn is_alive(&self) -> bool {
        true
    }
}
