//! Random operations against a naive twin: maps from (group, block) to formats, no spans, no counts.

mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::{EvictionPolicy, Sinks, Window};
use reef_kv::relief::MoveKind;
use reef_kv::*;
use world::*;

const BLOCK: usize = 16;
const WINDOW: usize = 40;

#[derive(Clone, Debug)]
enum Operation {
    Start { contract: Fidelity, priority: i32, trained_context: usize, max_tokens: Option<usize> },
    Extend { sequence: usize, tokens: usize, commit: usize },
    End { sequence: usize },
    Relieve { tokens: usize, panics_at: usize },
    SealAt8 { sequence: usize, sinks: usize, tail: usize },
    TokenBudget { sequence: usize, window: bool, budget: usize },
    BeginStep,
    EndStep { newest: bool },
}

fn operation() -> impl Strategy<Value = Operation> {
    let contract = (0..Fidelity::ALL.len()).prop_map(|index| Fidelity::ALL[index]);
    let start = (contract, 0..3, 64..2000usize, proptest::option::of(0..600usize)).prop_map(
        |(contract, priority, trained_context, max_tokens)| Operation::Start {
            contract,
            priority,
            trained_context,
            max_tokens,
        },
    );
    let index = 0..16usize;
    prop_oneof![
        2 => start,
        12 => (index.clone(), 1..70usize, 0..70usize).prop_map(|(sequence, tokens, commit)| {
            Operation::Extend { sequence, tokens, commit }
        }),
        1 => index.clone().prop_map(|sequence| Operation::End { sequence }),
        6 => (1..100usize, 0..12usize)
            .prop_map(|(tokens, panics_at)| Operation::Relieve { tokens, panics_at }),
        1 => (index.clone(), 0..40usize, 0..40usize).prop_map(|(sequence, sinks, tail)| {
            Operation::SealAt8 { sequence, sinks, tail }
        }),
        1 => (index, any::<bool>(), 0..400usize).prop_map(|(sequence, window, budget)| {
            Operation::TokenBudget { sequence, window, budget }
        }),
        1 => Just(Operation::BeginStep),
        2 => any::<bool>().prop_map(|newest| Operation::EndStep { newest }),
    ]
}

/// What the twin knows of a sequence: (group, first position) to the format of each layer.
#[derive(Default)]
struct Twin {
    blocks: BTreeMap<(usize, usize), Vec<PageFormat>>,
    next: usize,
    dropped: usize,
}

struct Simulation {
    pool: BlockPool,
    sequences: Vec<(Sequence, Twin)>,
    fences: Vec<StepFence>,
    next_request: u64,
    step: u64,
}

