//! Faults that users of other engines met, by kind: each test names the rows of `docs/cases.md` that it
//! covers. Tiny models, so small pools that everything is short, virtual time.

mod aborts;
mod branches;
mod door;
mod exhaustion;
mod offload;
mod preemption;
mod prefix;
mod priorities;
mod totals;
mod view;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use reef_engine::config::pool_config;
use reef_engine::event::{Pause, PauseKind, TokenLogprobs};
use reef_engine::store::{FaultScript, SimulatedSpill, SpillClock, SpillSize, SpillTiming};
use reef_engine::{
    AdmissionPolicy, Engine, EngineConfig, Event, Outcome, PrefixSettings, Progress, Request, Told,
};
use reef_kv::page::PageFormat;
use reef_kv::prefix::IndexKind;
use reef_kv::{BlockPool, Fidelity};

use crate::support::drive::engine_config;
use crate::support::faulty::{Deed, faulty_engine};
use crate::support::random::Random;
use crate::support::tiny::{Tiny, TinyModel};

/// Tokens of a block.
const BLOCK: usize = 32;
/// Bytes of a slot of the spill stores here: a block of [`plain`] takes three.
const SLOT_BYTES: usize = 4 << 10;
const VOCABULARY: usize = 101;

/// Two layers of full attention: 8 KiB a block at f16.
fn plain() -> TinyModel {
    shape("llama").build()
}

/// Two layers with a window of 40 tokens and one of full attention: 12 KiB a block at f16.
fn hybrid() -> TinyModel {
    Tiny { layers: 3, ..shape("gemma3") }.build()
}

fn shape(architecture: &'static str) -> Tiny {
    Tiny { layers: 2, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new(architecture) }
}

/// The smallest budget whose pool holds `blocks` blocks of one exact sequence.
fn budget_of(model: &TinyModel, blocks: usize) -> usize {
    let runner = model.plain_runner();
    let holds = |budget_bytes: usize| {
        let pool = BlockPool::new(pool_config(runner.spec(), BLOCK, budget_bytes));
        pool.is_ok_and(|pool| pool.capacity_tokens(PageFormat::F16) >= Some(blocks * BLOCK))
    };
    (8..).map(|pages| pages * 4096).find(|budget_bytes| holds(*budget_bytes)).unwrap()
}

/// Bytes of a block of all layers at f16.
fn block_bytes(engine: &Engine) -> usize {
    engine.pool().config().groups.iter().map(|group| group.block_bytes(PageFormat::F16)).sum()
}

/// An engine that lets in more than fits to the end, with no prefix cache.
fn crowded(budget_bytes: usize) -> EngineConfig {
    let mut config = engine_config(budget_bytes);
    config.scheduling.admission = AdmissionPolicy::Utilize;
    config
}

/// With the prefix cache on.
fn with_prefix(kind: IndexKind, config: EngineConfig) -> EngineConfig {
    EngineConfig { prefix: Some(PrefixSettings { kind, ..PrefixSettings::default() }), ..config }
}

/// An engine whose steps are done as soon as they are begun.
fn inline_engine(model: &TinyModel, config: EngineConfig) -> Engine {
    faulty_engine(model.plain_runner(), config, Box::new(|_| Deed::Deliver))
}

fn exact(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request {
        max_tokens: Some(max_tokens),
        logprobs: Some(2),
        ..Request::new(prompt, Fidelity::Exact)
    }
}

/// Exact requests that share no prefix, each `prompt` + `generated` tokens.
fn unique(random: &mut Random, count: usize, prompt: usize, generated: usize) -> Vec<Request> {
    (0..count).map(|_| exact(random.tokens(prompt, VOCABULARY), generated)).collect()
}

/// What `requests` give when each is alone in a roomy pool.
fn alone(model: &TinyModel, requests: &[Request]) -> Vec<Outcome> {
    let mut engine = inline_engine(model, engine_config(8 << 20));
    let mut run = |request: &Request| {
        let request = Request { tenant: 0, ..request.clone() };
        engine.run_to_end(&request, &mut |_| ControlFlow::Continue(())).unwrap()
    };
    requests.iter().map(&mut run).collect()
}

/// An engine, its virtual time and all that it has told.
struct Server {
    engine: Engine,
    now_us: u64,
    clock: Option<SpillClock>,
    /// Events with the turn they were told in.
    told: Vec<(u64, Told)>,
    outcomes: BTreeMap<u64, Outcome>,
    turns: u64,
    open: usize,
}

impl Server {
    fn new(engine: Engine) -> Server {
        Server {
            engine,
            now_us: 0,
            clock: None,
            told: Vec::new(),
            outcomes: BTreeMap::new(),
            turns: 0,
            open: 0,
        }
    }

    fn of(model: &TinyModel, config: EngineConfig) -> Server {
        Server::new(inline_engine(model, config))
    }

    /// Gives it a spill store of `slots` slots whose slots take `slot_us` each.
    fn with_spill(mut self, slots: usize, slot_us: u64, script: FaultScript) -> Server {
        let size =
            SpillSize { file_bytes: (4096 + slots * SLOT_BYTES) as u64, slot_bytes: SLOT_BYTES };
        let timing = SpillTiming { latency_us: slot_us, slot_us };
        let (spill, clock) = SimulatedSpill::new(size, timing, script).unwrap();
        self.engine.set_spill(Box::new(spill));
        self.clock = Some(clock);
        self
    }

