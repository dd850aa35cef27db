//! Policies over real tables, against a model that is a list of kept tokens per layer.

mod world;

use std::collections::BTreeMap;
use std::sync::Mutex;

use proptest::prelude::*;
use reef_kv::keep::KeepError;
use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::{
    BlockSummary, EvictionPolicy, Observation, PolicyOptions, Protection, SequenceSummary, by_name,
};
use reef_kv::relief::MoveKind;
use reef_kv::*;
use world::*;

const BLOCK: usize = 16;
const TAIL: usize = 32;

/// A window group, and two full-attention groups of unlike shape: five full layers.
fn pool() -> BlockPool {
    let shape = |kv_heads, head_dim| PageShape { kv_heads, head_dim, block_size: BLOCK };
    let group = |layers, shape, window| GroupConfig { layers, shape, window, pinned: vec![] };
    let groups = vec![
        group(2, shape(1, 16), Some(40)),
        group(2, shape(1, 16), None),
        group(3, shape(2, 32), None),
    ];
    let ladder = Ladder::default();
    BlockPool::new(PoolConfig { groups, budget_bytes: 4 << 20, prefault: false, ladder }).unwrap()
}

const FULL_LAYERS: [(usize, usize); 5] = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)];

/// A number in 0..1 that seems random and is the same for the same arguments.
fn noise(seed: u64, values: [usize; 3]) -> f32 {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    for value in values {
        state = (state ^ value as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state ^= state >> 29;
    }
    (state % 65_521) as f32 / 65_521.0
}

/// The masses of the query at `position` over the pages of a layer; 0 for pages after it.
fn masses_of(sequence: &Sequence, at: (usize, usize), seed: u64, position: usize) -> Vec<f32> {
    let pages = &sequence.view().groups[at.0].layers[at.1];
    let mass = |first: usize| {
        let layer = at.0 * 8 + at.1;
        if first <= position { noise(seed, [layer, first, position]) } else { 0.0 }
    };
    pages.iter().map(|page| mass(page.first as usize)).collect()
}

/// Score of the keys of a block in a layer, as a kernel would give it.
fn key_score(seed: u64, (group, layer): (usize, usize), first: usize) -> f32 {
    noise(seed, [group * 8 + layer, first, usize::MAX]) - 0.5
}

/// Goes on by `tokens`, and tells the sequence what `observation` asks for as an engine does.
fn step(sequence: &mut Sequence, tokens: usize, observation: Observation, seed: u64) {
    let start = sequence.next_position();
    extend(sequence, tokens);
    for at in FULL_LAYERS {
        match observation {
            Observation::Nothing => {}
            Observation::AttentionMass { decay } => {
                let rows = start..start + tokens;
                let masses: Vec<f32> =
                    rows.flat_map(|position| masses_of(sequence, at, seed, position)).collect();
                sequence.observe_masses(at.0, at.1, &masses, decay);
            }
            Observation::Keys => {
                for first in (start / BLOCK * BLOCK..sequence.next_position()).step_by(BLOCK) {
                    if first + BLOCK <= sequence.next_position() {
                        let score = key_score(seed, at, first);
                        sequence.observe_keys(at.0, at.1, first, score);
                    }
                }
            }
        }
    }
}

/// Notes what it is shown, and gives nothing up.
struct Spy {
    observation: Observation,
    protection: Protection,
    seen: Mutex<Vec<Vec<(usize, u32)>>>,
}

impl Spy {
    fn new(observation: Observation) -> Spy {
        let protection = Protection::OpenBlocksOnly;
        Spy { observation, protection, seen: Mutex::default() }
    }

    /// (first position, bits of the score) of each block that may go, per full-attention layer.
    fn look(&self, sequence: &Sequence) -> Vec<Vec<(usize, u32)>> {
        self.seen.lock().unwrap().clear();
        assert!(plan_token_budget(sequence, self, 0, 0).is_empty());
        self.seen.lock().unwrap().clone()
    }
}

impl EvictionPolicy for Spy {
    fn name(&self) -> &'static str {
        "spy"
    }

    fn observes(&self) -> Observation {
        self.observation
    }

    fn protection(&self) -> Protection {
        self.protection
    }

    fn per_layer(&self) -> bool {
        true
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        let bits = |block: &BlockSummary| (block.first, block.score.to_bits());
        self.seen.lock().unwrap().push(sequence.blocks.iter().map(bits).collect());
        Vec::new()
    }
}

