//! Each architecture against a plain f64 forward pass over the same numbers.

use std::collections::HashMap;

use reef_engine::session::{Rules, Session};
use reef_kernels::dispatch::Tier;
use reef_kv::Fidelity;
use reef_kv::policy::{NAMES, PolicyOptions, by_name};
use reef_model::runner::{Activations, ModelRunner, RunnerOptions};

use super::support::drive::{endless, logits_in_chunks, roomy_pool};
use super::support::random::Random;
use super::support::reference::{self, causal};
use super::support::tiny::{Scaling, Tiny, TinyModel, Weights, options};

/// Root mean square of the differences of logits, which are about 1: what a wrong formula changes.
const TOLERANCE: f64 = 2e-4;
/// Largest single difference. A key whose f32 and f64 values round to different halves moves a few
/// logits by this much; the architectures' other goldens (smaller keys) bound it more tightly.
const SINGLE_TOLERANCE: f64 = 4e-3;
const BLOCK_SIZE: usize = 32;

/// (root mean square, largest) of the differences.
fn differences(found: impl Iterator<Item = f64>, expected: &[f64]) -> (f64, f64) {
    let (mut sum, mut largest) = (0.0, 0.0);
    for (found, expected) in found.zip(expected) {
        let difference = (found - expected).abs();
        // NaN is the largest.
        largest = if difference <= largest { largest } else { difference };
        sum += difference * difference;
    }
    ((sum / expected.len() as f64).sqrt(), largest)
}

fn assert_close(found: &[f32], expected: &[Vec<f64>], what: &str) {
    let expected = expected.concat();
    assert_eq!(found.len(), expected.len());
    let (mean, largest) = differences(found.iter().map(|logit| f64::from(*logit)), &expected);
    let close = mean <= TOLERANCE && largest <= SINGLE_TOLERANCE;
    assert!(close, "{what}: {mean:.1e} apart on average, {largest:.1e} at most");
}

fn check(tiny: Tiny) {
    let model = tiny.build();
    let ids = Random(7).tokens(75, tiny.vocabulary);
    let expected = reference::logits(&model, &ids, &causal);
    for tier in Tier::available() {
        let mut runner = model.runner(RunnerOptions { tier, ..options(Activations::F32) });
        let found = logits_in_chunks(&mut runner, BLOCK_SIZE, &Rules::default(), &ids, 20);
        assert_close(&found, &expected, &format!("{tiny:?} on {}", tier.name()));
    }
}

#[test]
fn llama_equals_the_plain_forward_pass() {
    check(Tiny::new("llama"));
    check(Tiny { weights: Weights::Mixed, seed: 3, ..Tiny::new("llama") });
}

#[test]
fn qwen2_equals_the_plain_forward_pass() {
    check(Tiny::new("qwen2"));
}

#[test]
fn qwen3_equals_the_plain_forward_pass() {
    check(Tiny::new("qwen3"));
}

#[test]
fn gemma3_equals_the_plain_forward_pass() {
    // A window that is no multiple of a block, so that its edge falls inside one.
    check(Tiny::new("gemma3"));
    check(Tiny { layers: 4, window: 3, seed: 5, ..Tiny::new("gemma3") });
}

#[test]
fn rope_scaling_equals_the_plain_forward_pass() {
    for scaling in [Scaling::Linear(3.0), Scaling::Yarn(4.0, 64), Scaling::Factors] {
        check(Tiny { scaling, ..Tiny::new("llama") });
    }
    check(Tiny { scaling: Scaling::Yarn(8.0, 2048), ..Tiny::new("qwen2") });
    // Local layers keep their frequencies.
    check(Tiny { scaling: Scaling::Linear(8.0), ..Tiny::new("gemma3") });
}

/// A comparison that cannot fail shows nothing: another seed, another scaling and another window all
/// lie far outside the tolerance.
#[test]
fn the_comparison_sees_small_faults() {
    let ids = Random(7).tokens(75, 101);
    let far = |a: Tiny, b: Tiny| {
        let logits = |tiny: Tiny| reference::logits(&tiny.build(), &ids, &causal).concat();
        let (mean, _) = differences(logits(a).into_iter(), &logits(b));
        assert!(mean > 10.0 * TOLERANCE, "{mean}");
    };
    let (llama, gemma) = (Tiny::new("llama"), Tiny::new("gemma3"));
    far(llama, Tiny { scaling: Scaling::Linear(1.1), ..llama });
    far(llama, Tiny { scaling: Scaling::Yarn(4.0, 64), ..llama });
    far(gemma, Tiny { window: gemma.window + 1, ..gemma });
}