    /// With a store that is large, fast enough and whole.
    fn with_good_spill(self) -> Server {
        self.with_spill(1024, 100, Box::new(|_| None))
    }

    fn submit(&mut self, key: u64, request: &Request) {
        self.engine.submit(key, request.clone()).unwrap();
        self.open += 1;
    }

    /// One turn, a millisecond after the last: every invariant holds after it, and nobody fails.
    fn turn(&mut self) -> Progress {
        self.now_us += 1000;
        if let Some(clock) = &self.clock {
            clock.advance_to(self.now_us);
        }
        let progress = self.engine.turn(self.now_us).unwrap();
        self.turns += 1;
        assert_eq!(self.engine.check(), [], "turn {}", self.turns);
        if self.turns.is_multiple_of(8) {
            view::assert_adds_up(&self.engine);
        }
        self.hear();
        progress
    }

    fn hear(&mut self) {
        for told in self.engine.take_events() {
            match &told.event {
                Event::Finished(outcome) => {
                    self.open -= 1;
                    self.outcomes.insert(told.request, *outcome.clone());
                }
                Event::Failed(error) => panic!("request {}: {error}", told.request),
                _ => {}
            }
            self.told.push((self.turns, told));
        }
    }

    /// Ends a request and hears of it.
    fn end(&mut self, key: u64) {
        self.engine.end(key, reef_engine::FinishReason::Cancelled);
        self.hear();
    }

    /// Turns until `done` says so.
    fn until(&mut self, mut done: impl FnMut(&Server) -> bool) {
        let last = self.turns + 20_000;
        while !done(self) {
            self.turn();
            assert!(self.turns < last, "no end: {:?}", self.engine.stats());
        }
    }

    /// Turns until all have ended.
    fn finish(&mut self) {
        self.until(|server| server.open == 0);
    }

    /// What was told of a request, in order.
    fn events(&self, key: u64) -> impl Iterator<Item = &Event> {
        self.told.iter().filter(move |(_, told)| told.request == key).map(|(_, told)| &told.event)
    }

    /// Tokens told of a request so far.
    fn tokens(&self, key: u64) -> usize {
        self.events(key).filter(|event| matches!(event, Event::Token(_))).count()
    }

    fn pauses(&self, key: u64) -> Vec<Pause> {
        let pause = |event: &Event| match event {
            Event::Paused(pause) => Some(*pause),
            _ => None,
        };
        self.events(key).filter_map(pause).collect()
    }

    /// Times that a request left the pool.
    fn preemptions(&self, key: u64) -> usize {
        self.pauses(key).iter().filter(|pause| pause.kind != PauseKind::Wait).count()
    }

    fn was_admitted(&self, key: u64) -> bool {
        self.events(key).any(|event| matches!(event, Event::Admitted { .. }))
    }

    /// Prompt tokens of a request that were found in the prefix cache.
    fn cached_tokens(&self, key: u64) -> Option<usize> {
        self.events(key).find_map(|event| match event {
            Event::Admitted { cached_tokens, .. } => Some(*cached_tokens),
            _ => None,
        })
    }

    fn count(&self, kind: PauseKind) -> u64 {
        self.engine.stats().counters.pauses(kind)
    }

    /// Nothing is held, fenced, stored or listed: what is used is what the prefix cache names.
    fn assert_empty(&mut self) {
        // Behind the fence of a step that nobody waits for any more.
        self.until(|server| server.engine.pool().accounts().fenced_bytes == 0);
        let stats = self.engine.stats();
        assert_eq!((stats.running, stats.waiting, stats.paused), (0, 0, 0));
        assert_eq!(stats.accounts.held_bytes(), 0, "{:?}", stats.accounts);
        assert_eq!(stats.counters.unplanned_shortages, 0, "{:?}", stats.counters);
        assert_eq!((stats.counters.shortages_alone, stats.counters.stalls), (0, 0));
        if let Some(spill) = stats.spill {
            assert_eq!((spill.used_bytes, spill.records), (0, 0));
        }
    }

    /// All of `expected` have ended as they do alone: tokens, log-probabilities, reasons. Keys are indices.
    fn assert_exact(&self, expected: &[Outcome], what: &str) {
        for (key, want) in expected.iter().enumerate() {
            let got = &self.outcomes[&(key as u64)];
            assert_same(got, want, &format!("{what}: request {key}"));
        }
    }
}

fn assert_same(got: &Outcome, want: &Outcome, what: &str) {
    assert_eq!(got.continuations.len(), want.continuations.len(), "{what}");
    for (got, want) in got.continuations.iter().zip(&want.continuations) {
        assert_eq!(got.token_ids, want.token_ids, "{what}");
        assert_eq!(got.finish_reason, want.finish_reason, "{what}");
        let bits = |of: &[TokenLogprobs]| -> Vec<u32> {
            of.iter().map(|of| of.logprob.to_bits()).collect()
        };
        assert_eq!(bits(&got.logprobs), bits(&want.logprobs), "{what}");
        assert_eq!(got.logprobs, want.logprobs, "{what}");
    }
}

/// Turns `requests` over to `server`, keys being indices, and serves them all.
fn serve(server: &mut Server, requests: &[Request]) {
    for (key, request) in requests.iter().enumerate() {
        server.submit(key as u64, request);
        server.turn();
    }
    server.finish();
}