/// Has relief close the holes between the pages of `sequence` for another one. Returns how many pages
/// moved.
fn compact(sequence: &mut Sequence) -> usize {
    let pool = sequence.pool().clone();
    let mut hog = Sequence::new(&pool, request(99, Fidelity::Exact));
    let policy = policy::Window;
    let plan_for = |tokens: usize| {
        // Pages of a sequence that a plan does not know of stay where they are.
        let demands = [demand(sequence, 0, 1), demand(&hog, tokens, tokens)];
        plan_relief(&pool, &demands, &policy)
    };
    let moves_pages_only = |plan: &ReliefPlan| plan.shortage.is_none() && plan.moves.is_empty();
    let most = (1..6000).rev().step_by(BLOCK).map(plan_for).find(moves_pages_only);
    // None where the sequence is beyond its trained context and would be cut whatever is asked for.
    let Some(plan) = most else { return 0 };
    let both = &mut [sequence, &mut hog];
    apply_relief(&pool, both, &plan, 0, &mut keep_stamp).unwrap().moved_pages
}

/// What the model knows: the tokens each layer keeps, and every mass and key score ever told.
#[derive(Default)]
struct Naive {
    tokens: BTreeMap<(usize, usize), Vec<usize>>,
    kept_spans: Vec<std::ops::Range<usize>>,
}

impl Naive {
    fn extend(&mut self, from: usize, tokens: usize) {
        for at in FULL_LAYERS {
            self.tokens.entry(at).or_default().extend(from..from + tokens);
        }
    }

    fn drop_block(&mut self, at: (usize, usize), first: usize) {
        let tokens = self.tokens.get_mut(&at).unwrap();
        let before = tokens.len();
        tokens.retain(|token| !(first..first + BLOCK).contains(token));
        assert_eq!(tokens.len() + BLOCK, before, "a block that was not there was dropped");
    }

    fn blocks(&self, at: (usize, usize)) -> Vec<usize> {
        let firsts = self.tokens[&at].iter().copied().filter(|token| token % BLOCK == 0);
        firsts.collect()
    }

    /// What must stay under a policy that protects.
    fn is_protected(&self, first: usize, next: usize) -> bool {
        let tail_start = next.saturating_sub(TAIL);
        let mut tokens = first..first + BLOCK;
        tokens.any(|token| {
            token < BLOCK
                || token >= tail_start
                || self.kept_spans.iter().any(|span| span.contains(&token))
        })
    }
}

/// The score that a policy should see, from the definition: a weighted mean of all masses so far.
fn defined_score(
    sequence: &Sequence,
    at: (usize, usize),
    first: usize,
    observation: Observation,
    seed: u64,
) -> f64 {
    match observation {
        Observation::Nothing => 0.0,
        Observation::Keys => f64::from(key_score(seed, at, first)),
        Observation::AttentionMass { decay } => {
            let (mut sum, mut exposure, mut weight) = (0.0, 0.0, 1.0);
            for position in (first..sequence.next_position()).rev() {
                let mass = noise(seed, [at.0 * 8 + at.1, first, position]);
                sum += weight * f64::from(mass);
                exposure += weight;
                weight *= f64::from(decay);
            }
            sum / exposure
        }
    }
}

/// Plans a token budget, checks each choice, and has the model do the same.
fn drop_to_budget(
    sequence: &mut Sequence,
    naive: &mut Naive,
    policy: &dyn EvictionPolicy,
    (budget, seed): (usize, u64),
) {
    let next = sequence.next_position();
    let plan = plan_token_budget(sequence, policy, budget, 1);
    let protects = policy.protection() != Protection::OpenBlocksOnly;
    let score = |at, first| defined_score(sequence, at, first, policy.observes(), seed);
    let mut bytes = 0;
    for planned in &plan.moves {
        let MoveKind::Drop(target) = planned.kind else { panic!("{planned:?}") };
        assert_eq!(target.page.is_some(), policy.per_layer());
        for at in FULL_LAYERS {
            if target.page.is_some_and(|page| page != at) {
                continue;
            }
            let may_go = |first: usize| {
                first + BLOCK <= next && !(protects && naive.is_protected(first, next))
            };
            assert!(may_go(target.first), "{} dropped {}", policy.name(), target.first);
            if policy.per_layer() {
                let candidates: Vec<usize> =
                    naive.blocks(at).into_iter().filter(|&first| may_go(first)).collect();
                let least =
                    candidates.iter().map(|&first| score(at, first)).fold(f64::MAX, f64::min);
                let chosen = score(at, target.first);
                assert!(chosen <= least + 1e-5, "{} gave up {chosen}, not {least}", policy.name());
            } else if policy.name() != "random" {
                let oldest = naive.blocks(at).into_iter().find(|&first| may_go(first));
                assert_eq!(Some(target.first), oldest);
            }
            naive.drop_block(at, target.first);
        }
        bytes += planned.bytes;
    }
    let used = sequence.pool().accounts().used_bytes();
    apply(sequence, &plan, next as u64);
    assert_eq!(used - sequence.pool().accounts().used_bytes(), bytes);
    // As far as the policy gives blocks up, and no further.
    for at in FULL_LAYERS {
        let kept = naive.tokens[&at].len();
        let can_go = naive
            .blocks(at)
            .into_iter()
            .any(|first| first + BLOCK <= next && !(protects && naive.is_protected(first, next)));
        assert!(kept < budget || !can_go, "{kept} tokens kept of {budget} in {at:?}");
    }
}

