//! Random operations in random pools against a naive twin: blocks that holders point to, tokens by position,
//! no spans, no counts. Pages hold real bytes, a row a token.

mod model;
mod relief;
mod sharing;
#[path = "../world/mod.rs"]
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::{EvictionPolicy, PolicyOptions, by_name};
use reef_kv::*;

use model::{Block, Twin, check_rows, shown, write_rows};
use sharing::{Away, Name, Pin, attended};

const BLOCK: usize = 16;
const WINDOW: usize = 40;
const POLICIES: [&str; 3] = ["sinks", "tova", "window"];
/// Forks multiply.
const MOST_SEQUENCES: usize = 12;

#[derive(Clone, Debug)]
enum Operation {
    Start { contract: Fidelity, priority: i32, trained_context: usize, max_tokens: Option<usize> },
    Extend { sequence: usize, tokens: usize, commit: usize },
    Commit { sequence: usize, tokens: usize },
    End { sequence: usize },
    Relieve { tokens: usize, stretch: usize, policy: &'static str, panics_at: usize },
    Seal { sequence: usize, format: PageFormat, sinks: usize, tail: usize },
    TokenBudget { sequence: usize, policy: &'static str, budget: usize },
    Fork { sequence: usize },
    Trim { sequence: usize },
    Clear { sequence: usize },
    Publish { sequence: usize },
    Attach { name: usize, contract: Fidelity, trained_context: usize, rows: usize },
    CopyRows { sequence: usize, rows: usize },
    Uncache { name: usize },
    EvictIdle,
    Pin { sequence: usize },
    Unpin { pin: usize },
    SwapOut { sequence: usize, back: bool },
    SwapIn { away: usize, piece: usize },
    BeginStep,
    EndStep { newest: bool },
}

/// What one sequence does for itself.
fn of_one() -> impl Strategy<Value = Operation> {
    let contract = proptest::sample::select(Fidelity::ALL.to_vec());
    let start = (contract, 0..3, 64..2000usize, proptest::option::of(0..600usize)).prop_map(
        |(contract, priority, trained_context, max_tokens)| Operation::Start {
            contract,
            priority,
            trained_context,
            max_tokens,
        },
    );
    let index = 0..16usize;
    let policy = || proptest::sample::select(POLICIES.to_vec());
    let format = proptest::sample::select(PageFormat::ALL.to_vec());
    prop_oneof![
        2 => start,
        12 => (index.clone(), 1..70usize, 0..70usize).prop_map(|(sequence, tokens, commit)| {
            Operation::Extend { sequence, tokens, commit }
        }),
        1 => (index.clone(), 0..40usize).prop_map(|(sequence, tokens)| {
            Operation::Commit { sequence, tokens }
        }),
        1 => index.clone().prop_map(|sequence| Operation::End { sequence }),
        6 => (1..100usize, 1..300usize, policy(), 0..60usize).prop_map(
            |(tokens, stretch, policy, panics_at)| {
                Operation::Relieve { tokens, stretch, policy, panics_at }
            }
        ),
        1 => (index.clone(), format, 0..40usize, 0..40usize).prop_map(
            |(sequence, format, sinks, tail)| Operation::Seal { sequence, format, sinks, tail }
        ),
        1 => (index, policy(), 0..400usize).prop_map(|(sequence, policy, budget)| {
            Operation::TokenBudget { sequence, policy, budget }
        }),
        1 => Just(Operation::BeginStep),
        3 => any::<bool>().prop_map(|newest| Operation::EndStep { newest }),
    ]
}

/// What makes and ends sharing.
fn of_sharing() -> impl Strategy<Value = Operation> {
    let contract = proptest::sample::select(Fidelity::ALL.to_vec());
    let index = || 0..16usize;
    prop_oneof![
        3 => index().prop_map(|sequence| Operation::Fork { sequence }),
        1 => index().prop_map(|sequence| Operation::Trim { sequence }),
        1 => index().prop_map(|sequence| Operation::Clear { sequence }),
        3 => index().prop_map(|sequence| Operation::Publish { sequence }),
        3 => (0..64usize, contract, 64..600usize, 0..2 * BLOCK).prop_map(
            |(name, contract, trained_context, rows)| {
                Operation::Attach { name, contract, trained_context, rows }
            }
        ),
        3 => (index(), 1..BLOCK + 1).prop_map(|(sequence, rows)| {
            Operation::CopyRows { sequence, rows }
        }),
        2 => (0..64usize).prop_map(|name| Operation::Uncache { name }),
        1 => Just(Operation::EvictIdle),
        1 => index().prop_map(|sequence| Operation::Pin { sequence }),
        1 => index().prop_map(|pin| Operation::Unpin { pin }),
        2 => (index(), any::<bool>()).prop_map(|(sequence, back)| {
            Operation::SwapOut { sequence, back }
        }),
        2 => (index(), 1..3000usize).prop_map(|(away, piece)| Operation::SwapIn { away, piece }),
    ]
}

/// Operations of both kinds, `sharing` in ten of sharing.
fn operations(sharing: u32) -> impl Strategy<Value = Vec<Operation>> {
    let mixed = prop_oneof![
        10 - sharing => of_one().boxed(),
        sharing => of_sharing().boxed(),
    ];
    proptest::collection::vec(mixed, 250)
}

/// Rungs in any order, some missing; pinned layers; how tight the budget is.
fn pool() -> impl Strategy<Value = BlockPool> {
    let rungs = Just(Rung::ALL.to_vec()).prop_shuffle();
    let pins = proptest::collection::vec(proptest::sample::subsequence(vec![0, 1], 0..=2), 3);
    let count = prop_oneof![3 => Just(None), 1 => (0..4usize).prop_map(Some)];
    (rungs, count, any::<bool>(), pins, 4..12usize).prop_map(
        |(shuffled, count, four_bit_keys, pins, halves)| {
            // Mostly the whole ladder in its order.
            let rungs = count.map_or(Rung::ALL.to_vec(), |count| shuffled[..count].to_vec());
            let ladder = Ladder { rungs, four_bit_keys, ..Ladder::default() };
            let shape = |kv_heads, head_dim| PageShape { kv_heads, head_dim, block_size: BLOCK };
            let group = |layers, shape, window, pinned: &Vec<usize>| GroupConfig {
                layers,
                shape,
                window,
                pinned: pinned.clone(),
            };
            let groups = vec![
                group(3, shape(2, 32), Some(WINDOW), &pins[0]),
                group(2, shape(2, 32), None, &pins[1]),
                group(3, shape(1, 48), None, &pins[2]),
            ];
            let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
            let budget_bytes = halves * minimum_budget_bytes(&config, Fidelity::Exact) / 2;
            BlockPool::new(PoolConfig { budget_bytes, ..config }).unwrap()
        },
    )
}

fn policy(name: &str, tail_tokens: usize) -> Box<dyn EvictionPolicy> {
    by_name(name, &PolicyOptions { tail_tokens, ..PolicyOptions::default() }).unwrap()
}

struct Simulation {
    pool: BlockPool,
    sequences: Vec<(Sequence, Twin)>,
    names: Vec<Name>,
    pins: Vec<Pin>,
    away: Vec<Away>,
    fences: Vec<StepFence>,
    next_request: u64,
    next_value: u64,
    step: u64,
}

impl Simulation {
    fn new_request(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request - 1
    }

    fn run(&mut self, operation: Operation) {
        self.step += 1;
        match operation {
            Operation::Start { contract, priority, trained_context, max_tokens } => {
                let request = self.new_request();
                let config =
                    SequenceConfig { request, contract, priority, trained_context, max_tokens };
                self.sequences.push((Sequence::new(&self.pool, config), Twin::default()));
            }
            Operation::Attach { name, contract, trained_context, rows } => {
                self.attach(name, contract, trained_context, rows);
            }
            Operation::Uncache { name } => self.uncache(name),
            Operation::EvictIdle => self.evict_idle(),
            Operation::Unpin { pin } => self.unpin(pin),
            Operation::SwapIn { away, piece } => self.swap_in(away, piece),
            Operation::BeginStep if self.fences.len() < 3 => {
                self.fences.push(self.pool.begin_step());
            }
            Operation::BeginStep => {}
            Operation::EndStep { newest } => {
                let fence = if newest {
                    self.fences.pop()
                } else {
                    self.fences.drain(..1.min(self.fences.len())).next()
                };
                fence.into_iter().for_each(StepFence::pass);
            }
            _ if self.sequences.is_empty() => {}
            of_sequence => self.run_on_sequence(of_sequence),
        }
        self.sequences.truncate(MOST_SEQUENCES);
        self.compare();
        self.compare_names();
    }

    fn run_on_sequence(&mut self, operation: Operation) {
        let count = self.sequences.len();
        match operation {
            Operation::Extend { sequence, tokens, commit } => {
                if self.grow(sequence % count, tokens) {
                    self.commit(sequence % count, commit.min(tokens));
                }
            }
            Operation::Commit { sequence, tokens } => {
                let twin = &self.sequences[sequence % count].1;
                let grown = twin.values.len() - twin.next;
                self.commit(sequence % count, tokens.min(grown));
            }
            Operation::End { sequence } => drop(self.sequences.swap_remove(sequence % count)),
            Operation::Relieve { tokens, stretch, policy, panics_at } => {
                self.relieve(tokens, stretch, policy, panics_at);
            }
            Operation::Seal { sequence, format, sinks, tail } => {
                let sequence = &self.sequences[sequence % count].0;
                if sequence.config().contract.permits_format(format) {
                    let plan = plan_format_at_seal(sequence, format, sinks, tail);
                    self.carry_out(&plan, usize::MAX);
                }
            }
            Operation::TokenBudget { sequence, policy: name, budget } => {
                let sequence = &self.sequences[sequence % count].0;
                if sequence.config().contract == Fidelity::Evict {
                    let plan = plan_token_budget(sequence, &*policy(name, 0), budget, 1);
                    self.carry_out(&plan, usize::MAX);
                }
            }
            Operation::Fork { sequence } => self.fork(sequence % count),
            Operation::Trim { sequence } => {
                let (sequence, twin) = &mut self.sequences[sequence % count];
                sequence.trim();
                twin.trim();
            }
            Operation::Clear { sequence } => {
                let (sequence, twin) = &mut self.sequences[sequence % count];
                sequence.clear();
                *twin = Twin::default();
            }
            Operation::Publish { sequence } => self.publish(sequence % count),
            Operation::CopyRows { sequence, rows } => self.copy_rows(sequence % count, rows),
            Operation::Pin { sequence } => self.pin(sequence % count),
            Operation::SwapOut { sequence, back } => {
                self.swap_out(sequence % count);
                if back {
                    self.swap_in(self.away.len() - 1, 4096);
                }
            }
            other => unreachable!("{other:?}"),
        }
    }

    /// Grows and writes. `false` where it is short of pages.
    fn grow(&mut self, index: usize, tokens: usize) -> bool {
        let (sequence, twin) = &self.sequences[index];
        let shared = twin.written(tokens).filter(|(_, block)| {
            let others = self.holders(block) > 1;
            others || block.borrow().cached
        });
        let copies: Vec<(usize, usize)> = shared.map(|(at, _)| *at).collect();
        let in_place = twin.written(tokens).filter(|(_, b)| b.borrow().was_shared).count();
        let before = sequence.view().clone();
        let in_flight = !self.fences.is_empty();
        let (sequence, twin) = &mut self.sequences[index];
        if let Err(shortage) = sequence.grow(tokens) {
            assert_eq!(sequence.view(), &before);
            assert!(shortage.needed_bytes > 0);
            assert!(copies.is_empty() || !in_flight || shortage.free_bytes == 0);
            see("copy refused in flight", usize::from(!copies.is_empty() && in_flight));
            return false;
        }
        assert!(copies.is_empty() || !in_flight);
        see("copied on write", copies.len());
        see("last sharer wrote in place", in_place - in_place.min(copies.len()));
        for at in copies {
            let copy = twin.blocks[&at].borrow().copied();
            twin.blocks.insert(at, copy);
        }
        let end = twin.next + tokens;
        for (group, config) in self.pool.config().groups.iter().enumerate() {
            for first in (twin.next / BLOCK..end.div_ceil(BLOCK)).map(|block| block * BLOCK) {
                // A full block that is not there was dropped or left the window.
                if first + BLOCK > twin.next {
                    let block = || Block::open(config.layers);
                    twin.blocks.entry((group, first)).or_insert_with(block);
                }
            }
        }
        twin.values.resize(twin.values.len().max(end), 0);
        for value in &mut twin.values[twin.next..] {
            *value = self.next_value;
            self.next_value += 1;
        }
        write_rows(sequence, &twin.values, twin.next);
        true
    }

    fn commit(&mut self, index: usize, tokens: usize) {
        let (sequence, twin) = &mut self.sequences[index];
        sequence.commit(tokens);
        let before = twin.next;
        twin.next += tokens;
        if tokens > 0 {
            for block in twin.blocks.values() {
                twin.attended = block.borrow().formats().fold(twin.attended, Fidelity::max);
            }
            if !twin.dropped_in.is_empty() {
                twin.attended = Fidelity::Evict;
            }
        }
        let sealed = before + 1..twin.next + 1;
        for ((_, first), block) in &twin.blocks {
            if sealed.contains(&(first + BLOCK)) {
                block.borrow_mut().context = twin.attended;
            }
        }
        let next = twin.next;
        twin.blocks.retain(|&(group, first), _| group != 0 || attended(first, next));
    }

    fn compare(&self) {
        let sequences: Vec<&Sequence> =
            self.sequences.iter().map(|(sequence, _)| sequence).collect();
        let violations = check_invariants(&self.pool, &sequences);
        assert!(violations.is_empty(), "{}", violations[0]);
        for (sequence, twin) in &self.sequences {
            assert_eq!(sequence.next_position(), twin.next);
            assert_eq!(sequence.fidelity(), twin.attended);
            let full_layers = [(1, 2), (2, 3)]
                .into_iter()
                .flat_map(|(group, layers)| (0..layers).map(move |layer| (group, layer)));
            let dropped = |at| twin.dropped_in.get(&at).copied().unwrap_or(0);
            let kept = full_layers.map(|at| twin.next - dropped(at)).max();
            assert_eq!(Some(sequence.kept_tokens()), kept);
            let dropped: usize = twin.dropped_in.values().sum();
            let layers = self.pool.config().layers() as f64;
            assert_eq!(sequence.usage().dropped_tokens, dropped as f64 / layers);
            let blocks = twin.blocks.iter().map(|(at, b)| (*at, b.borrow().layers.clone()));
            assert_eq!(shown(sequence), blocks.collect::<BTreeMap<_, _>>());
            check_rows(sequence, &twin.values);
        }
        self.compare_accounts();
    }

    /// Each block counts once, whoever holds it.
    fn compare_accounts(&self) {
        let held = self.sequences.iter().flat_map(|(_, twin)| &twin.blocks);
        let mut blocks: BTreeMap<_, _> =
            held.map(|(at, block)| (Rc::as_ptr(block), (at.0, block))).collect();
        for pin in &self.pins {
            for (group, block) in &pin.blocks {
                blocks.insert(Rc::as_ptr(block), (*group, block));
            }
        }
        let mut used: ByFormat<usize> = ByFormat::default();
        let mut cached_bytes = 0;
        let mut add = |group: usize, block: &Block| {
            let shape = self.pool.config().groups[group].shape;
            let mut bytes = 0;
            for format in block.layers.iter().flatten() {
                used[*format] += shape.page_bytes(*format);
                bytes += shape.page_bytes(*format);
            }
            bytes
        };
        for (group, block) in blocks.values() {
            add(*group, &block.borrow());
        }
        for name in self.names.iter().filter(|name| name.twin.borrow().cached) {
            if !blocks.contains_key(&Rc::as_ptr(&name.twin)) {
                cached_bytes += add(name.group, &name.twin.borrow());
            }
        }
        let accounts = self.pool.accounts();
        assert_eq!((accounts.used, accounts.cached_bytes), (used, cached_bytes));
    }
}

fn run(pool: BlockPool, operations: Vec<Operation>) {
    let before = pool.accounts();
    let mut simulation = Simulation {
        pool: pool.clone(),
        sequences: Vec::new(),
        names: Vec::new(),
        pins: Vec::new(),
        away: Vec::new(),
        fences: Vec::new(),
        next_request: 0,
        next_value: 0,
        step: 0,
    };
    operations.into_iter().for_each(|operation| simulation.run(operation));
    simulation.sequences.clear();
    simulation.pins.clear();
    simulation.evict_idle();
    drop(simulation);
    // No byte is lost.
    let after = pool.accounts();
    assert_eq!(Accounts { peak_bytes: 0, ..after }, before);
}

thread_local! {
    /// What the operations have come across, by name.
    static SEEN: RefCell<BTreeMap<&'static str, usize>> = const { RefCell::new(BTreeMap::new()) };
}

/// Counts an event that the operations must come across.
fn see(event: &'static str, times: usize) {
    if times > 0 {
        SEEN.with_borrow_mut(|seen| *seen.entry(event).or_default() += times);
    }
}

/// Runs `cases` x 250 random operations, `sharing` in ten of sharing; each of `events` must happen.
fn run_cases(cases: u32, sharing: u32, events: &[&'static str]) {
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 1000,
        ..Default::default()
    };
    // Each run sees the same cases, so that none fails now and then.
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let strategy = (pool(), operations(sharing));
    let result = TestRunner::new_with_rng(config, random).run(&strategy, |(pool, operations)| {
        run(pool, operations);
        Ok(())
    });
    assert!(result.is_ok(), "{}", result.unwrap_err());
    SEEN.with_borrow(|seen| {
        println!("{seen:?}");
        for event in events {
            assert!(seen.contains_key(event), "never seen: {event}");
        }
    });
}

#[test]
fn random_operations_keep_every_invariant() {
    run_cases(
        60,
        1,
        &["relief", "dropped block", "re-encoded block", "refused page", "moved page"],
    );
}

#[test]
fn sharing_changes_nobody_elses_bytes() {
    let events = [
        "copied on write",
        "last sharer wrote in place",
        "copy refused in flight",
        "attached block",
        "attached lossy block",
        "copied rows",
        "given back from the index",
        "name lost by a drop",
        "cached block made lossier",
        "re-encoded shared block",
        "came back",
        "came back with gaps",
        "came back lossy",
        "relative and back",
    ];
    run_cases(60, 5, &events);
}
