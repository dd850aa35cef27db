//! Window groups give back what leaves the window.

use reef_engine::session::{Rules, Session};
use reef_kv::page::PageFormat;
use reef_kv::{Fidelity, check_invariants};
use reef_model::runner::{Activations, ModelRunner};

use super::support::drive::{endless, engine, generate, greedy, roomy_pool};
use super::support::files::{Likelihood, fetched};
use super::support::random::Random;
use super::support::tiny::{Tiny, options};

/// Computes `ids` in chunks; after each the window groups hold no block that no later query sees, and
/// bytes held are those of the blocks in the tables.
fn check(runner: &mut ModelRunner, ids: &[u32], chunk: usize) {
    let pool = roomy_pool(runner, 32, ids.len());
    let rules = Rules::default();
    let mut session = Session::new(&pool, &rules, endless(Fidelity::Exact, usize::MAX));
    for tokens in ids.chunks(chunk) {
        session.advance(runner, tokens).unwrap();
        let sequence = session.sequence();
        let next = sequence.next_position();
        let mut bytes = 0;
        for (group, view) in pool.config().groups.iter().zip(&sequence.view().groups) {
            let blocks = view.layers[0].len();
            let first_seen = group.window.map_or(0, |window| (next + 1).saturating_sub(window));
            assert_eq!(blocks, next.div_ceil(32) - first_seen / 32, "at {next}: {group:?}");
            bytes += blocks * group.block_bytes(PageFormat::F16);
        }
        assert_eq!(sequence.usage().held_bytes, bytes);
        assert_eq!(pool.accounts().used_bytes(), bytes);
        assert_eq!(sequence.usage().dropped_tokens, 0.0, "leaving a window is no drop");
        assert_eq!(check_invariants(&pool, &[sequence]), []);
    }
    drop(session);
    assert_eq!(pool.accounts().used_bytes(), 0);
}

#[test]
fn of_a_tiny_gemma() {
    let tiny = Tiny { layers: 6, ..Tiny::new("gemma3") };
    let ids = Random(6).tokens(500, tiny.vocabulary);
    let mut runner = tiny.build().plain_runner();
    [1, 33, 100].iter().for_each(|chunk| check(&mut runner, &ids, *chunk));
}

#[test]
fn of_gemma3() {
    let Some(gguf) = fetched("gemma3") else { return };
    let mut runner = ModelRunner::load(&gguf, options(Activations::Int8)).unwrap();
    let windows: Vec<_> = runner.spec().groups.iter().map(|g| (g.layers.len(), g.window)).collect();
    assert_eq!(windows, [(3, None), (15, Some(512))]);
    check(&mut runner, &Likelihood::golden("gemma3").ids, 200);
}

/// With windows an exact request of many tokens fits a budget that full attention would not.
#[test]
fn exact_generation_profits_from_windows() {
    let tiny = Tiny { layers: 6, ..Tiny::new("gemma3") };
    let model = tiny.build();
    let pool = roomy_pool(&model.plain_runner(), 32, 1500);
    let budget_bytes = pool.bytes_for_tokens(1500, PageFormat::F16, 256);
    let mut engine = engine(model.plain_runner(), budget_bytes);
    let generation =
        generate(&mut engine, &greedy(&Random(6).tokens(700, 101), 700, Fidelity::Exact));
    let kv = &generation.usage.kv;
    assert_eq!((generation.token_ids.len(), kv.relief.len()), (700, 0));
    assert!(kv.peak_bytes < kv.bytes_at_f16 * 6 / 10, "{kv:?}");
}