fn compare(sequence: &Sequence, naive: &Naive) {
    let next = sequence.next_position();
    for at in FULL_LAYERS {
        let pages = &sequence.view().groups[at.0].layers[at.1];
        let shown = pages.iter().flat_map(|page| {
            let first = page.first as usize;
            first..(first + BLOCK).min(next).max(first)
        });
        assert_eq!(shown.collect::<Vec<_>>(), naive.tokens[&at]);
    }
    let lengths = FULL_LAYERS.map(|at| naive.tokens[&at].len());
    assert_eq!(sequence.kept_tokens(), lengths.into_iter().max().unwrap());
    let usage = sequence.usage();
    let dropped: usize = lengths.iter().map(|length| next - length).sum();
    assert_eq!(sequence.dropped_pages() * BLOCK, dropped);
    assert!((usage.dropped_tokens - dropped as f64 / 7.0).abs() < 1e-9);
    let held: f64 = PageFormat::ALL.map(|format| usage.tokens_by_format[format]).iter().sum();
    assert!((held - lengths.iter().sum::<usize>() as f64 / 5.0).abs() < 1e-9);
    let bytes = sequence.view().groups.iter().zip(&sequence.pool().config().groups).map(
        |(view, group)| -> usize {
            let bytes = |page: &page::PageRef| group.shape.page_bytes(page.format);
            view.layers.iter().flatten().map(bytes).sum()
        },
    );
    assert_eq!(usage.held_bytes, bytes.sum::<usize>());
}

#[derive(Clone, Debug)]
enum Operation {
    Step { tokens: usize },
    Budget { tokens: usize },
    Seal { tail: usize },
    Keep { start: usize, length: usize },
    Compact,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        10 => (1..50usize).prop_map(|tokens| Operation::Step { tokens }),
        6 => (0..400usize).prop_map(|tokens| Operation::Budget { tokens }),
        1 => (0..100usize).prop_map(|tail| Operation::Seal { tail }),
        1 => (0..800usize, 1..40usize)
            .prop_map(|(start, length)| Operation::Keep { start, length }),
        1 => Just(Operation::Compact),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn tables_follow_each_policys_choices(
        name in proptest::sample::select(&policy::NAMES[..]),
        seed in any::<u64>(),
        trained_context in 50..1500usize,
        operations in proptest::collection::vec(operation(), 60),
    ) {
        let pool = pool();
        let policy = by_name(name, &PolicyOptions { tail_tokens: TAIL, seed }).unwrap();
        let config = SequenceConfig { trained_context, ..request(0, Fidelity::Evict) };
        let mut sequence = Sequence::new(&pool, config);
        let mut naive = Naive::default();
        naive.extend(0, 1);
        step(&mut sequence, 1, policy.observes(), seed);
        for operation in operations {
            match operation {
                Operation::Step { tokens } => {
                    naive.extend(sequence.next_position(), tokens);
                    step(&mut sequence, tokens, policy.observes(), seed);
                }
                Operation::Budget { tokens } => {
                    drop_to_budget(&mut sequence, &mut naive, &*policy, (tokens, seed));
                }
                Operation::Seal { tail } => {
                    let plan = plan_format_at_seal(&sequence, PageFormat::Int4, 4, tail);
                    apply(&mut sequence, &plan, 0);
                }
                Operation::Keep { start, length } => {
                    sequence.keep(start..start + length).unwrap();
                    naive.kept_spans.push(start..start + length);
                }
                Operation::Compact => {
                    compact(&mut sequence);
                }
            }
            compare(&sequence, &naive);
            check(&pool, &[&sequence]);
        }
        drop(sequence);
        prop_assert_eq!(pool.accounts().used_bytes(), 0);
    }