fn pool() -> BlockPool {
    let shape = |kv_heads, head_dim| PageShape { kv_heads, head_dim, block_size: BLOCK };
    let groups = vec![
        GroupConfig { layers: 3, shape: shape(2, 32), window: Some(WINDOW), pinned: vec![] },
        GroupConfig { layers: 2, shape: shape(2, 32), window: None, pinned: vec![] },
        GroupConfig { layers: 3, shape: shape(1, 48), window: None, pinned: vec![] },
    ];
    let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder: Ladder::default() };
    let budget_bytes = 5 * minimum_budget_bytes(&config, Fidelity::Exact) / 2;
    BlockPool::new(PoolConfig { budget_bytes, ..config }).unwrap()
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
            Operation::Relieve { tokens, panics_at } => self.relieve(tokens, panics_at),
            Operation::SealAt8 { sequence, sinks, tail } => {
                let sequence = &self.sequences[sequence % count].0;
                if sequence.config().contract != Fidelity::Exact {
                    let plan = plan_format_at_seal(sequence, PageFormat::Int8, sinks, tail);
                    self.carry_out(&plan, usize::MAX);
                }
            }
            Operation::TokenBudget { sequence, window, budget } => {
                let sequence = &self.sequences[sequence % count].0;
                let sinks = Sinks { tail_tokens: 0 };
                let policy: &dyn EvictionPolicy = if window { &Window } else { &sinks };
                if sequence.config().contract == Fidelity::Evict {
                    let plan = plan_token_budget(sequence, policy, budget, 1);
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

    fn extend(&mut self, index: usize, tokens: usize, commit: usize) {
        let (sequence, twin) = &mut self.sequences[index];
        let before = sequence.view().clone();
        let new: Vec<usize> = (twin.next / BLOCK..(twin.next + tokens).div_ceil(BLOCK))
            .map(|block| block * BLOCK)
            .filter(|first| *first >= twin.next || first % BLOCK == 0)
            .collect();
        match sequence.grow(tokens) {
            Err(shortage) => {
                assert_eq!(sequence.view(), &before);
                assert!(shortage.needed_bytes > 0);
            }
            Ok(()) => {
                let groups = &self.pool.config().groups;
                for (group, config) in groups.iter().enumerate() {
                    for &first in &new {
                        // A full block that is not there was dropped or left the window.
                        if first + BLOCK > twin.next {
                            let f16 = || vec![PageFormat::F16; config.layers];
                            twin.blocks.entry((group, first)).or_insert_with(f16);
                        }
                    }
                }
                write_stamps(sequence, twin.next.next_multiple_of(BLOCK));
                let commit = commit.min(tokens);
                sequence.commit(commit);
                twin.next += commit;
                let next = twin.next;
                let attended = |first: usize| (first..first + BLOCK).any(|p| p + WINDOW > next);
                twin.blocks.retain(|&(group, first), _| group != 0 || attended(first));
            }
        }
    }

    fn relieve(&mut self, tokens: usize, panics_at: usize) {
        let policy = Sinks { tail_tokens: TAIL_TOKENS };
        let demand = |(sequence, _): &(Sequence, Twin)| (sequence.remaining(tokens), tokens);
        let wanted: Vec<_> = self.sequences.iter().map(demand).collect();
        let demands: Vec<Demand<'_>> = self
            .sequences
            .iter()
            .zip(&wanted)
            .map(|((sequence, _), &(tokens, step))| Demand {
                sequence,
                tokens,
                step_tokens: step,
                stretch_tokens: tokens,
            })
            .collect();
        let plan = plan_relief(&self.pool, &demands, &policy);
        let needed = relief_needed_bytes(&self.pool, &demands) > 0;
        assert!(needed || plan.moves.iter().all(|planned| planned.reason == Reason::Context));
        self.protects_what_it_must(&plan);
        let done = self.carry_out(&plan, panics_at);
        if done && plan.shortage.is_none() {
            // What was planned for fits: every sequence can grow by its demand.
            for ((sequence, twin), (tokens, _)) in self.sequences.iter_mut().zip(wanted) {
                sequence.grow(tokens).unwrap();
                for group in 0..self.pool.config().groups.len() {
                    let layers = self.pool.config().groups[group].layers;
                    let first_new = twin.next / BLOCK;
                    for block in first_new..(twin.next + tokens).div_ceil(BLOCK) {
                        let f16 = || vec![PageFormat::F16; layers];
                        twin.blocks.entry((group, block * BLOCK)).or_insert_with(f16);
                    }
                }
                write_stamps(sequence, twin.next.next_multiple_of(BLOCK));
            }
        }
    }

    /// No plan touches exact requests, open blocks, or drops sinks and tail.
    fn protects_what_it_must(&self, plan: &ReliefPlan) {
        for planned in &plan.moves {
            let found =
                |(sequence, _): &&(Sequence, Twin)| sequence.config().request == planned.request;
            let (sequence, twin) = self.sequences.iter().find(found).unwrap();
            assert!(sequence.config().contract.permits(planned.rung()));
            assert!(planned.first + BLOCK <= twin.next);
            if matches!(planned.kind, MoveKind::Drop(_)) {
                assert!(planned.first > 0 && planned.first + BLOCK + TAIL_TOKENS <= twin.next);
            }
        }
    }

    /// Carries `plan` out with a kernel that panics at its `panics_at`-th batch. Returns whether it ran
    /// to the end.
    fn carry_out(&mut self, plan: &ReliefPlan, panics_at: usize) -> bool {
        let mut batches = 0;
        let mut kernel = |jobs: &mut [EncodeJob<'_>]| {
            keep_stamp(jobs);
            batches += 1;
            // `resume_unwind` prints nothing, unlike `panic!`.
            if batches > panics_at {
                std::panic::resume_unwind(Box::new("kernel fault"));
            }
        };
        let mut sequences: Vec<&mut Sequence> = self.sequences.iter_mut().map(|(s, _)| s).collect();
        let result = catch_unwind(AssertUnwindSafe(|| {
            apply_relief(&self.pool, &mut sequences, plan, self.step, &mut kernel)
        }));
        if let Ok(Err(error)) = &result {
            assert_eq!(*error, relief::ReliefError::StepInFlight);
            assert!(!self.fences.is_empty());
            return false;
        }
        let unfinished = |outcome: &relief::ReliefOutcome| outcome.unfinished_blocks > 0;
        let finished = match &result {
            Ok(outcome) => !outcome.as_ref().is_ok_and(unfinished),
            Err(_) => false,
        };
        let in_full = plan.moves.iter().all(|planned| planned.reason == Reason::Demand);
        assert!(finished || result.is_err() || !in_full, "a relief plan found no room");
        for planned in &plan.moves {
            let found =
                self.sequences.iter_mut().find(|(s, _)| s.config().request == planned.request);
            let (sequence, twin) = found.unwrap();
            match planned.kind {
                MoveKind::Drop(_) => {
                    // Drops come first and no kernel runs in them.
                    let before = twin.blocks.len();
                    twin.blocks.retain(|&(group, first), _| group == 0 || first != planned.first);
                    assert!(twin.blocks.len() < before);
                    twin.dropped += BLOCK;
                }
                MoveKind::Encode { group, format } if finished => {
                    twin.blocks.get_mut(&(group, planned.first)).unwrap().fill(format);
                }
                MoveKind::Encode { group, .. } => {
                    // A panic or lack of room stopped somewhere: each page is either as it was or in the new format.
                    let index = firsts(sequence, group).binary_search(&planned.first).unwrap();
                    let layers = &sequence.view().groups[group].layers;
                    let block = twin.blocks.get_mut(&(group, planned.first)).unwrap();
                    for (format, pages) in block.iter_mut().zip(layers) {
                        *format = (*format).max(pages[index].format);
                    }
                }
            }
        }
        finished
    }

    fn compare(&self) {
        let sequences: Vec<&Sequence> =
            self.sequences.iter().map(|(sequence, _)| sequence).collect();
        check(&self.pool, &sequences);
        let mut used: ByFormat<usize> = ByFormat::default();
        for (sequence, twin) in &self.sequences {
            assert_eq!(sequence.next_position(), twin.next);
            assert_eq!(sequence.kept_tokens(), twin.next - twin.dropped);
            let mut shown = BTreeMap::new();
            for (group, view) in sequence.view().groups.iter().enumerate() {
                for page in view.layers.iter().flatten() {
                    let block: &mut Vec<_> = shown.entry((group, page.first as usize)).or_default();
                    block.push(page.format);
                }
            }
            assert_eq!(shown, twin.blocks);
            for ((group, _), formats) in &twin.blocks {
                let shape = self.pool.config().groups[*group].shape;
                formats.iter().for_each(|format| used[*format] += shape.page_bytes(*format));
            }
        }
        assert_eq!(self.pool.accounts().used, used);
    }
}

fn run(operations: Vec<Operation>) {
    let pool = pool();
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
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// 40 x 250 = 10,000 operations.
    #[test]
    fn random_operations_keep_every_invariant(
        operations in proptest::collection::vec(operation(), 250)
    ) {
        run(operations);
    }
}
