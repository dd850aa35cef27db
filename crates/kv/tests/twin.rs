//! Random operations in random pools against a naive twin: maps from (group, block) to the format of each
//! layer, no spans, no counts.

mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::{EvictionPolicy, PolicyOptions, by_name};
use reef_kv::relief::{DropTarget, MoveKind};
use reef_kv::*;
use world::*;

const BLOCK: usize = 16;
const WINDOW: usize = 40;
const POLICIES: [&str; 3] = ["sinks", "tova", "window"];

#[derive(Clone, Debug)]
enum Operation {
    Start { contract: Fidelity, priority: i32, trained_context: usize, max_tokens: Option<usize> },
    Extend { sequence: usize, tokens: usize, commit: usize },
    End { sequence: usize },
    Relieve { tokens: usize, stretch: usize, policy: &'static str, panics_at: usize },
    Seal { sequence: usize, format: PageFormat, sinks: usize, tail: usize },
    TokenBudget { sequence: usize, policy: &'static str, budget: usize },
    BeginStep,
    EndStep { newest: bool },
}

fn operation() -> impl Strategy<Value = Operation> {
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
        2 => any::<bool>().prop_map(|newest| Operation::EndStep { newest }),
    ]
}

/// Rungs in any order, some missing; pinned layers; how tight the budget is.
fn pool() -> impl Strategy<Value = BlockPool> {
    let rungs = Just(Rung::ALL.to_vec()).prop_shuffle();
    let pins = proptest::collection::vec(proptest::sample::subsequence(vec![0, 1], 0..=2), 3);
    let count = prop_oneof![3 => Just(None), 1 => (0..4usize).prop_map(Some)];
    (rungs, count, any::<bool>(), pins, 4..8usize).prop_map(
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

/// Whether the f16 page of this block holds a NaN.
fn has_nan(stamp: u8) -> bool {
    stamp.is_multiple_of(31)
}

/// What the twin knows of a block.
#[derive(Clone, Debug, PartialEq)]
struct Block {
    /// `None`: dropped in that layer.
    layers: Vec<Option<PageFormat>>,
    /// A kernel panicked in it: which of its pages it did is looked up.
    disturbed: bool,
}

#[derive(Default)]
struct Twin {
    blocks: BTreeMap<(usize, usize), Block>,
    next: usize,
    dropped_in: BTreeMap<(usize, usize), usize>,
}

struct Simulation {
    pool: BlockPool,
    sequences: Vec<(Sequence, Twin)>,
    fences: Vec<StepFence>,
    next_request: u64,
    step: u64,
}

fn shown(sequence: &Sequence) -> BTreeMap<(usize, usize), Vec<Option<PageFormat>>> {
    let mut blocks: BTreeMap<(usize, usize), Vec<Option<PageFormat>>> = BTreeMap::new();
    for (group, view) in sequence.view().groups.iter().enumerate() {
        for (layer, pages) in view.layers.iter().enumerate() {
            for page in pages {
                let absent = vec![None; view.layers.len()];
                let block = blocks.entry((group, page.first as usize)).or_insert(absent);
                block[layer] = Some(page.format);
            }
        }
    }
    blocks
}

impl Simulation {
    fn run(&mut self, operation: Operation) {
        let count = self.sequences.len();
        self.step += 1;
        match operation {
            Operation::Start { contract, priority, trained_context, max_tokens } => {
                let request = self.next_request;
                self.next_request += 1;
                let config =
                    SequenceConfig { request, contract, priority, trained_context, max_tokens };
                self.sequences.push((Sequence::new(&self.pool, config), Twin::default()));
            }
            _ if count == 0 => {}
            Operation::Extend { sequence, tokens, commit } => {
                self.extend(sequence % count, tokens, commit);
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
        }
        self.compare();
    }

    /// What the twin of `sequence` holds once it has grown to `end`.
    fn grown(pool: &BlockPool, twin: &mut Twin, end: usize) {
        for (group, config) in pool.config().groups.iter().enumerate() {
            for first in (twin.next / BLOCK..end.div_ceil(BLOCK)).map(|block| block * BLOCK) {
                // A full block that is not there was dropped or left the window.
                if first + BLOCK > twin.next {
                    let layers = vec![Some(PageFormat::F16); config.layers];
                    let block = Block { layers, disturbed: false };
                    twin.blocks.entry((group, first)).or_insert(block);
                }
            }
        }
    }

    fn extend(&mut self, index: usize, tokens: usize, commit: usize) {
        let (sequence, twin) = &mut self.sequences[index];
        let before = sequence.view().clone();
        if let Err(shortage) = sequence.grow(tokens) {
            assert_eq!(sequence.view(), &before);
            assert!(shortage.needed_bytes > 0);
            return;
        }
        Simulation::grown(&self.pool, twin, twin.next + tokens);
        write_stamps(sequence, twin.next.next_multiple_of(BLOCK));
        let commit = commit.min(tokens);
        sequence.commit(commit);
        twin.next += commit;
        let next = twin.next;
        let attended = |first: usize| (first..first + BLOCK).any(|p| p + WINDOW > next);
        twin.blocks.retain(|&(group, first), _| group != 0 || attended(first));
    }

    fn relieve(&mut self, tokens: usize, stretch: usize, name: &str, panics_at: usize) {
        let policy = policy(name, TAIL_TOKENS);
        let wanted: Vec<usize> =
            self.sequences.iter().map(|(sequence, _)| sequence.remaining(tokens)).collect();
        let plan = self.plan(&wanted, tokens, stretch, &*policy);
        assert_eq!(plan, self.plan(&wanted, tokens, stretch, &*policy), "not deterministic");
        let demands = self.demands(&wanted, tokens, stretch);
        let needed = relief_needed_bytes(&self.pool, &demands) > 0;
        let unknown = demands.iter().any(|demand| demand.sequence.config().max_tokens.is_none());
        let by_context = |planned: &relief::Move| planned.reason == Reason::Context;
        assert!(needed || unknown || plan.moves.iter().all(by_context));
        self.protects_what_it_must(&plan, name);
        let done = self.carry_out(&plan, panics_at);
        if !done {
            return;
        }
        if plan.shortage.is_some() {
            // It gave up all it may: nothing is left that a second plan would take.
            let again = self.plan(&wanted, tokens, stretch, &*policy);
            assert!(again.shortage.is_some());
            assert_eq!(again.moves, []);
            return;
        }
        // What was planned for fits: every sequence can grow by its demand.
        for ((sequence, twin), tokens) in self.sequences.iter_mut().zip(wanted) {
            sequence.grow(tokens).unwrap();
            Simulation::grown(&self.pool, twin, twin.next + tokens);
            write_stamps(sequence, twin.next.next_multiple_of(BLOCK));
        }
    }

    fn demands(&self, wanted: &[usize], step_tokens: usize, stretch: usize) -> Vec<Demand<'_>> {
        let mut demands = Vec::new();
        for ((sequence, _), &tokens) in self.sequences.iter().zip(wanted) {
            let stretch_tokens = tokens + stretch;
            demands.push(Demand { sequence, tokens, step_tokens, stretch_tokens });
        }
        demands
    }

    fn plan(
        &self,
        wanted: &[usize],
        step: usize,
        stretch: usize,
        policy: &dyn EvictionPolicy,
    ) -> ReliefPlan {
        plan_relief(&self.pool, &self.demands(wanted, step, stretch), policy)
    }

    /// No plan touches exact requests, pinned layers, open blocks, or drops what the policy protects; no
    /// move is forbidden by contract, ladder or the model's keys; each gives bytes back.
    fn protects_what_it_must(&self, plan: &ReliefPlan, policy: &str) {
        let config = self.pool.config();
        for planned in &plan.moves {
            let found =
                |(sequence, _): &&(Sequence, Twin)| sequence.config().request == planned.request;
            let (sequence, twin) = self.sequences.iter().find(found).unwrap();
            assert!(config.ladder.permits(sequence.config().contract, planned.rung()));
            assert!(planned.first + BLOCK <= twin.next);
            assert!(planned.bytes > 0 && planned.harm >= 0.0);
            match planned.kind {
                MoveKind::Drop(_) => assert!(
                    policy == "window"
                        || planned.first > 0 && planned.first + BLOCK + TAIL_TOKENS <= twin.next
                ),
                MoveKind::Encode { group, .. } => {
                    assert!(config.groups[group].pinned.len() < config.groups[group].layers);
                }
            }
        }
    }

    fn shrinks(&self, group: usize, from: PageFormat, to: PageFormat) -> bool {
        let shape = self.pool.config().groups[group].shape;
        from.can_become(to) && shape.page_bytes(to) < shape.page_bytes(from)
    }

    /// Carries `plan` out with a kernel that refuses pages with a NaN and panics at its `panics_at`-th
    /// job. Returns whether it ran to the end and nothing was refused.
    fn carry_out(&mut self, plan: &ReliefPlan, panics_at: usize) -> bool {
        let mut done = 0;
        let mut kernel = |jobs: &mut [EncodeJob<'_>]| {
            for job in jobs {
                keep_stamp(std::slice::from_mut(job));
                job.refused = has_nan(job.source[0]) && job.source_format == PageFormat::F16;
                done += 1;
                if done > panics_at {
                    // Prints nothing, unlike `panic!`.
                    std::panic::resume_unwind(Box::new("kernel fault"));
                }
            }
        };
        let mut sequences: Vec<&mut Sequence> = self.sequences.iter_mut().map(|(s, _)| s).collect();
        let result = catch_unwind(AssertUnwindSafe(|| {
            apply_relief(&self.pool, &mut sequences, plan, self.step, &mut kernel)
        }));
        let (mut refused_pages, mut whole) = (0, result.is_ok());
        match &result {
            Ok(Err(error)) => {
                assert_eq!(*error, relief::ReliefError::StepInFlight);
                assert!(!self.fences.is_empty());
                return false;
            }
            Ok(Ok(outcome)) => {
                // Room that refused pages did not make may be missing.
                let promised = outcome.unfinished_blocks == 0 || outcome.refused_pages > 0;
                assert!(promised, "a plan found no room");
                refused_pages = outcome.refused_pages;
                whole = outcome.unfinished_blocks == 0;
            }
            Err(_) => {}
        }
        for planned in &plan.moves {
            let found =
                self.sequences.iter().position(|(s, _)| s.config().request == planned.request);
            match planned.kind {
                MoveKind::Drop(target) => self.follow_drop(found.unwrap(), target),
                MoveKind::Encode { group, format } => {
                    let at = (group, planned.first);
                    self.follow_encode(found.unwrap(), at, format, whole);
                }
            }
        }
        result.is_ok() && refused_pages == 0
    }

    /// Drops come first and no kernel runs in them.
    fn follow_drop(&mut self, index: usize, target: DropTarget) {
        let twin = &mut self.sequences[index].1;
        let groups = &self.pool.config().groups;
        let mut any = false;
        for (group, config) in groups.iter().enumerate().filter(|(_, g)| g.window.is_none()) {
            let Some(block) = twin.blocks.get_mut(&(group, target.first)) else { continue };
            for layer in 0..config.layers {
                let meant = target.page.is_none_or(|page| page == (group, layer));
                if meant && block.layers[layer].take().is_some() {
                    *twin.dropped_in.entry((group, layer)).or_default() += BLOCK;
                    any = true;
                }
            }
        }
        assert!(any, "nothing to drop at {target:?}");
        twin.blocks.retain(|_, block| block.layers.iter().any(Option::is_some));
    }

    fn follow_encode(&mut self, index: usize, at: (usize, usize), to: PageFormat, whole: bool) {
        let (group, first) = at;
        let request = self.sequences[index].0.config().request;
        let pinned = &self.pool.config().groups[group].pinned;
        let now = shown(&self.sequences[index].0)[&at].clone();
        let before = self.sequences[index].1.blocks[&at].clone();
        let mut after = before.clone();
        for (layer, format) in after.layers.iter_mut().enumerate() {
            let Some(from) = *format else { continue };
            let nan = has_nan(stamp(request, group, layer, first)) && from == PageFormat::F16;
            if !pinned.contains(&layer) && !nan && self.shrinks(group, from, to) {
                *format = Some(to);
            }
        }
        if !whole || before.disturbed {
            // Each page is either as it was or in the new format.
            for (layer, format) in now.iter().enumerate() {
                assert!([before.layers[layer], after.layers[layer]].contains(format));
            }
            after.disturbed |= now != after.layers;
            after.layers = now;
        }
        self.sequences[index].1.blocks.insert(at, after);
    }

    fn compare(&self) {
        let sequences: Vec<&Sequence> =
            self.sequences.iter().map(|(sequence, _)| sequence).collect();
        check(&self.pool, &sequences);
        let mut used: ByFormat<usize> = ByFormat::default();
        for (sequence, twin) in &self.sequences {
            assert_eq!(sequence.next_position(), twin.next);
            let full_layers = [(1, 2), (2, 3)]
                .into_iter()
                .flat_map(|(group, layers)| (0..layers).map(move |layer| (group, layer)));
            let dropped = |at| twin.dropped_in.get(&at).copied().unwrap_or(0);
            let kept = full_layers.map(|at| twin.next - dropped(at)).max();
            assert_eq!(Some(sequence.kept_tokens()), kept);
            let blocks = twin.blocks.iter().map(|(at, block)| (*at, block.layers.clone()));
            assert_eq!(shown(sequence), blocks.collect::<BTreeMap<_, _>>());
            for ((group, _), block) in &twin.blocks {
                let shape = self.pool.config().groups[*group].shape;
                for format in block.layers.iter().flatten() {
                    used[*format] += shape.page_bytes(*format);
                }
            }
        }
        assert_eq!(self.pool.accounts().used, used);
    }
}

fn run(pool: BlockPool, operations: Vec<Operation>) {
    let before = pool.accounts();
    let mut simulation = Simulation {
        pool: pool.clone(),
        sequences: Vec::new(),
        fences: Vec::new(),
        next_request: 0,
        step: 0,
    };
    operations.into_iter().for_each(|operation| simulation.run(operation));
    drop(simulation);
    // No byte is lost.
    let after = pool.accounts();
    assert_eq!(Accounts { peak_bytes: 0, ..after }, before);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// 60 x 250 = 15,000 operations.
    #[test]
    fn random_operations_keep_every_invariant(
        pool in pool(),
        operations in proptest::collection::vec(operation(), 250)
    ) {
        run(pool, operations);
    }
}