    /// Steps of any size, the same scores to the last bit.
    #[test]
    fn scores_do_not_depend_on_how_rows_were_grouped(
        decay in proptest::sample::select(vec![0.0f32, 0.5, 0.998_647, 1.0]),
        chunks in proptest::collection::vec(1..90usize, 1..20),
        seed in any::<u64>(),
    ) {
        let pool = pool();
        let observation = Observation::AttentionMass { decay };
        let mut in_chunks = Sequence::new(&pool, request(0, Fidelity::Evict));
        let mut one_by_one = Sequence::new(&pool, request(1, Fidelity::Evict));
        for &tokens in &chunks {
            step(&mut in_chunks, tokens, observation, seed);
            (0..tokens).for_each(|_| step(&mut one_by_one, 1, observation, seed));
        }
        let spy = Spy::new(observation);
        prop_assert_eq!(spy.look(&in_chunks), spy.look(&one_by_one));
        for layer in spy.look(&in_chunks).iter().zip(FULL_LAYERS) {
            for &(first, bits) in layer.0 {
                let defined = defined_score(&in_chunks, layer.1, first, observation, seed);
                let error = (f64::from(f32::from_bits(bits)) - defined).abs();
                prop_assert!(error < 1e-4, "{error} at {decay}");
            }
        }
    }
}

/// Layers drop different blocks; what is left keeps its scores through re-encoding and compaction.
#[test]
fn scores_stay_with_their_block_whatever_happens_to_its_bytes() {
    let pool = pool();
    let observation = Observation::AttentionMass { decay: 0.9 };
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    (0..40).for_each(|_| step(&mut sequence, 23, observation, 5));
    let spy = Spy::new(observation);
    let before = spy.look(&sequence);
    let policy = policy::H2o { tail_tokens: TAIL };
    let seal = |sequence: &mut Sequence, format| {
        let plan = plan_format_at_seal(sequence, format, 0, 0);
        assert!(!plan.is_empty());
        apply(sequence, &plan, 1);
    };
    seal(&mut sequence, PageFormat::Int8);
    let plan = plan_token_budget(&sequence, &policy, 300, 0);
    assert!(plan.moves.len() > 150);
    apply(&mut sequence, &plan, 0);
    assert!(compact(&mut sequence) > 0);
    seal(&mut sequence, PageFormat::Int4);
    let after = spy.look(&sequence);
    let mut unlike = std::collections::BTreeSet::new();
    for (before, after) in before.iter().zip(&after) {
        let kept = |block: &&(usize, u32)| after.iter().any(|kept| kept.0 == block.0);
        let expected: Vec<_> = before.iter().filter(kept).copied().collect();
        assert_eq!(after, &expected);
        assert!(after.len() < before.len());
        unlike.insert(after.iter().map(|block| block.0).collect::<Vec<_>>());
    }
    assert!(unlike.len() > 1, "layers choose for themselves");
    check(&pool, &[&sequence]);
}

#[test]
fn a_bad_score_makes_it_age_order() {
    for name in ["h2o", "tova", "keydiff"] {
        let pool = pool();
        let policy = by_name(name, &PolicyOptions { tail_tokens: 0, seed: 0 }).unwrap();
        let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
        let plan_with = |sequence: &Sequence| -> Vec<usize> {
            let plan = plan_token_budget(sequence, &*policy, 0, 0);
            let of_layer = plan.moves.iter().filter(
                |planned| matches!(planned.kind, MoveKind::Drop(target) if target.page == Some((2, 1))),
            );
            of_layer.map(|planned| planned.first).collect()
        };
        extend(&mut sequence, 8 * BLOCK);
        let by_age: Vec<usize> = (1..8).map(|index| index * BLOCK).collect();
        assert_eq!(plan_with(&sequence), by_age, "{name}: nothing observed");
        step(&mut sequence, 2 * BLOCK, policy.observes(), 3);
        for bad in [f32::NAN, f32::INFINITY] {
            match policy.observes() {
                Observation::AttentionMass { decay } => {
                    let pages = sequence.view().groups[2].layers[1].len();
                    let mut masses = vec![0.25; pages];
                    masses[4] = bad;
                    sequence.observe_masses(2, 1, &masses, decay);
                }
                _ => sequence.observe_keys(2, 1, 4 * BLOCK, bad),
            }
            let by_age: Vec<usize> = (1..10).map(|index| index * BLOCK).collect();
            assert_eq!(plan_with(&sequence), by_age, "{name}: {bad}");
        }
    }
}