/// Blocks are dropped and positions turn relative on the way: every row must see exactly what the
/// plain forward pass sees that leaves the dropped tokens out, layer by layer, and closes the gaps they
/// left.
fn check_eviction(tiny: Tiny, policy: &str, trained_context: usize, expect_relative: bool) {
    let model = tiny.build();
    let ids = Random(11).tokens(330, tiny.vocabulary);
    let mut runner = model.runner(options(Activations::F32));
    let (found, seen) = run_with_budget(&mut runner, &ids, policy, trained_context);
    let sight = |layer: usize, row: usize, token: usize| {
        let shift = seen.get(&(layer, row / BLOCK_SIZE, token / BLOCK_SIZE)).copied();
        shift.filter(|_| token <= row)
    };
    let expected = reference::logits(&model, &ids, &sight);
    assert_close(&found, &expected, &format!("{policy} on {tiny:?}"));
    let last_full = (0..tiny.layers).rev().find(|layer| !tiny.is_local(*layer)).unwrap();
    let dropped = (0..10).filter(|block| !seen.contains_key(&(last_full, 10, *block))).count();
    assert!(dropped >= 5, "{policy}: only {dropped} blocks are out of sight of the last row");
    assert_eq!(seen.values().any(|shift| *shift > 0), expect_relative, "{policy}");
}

/// (layer of the model, block of a row, block of a token) → shift, of what was seen.
type Seen = HashMap<(usize, usize, usize), usize>;

/// Logits with 160 tokens kept, and what each row of full layers saw.
fn run_with_budget(
    runner: &mut ModelRunner,
    ids: &[u32],
    policy: &str,
    trained_context: usize,
) -> (Vec<f32>, Seen) {
    let rules = Rules {
        policy: by_name(policy, &PolicyOptions { tail_tokens: 0, seed: 5 }).unwrap(),
        token_budget: Some(160),
        ..Rules::default()
    };
    let pool = roomy_pool(runner, BLOCK_SIZE, ids.len());
    let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, trained_context));
    let (mut logits, mut seen) = (Vec::new(), HashMap::new());
    for (block, tokens) in ids.chunks(BLOCK_SIZE).enumerate() {
        session.advance(runner, tokens).unwrap();
        let rows: Vec<usize> = (0..tokens.len()).collect();
        logits.extend_from_slice(runner.logits(&rows));
        let groups = session.sequence().view().groups.iter().zip(&runner.spec().groups);
        for (view, spec) in groups.filter(|(_, spec)| spec.window.is_none()) {
            for ((pages, runs), layer) in view.layers.iter().zip(&view.runs).zip(&spec.layers) {
                for page in pages {
                    let shift = view.shifts[runs[usize::from(page.run)] as usize] as usize;
                    seen.insert((*layer, block, page.first as usize / BLOCK_SIZE), shift);
                }
            }
        }
    }
    (logits, seen)
}

#[test]
fn dropped_blocks_are_out_of_sight() {
    for policy in NAMES {
        check_eviction(Tiny::new("llama"), policy, 4096, false);
        check_eviction(Tiny::new("gemma3"), policy, 4096, false);
    }
}

#[test]
fn relative_positions_close_the_gaps_of_dropped_blocks() {
    for policy in NAMES.into_iter().filter(|policy| *policy != "window") {
        check_eviction(Tiny::new("llama"), policy, 200, true);
        check_eviction(
            Tiny { scaling: Scaling::Yarn(4.0, 64), ..Tiny::new("qwen3") },
            policy,
            200,
            true,
        );
        check_eviction(Tiny { layers: 6, ..Tiny::new("gemma3") }, policy, 200, true);
    }
    // What a window keeps is one run: nothing needs a shift.
    check_eviction(Tiny::new("llama"), "window", 200, false);
}

/// Int8 activations and weights stay near the same reference.
#[test]
fn quantized_activations_stay_close() {
    for architecture in ["llama", "qwen2", "qwen3", "gemma3"] {
        let model: TinyModel = Tiny { weights: Weights::Q8_0, ..Tiny::new(architecture) }.build();
        let ids = Random(7).tokens(75, model.tiny.vocabulary);
        let expected = reference::logits(&model, &ids, &causal);
        let mut runner = model.plain_runner();
        let found = logits_in_chunks(&mut runner, BLOCK_SIZE, &Rules::default(), &ids, 20);
        let expected = expected.concat();
        let (error, _) = differences(found.iter().map(|logit| f64::from(*logit)), &expected);
        let (size, _) = differences(expected.iter().map(|_| 0.0), &expected);
        let relative = error / size;
        assert!(relative < 0.04, "{architecture}: relative error {relative}");
    }
}
