//! The fake model is a model: its states follow from the tokens alone however they are cut, and any
//! foreign, stale or lost page changes them.

use reef_kv::page::{PageFormat, PageShape};
use reef_kv::*;
use reef_sim::content::MARK_BITS;
use reef_sim::pages::{Misread, PageModel, Rows};
use reef_sim::random::Random;
use reef_sim::reference::unpaged;

const ROOT: u32 = 77;

fn groups(shape: PageShape, window: usize) -> Vec<GroupConfig> {
    let full = GroupConfig { layers: 2, shape, window: None, pinned: vec![] };
    vec![full.clone(), GroupConfig { layers: 3, window: Some(window), ..full }]
}

fn pool(groups: Vec<GroupConfig>) -> BlockPool {
    let budget_bytes = 8 << 20;
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: false, ladder: Ladder::default() })
        .unwrap()
}

fn sequence(pool: &BlockPool, request: u64) -> Sequence {
    let contract = Fidelity::Evict;
    let max_tokens = Some(2000);
    Sequence::new(
        pool,
        SequenceConfig { request, contract, priority: 0, trained_context: 4096, max_tokens },
    )
}

/// Computes `tokens` in chunks of random sizes, committing each.
fn paged(
    model: &mut PageModel,
    sequence: &mut Sequence,
    tokens: &[u32],
    random: &mut Random,
    found: &mut Vec<Misread>,
) -> Vec<u64> {
    let mut states = Vec::new();
    while states.len() < tokens.len() {
        let count = random.size(1, 70).min(tokens.len() - states.len());
        sequence.grow(count).unwrap();
        let rows = Rows {
            tokens: &tokens[states.len()..][..count],
            first_position: sequence.next_position() as u32,
            view: sequence.view(),
            root: ROOT,
        };
        states.extend(model.compute(sequence.pool().arena(), &rows, usize::MAX, found));
        sequence.commit(count);
    }
    states
}

#[test]
fn states_follow_from_the_tokens_however_they_are_cut() {
    let shapes = [(1, 32, 16), (2, 16, 16), (2, 48, 32), (1, 64, 64)];
    for (seed, (kv_heads, head_dim, block_size)) in (0..).zip(shapes) {
        let mut random = Random::new(seed, "cut");
        let groups = groups(PageShape { kv_heads, head_dim, block_size }, random.size(1, 90));
        let tokens: Vec<u32> = (0..300).map(|_| random.size(0, 63) as u32).collect();
        let expected = unpaged(&groups, ROOT, &tokens);
        let pool = pool(groups.clone());
        let mut model = PageModel::new(&groups);
        for request in 0..3 {
            let mut found = Vec::new();
            let mut sequence = sequence(&pool, request);
            let states = paged(&mut model, &mut sequence, &tokens, &mut random, &mut found);
            assert_eq!(found, []);
            assert!(states == expected, "seed {seed}, cut {request}");
        }
    }
}

#[test]
fn marks_survive_every_format_and_the_rest_does_not() {
    for format in PageFormat::ALL {
        let groups = groups(PageShape { kv_heads: 2, head_dim: 16, block_size: 16 }, 1000);
        let pool = pool(groups.clone());
        let mut model = PageModel::new(&groups);
        let mut random = Random::new(3, "formats");
        let tokens: Vec<u32> = (0..100).map(|_| random.size(0, 63) as u32).collect();
        let mut found = Vec::new();
        let mut sequence = sequence(&pool, 0);
        paged(&mut model, &mut sequence, &tokens[..90], &mut random, &mut found);
        let plan = plan_format_at_seal(&sequence, format, 0, 0);
        apply_relief(&pool, &mut [&mut sequence], &plan, 0, &mut |jobs| {
            for job in jobs {
                reef_kernels::page::reencode(
                    reef_kernels::dispatch::Tier::detect(),
                    &job.shape,
                    job.source_format,
                    job.target_format,
                    job.source,
                    job.target,
                )
                .unwrap();
            }
        })
        .unwrap();
        let states = paged(&mut model, &mut sequence, &tokens[90..], &mut random, &mut found);
        assert_eq!(found, [], "{}", format.name());
        let same = states == unpaged(&groups, ROOT, &tokens)[90..];
        assert_eq!(same, format == PageFormat::F16, "{}", format.name());
    }
}

#[test]
fn foreign_pages_lost_pages_and_unwritten_ones_show() {
    let groups = groups(PageShape { kv_heads: 1, head_dim: MARK_BITS, block_size: 16 }, 64);
    let pool = pool(groups.clone());
    let mut model = PageModel::new(&groups);
    let mut random = Random::new(5, "foreign");
    let mut found = Vec::new();
    let mut written = |request, length: usize, found: &mut Vec<Misread>| {
        let tokens: Vec<u32> = (0..length).map(|_| random.size(0, 63) as u32).collect();
        let mut sequence = sequence(&pool, request);
        let states = paged(&mut model, &mut sequence, &tokens, &mut random, found);
        (sequence, states)
    };
    let (one, _) = written(1, 64, &mut found);
    let (mut other, _) = written(2, 64, &mut found);
    other.grow(1).unwrap();
    assert_eq!(found, []);
    let mut last_row = |view: &page::SequenceView, first_position: u32| {
        let mut found = Vec::new();
        let rows = Rows { tokens: &[9], first_position, view, root: ROOT };
        let states = model.compute(pool.arena(), &rows, usize::MAX, &mut found);
        (states, found.first().map(|misread| misread.what))
    };
    let (true_states, none) = last_row(other.view(), 64);
    assert_eq!(none, None);
    for layer in 0..2 {
        let mut view = other.view().clone();
        let mine = view.groups[0].layers[layer][1];
        view.groups[0].layers[layer][1].offset = one.view().groups[0].layers[layer][1].offset;
        assert_eq!(last_row(&view, 64).1, Some("bytes of another text"));
        view.groups[0].layers[layer][1].offset = mine.offset;
        view.groups[0].layers[layer].swap(1, 2);
        view.groups[0].layers[layer][1].first = 16;
        view.groups[0].layers[layer][2].first = 32;
        assert_eq!(last_row(&view, 64).1, Some("another position's bytes"));
        let mut view = other.view().clone();
        view.groups[0].layers[layer].remove(2);
        let (states, none) = last_row(&view, 64);
        assert_eq!(none, None, "what was dropped is just not read");
        assert_ne!(states, true_states);
        let mut view = other.view().clone();
        view.groups[0].layers.swap(0, 1);
        assert_eq!(last_row(&view, 64).1, Some("another layer's bytes"));
    }
    // The swapped layers were written to; once more in their order, then a position is left out.
    assert_eq!(last_row(other.view(), 64), (true_states, None));
    other.grow(4).unwrap();
    let unwritten = last_row(other.view(), 66).1;
    assert!(unwritten.is_some());
}