#[test]
fn a_block_goes_with_its_last_layer() {
    let pool = pool();
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    let policy = policy::KeyDiff { tail_tokens: 0 };
    step(&mut sequence, 4 * BLOCK, Observation::Keys, 9);
    let plan = plan_token_budget(&sequence, &policy, BLOCK, 0);
    assert_eq!(plan.moves.len(), 5 * 3);
    // A round is one block of every layer.
    for round in plan.moves.chunks(5) {
        let pages: Vec<_> = round
            .iter()
            .map(|planned| match planned.kind {
                MoveKind::Drop(target) => target.page.unwrap(),
                MoveKind::Encode { .. } => panic!("{planned:?}"),
            })
            .collect();
        assert_eq!(pages, FULL_LAYERS);
    }
    for count in 1..=plan.moves.len() {
        let mut part = plan.clone();
        part.moves = vec![plan.moves[count - 1]];
        apply(&mut sequence, &part, count as u64);
        assert_eq!(sequence.dropped_pages(), count);
        check(&pool, &[&sequence]);
    }
    assert_eq!(sequence.kept_tokens(), BLOCK);
    // Twice is once.
    apply(&mut sequence, &plan, 99);
    assert_eq!(sequence.dropped_pages(), 15);
    for at in FULL_LAYERS {
        assert_eq!(sequence.view().groups[at.0].layers[at.1].len(), 1);
    }
}

#[test]
fn what_cannot_be_kept_is_refused_with_its_numbers() {
    let pool = pool();
    let config = SequenceConfig { max_tokens: Some(100), ..request(0, Fidelity::Evict) };
    let mut sequence = Sequence::new(&pool, config);
    assert_eq!(sequence.keep(20..40), Ok(()));
    assert_eq!(sequence.keep(7..7), Err(KeepError::Empty(7..7)));
    let error = sequence.keep(90..101).unwrap_err();
    assert_eq!(error, KeepError::PastEnd { span: 90..101, max_tokens: 100 });
    assert!(error.to_string().contains("at most 100"), "{error}");
    // A span of one token keeps its block, and no other.
    extend(&mut sequence, 96);
    let plan = plan_token_budget(&sequence, &policy::Sinks { tail_tokens: 0 }, 0, 0);
    let firsts: Vec<usize> = plan.moves.iter().map(|planned| planned.first).collect();
    assert_eq!(firsts, [48, 64, 80]);
    // Controls look at no mark.
    let plan = plan_token_budget(&sequence, &policy::Window, 0, 0);
    assert_eq!(plan.moves.len(), 6);
}

/// A round of a policy that chooses per layer counts as one block, so that eviction comes in batches of
/// whole blocks, and the pool is never short while anything may go.
#[test]
fn generation_goes_on_for_ever_under_every_policy() {
    for name in policy::NAMES {
        let shape = PageShape { kv_heads: 1, head_dim: 32, block_size: BLOCK };
        let groups = vec![GroupConfig { layers: 6, shape, window: None, pinned: vec![] }];
        let ladder = Ladder::default();
        let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
        let budget_bytes = 2 * minimum_budget_bytes(&config, Fidelity::Evict);
        let pool = BlockPool::new(PoolConfig { budget_bytes, ..config }).unwrap();
        let policy = by_name(name, &PolicyOptions::default()).unwrap();
        let config = SequenceConfig { trained_context: 1000, ..request(0, Fidelity::Evict) };
        let mut sequence = Sequence::new(&pool, config);
        while sequence.next_position() < 5000 {
            let tokens = 8;
            let plan = plan_relief(&pool, &[demand(&sequence, tokens, tokens)], &*policy);
            assert_eq!(plan.shortage, None, "{name} at {}", sequence.next_position());
            let drops: Vec<_> = plan
                .moves
                .iter()
                .filter(|planned| matches!(planned.kind, MoveKind::Drop(_)))
                .collect();
            let layers = if policy.per_layer() { 6 } else { 1 };
            assert!(drops.is_empty() || drops.len() >= relief::EVICT_BATCH_BLOCKS * layers);
            apply(&mut sequence, &plan, 0);
            let start = sequence.next_position();
            extend(&mut sequence, tokens);
            for layer in 0..6 {
                match policy.observes() {
                    Observation::Nothing => {}
                    Observation::Keys => {
                        let first = start / BLOCK * BLOCK;
                        sequence.observe_keys(0, layer, first, key_score(1, (0, layer), first));
                    }
                    Observation::AttentionMass { decay } => {
                        let rows = start..start + tokens;
                        let masses: Vec<f32> =
                            rows.flat_map(|p| masses_of(&sequence, (0, layer), 1, p)).collect();
                        sequence.observe_masses(0, layer, &masses, decay);
                    }
                }
            }
        }
        check(&pool, &[&sequence]);
        assert!(sequence.positions_are_relative() && sequence.kept_tokens() < 1000);
    }
}
