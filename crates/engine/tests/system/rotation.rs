//! Keys rotated by a Hadamard matrix: the same attention, other bytes in the pages.

use reef_engine::session::{Rules, Session};
use reef_kernels::dispatch::Tier;
use reef_kernels::ops;
use reef_kernels::page::decode_page;
use reef_kv::page::PageFormat;
use reef_kv::policy::Sinks;
use reef_kv::{BlockPool, Fidelity};
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};

use super::support::drive::{endless, logits_in_chunks, roomy_pool};
use super::support::random::Random;
use super::support::tiny::{Tiny, TinyModel, options};

const ARCHITECTURES: [&str; 4] = ["llama", "qwen2", "qwen3", "gemma3"];

/// Root mean square of what rounding keys to other halves changes in logits, which are about 1.
const TOLERANCE: f64 = 4e-4;

fn runner(model: &TinyModel, tier: Tier, key_rotation: KeyRotation) -> ModelRunner {
    model.runner(RunnerOptions { tier, key_rotation, ..options(Activations::F32) })
}

fn rms_difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
    (squares.sum::<f64>() / a.len() as f64).sqrt()
}

#[test]
fn rotated_keys_give_the_same_logits_within_the_rounding_of_halves() {
    for architecture in ARCHITECTURES {
        let model = Tiny::new(architecture).build();
        let ids = Random(31).tokens(170, model.tiny.vocabulary);
        let logits = |tier, key_rotation, chunk| {
            let mut runner = runner(&model, tier, key_rotation);
            logits_in_chunks(&mut runner, 32, &Rules::default(), &ids, chunk)
        };
        let plain = logits(Tier::Scalar, KeyRotation::None, 170);
        let rotated = logits(Tier::Scalar, KeyRotation::Hadamard, 170);
        let difference = rms_difference(&plain, &rotated);
        assert!(difference < TOLERANCE, "{architecture}: {difference:.1e} apart");
        assert_ne!(plain, rotated, "{architecture}: nothing was rotated");
        for tier in Tier::available() {
            for chunk in [1, 40] {
                let what = format!("{architecture} on {} by {chunk}", tier.name());
                assert!(logits(tier, KeyRotation::Hadamard, chunk) == rotated, "{what}");
            }
        }
    }
}

/// Runs of kept blocks with queries turned further back, each of them rotated too.
#[test]
fn rotated_queries_follow_the_runs_of_relative_positions() {
    for architecture in ["llama", "gemma3"] {
        let model = Tiny::new(architecture).build();
        let ids = Random(32).tokens(330, model.tiny.vocabulary);
        let logits = |key_rotation| {
            let mut runner = runner(&model, Tier::detect(), key_rotation);
            let rules = Rules {
                policy: Box::new(Sinks { tail_tokens: 0 }),
                token_budget: Some(160),
                ..Rules::default()
            };
            let pool = roomy_pool(&runner, 32, 330);
            let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, 100));
            let mut logits = Vec::new();
            for tokens in ids.chunks(32) {
                session.advance(&mut runner, tokens).unwrap();
                let rows: Vec<usize> = (0..tokens.len()).collect();
                logits.extend_from_slice(runner.logits(&rows));
            }
            assert!(session.sequence().view().groups[0].shifts.len() > 1, "runs are tested");
            logits
        };
        let difference = rms_difference(&logits(KeyRotation::None), &logits(KeyRotation::Hadamard));
        assert!(difference < TOLERANCE, "{architecture}: {difference:.1e} apart");
    }
}

/// Keys and values of the first block of layer 0, decoded, `[kv_heads][32][head_dim]` each.
fn first_page(runner: &mut ModelRunner, pool: &BlockPool, ids: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let rules = Rules::default();
    let mut session = Session::new(pool, &rules, endless(Fidelity::Exact, usize::MAX));
    session.advance(runner, ids).unwrap();
    let (group, layer) = runner.spec().group_of(0);
    let page = session.sequence().view().groups[group].layers[layer][0];
    let shape = runner.spec().page_shape(32);
    let values = shape.kv_heads * 32 * shape.head_dim;
    let (mut k, mut v) = (vec![0.0; values], vec![0.0; values]);
    let bytes = &pool.arena().bytes()[page.byte_offset()..][..shape.page_bytes(PageFormat::F16)];
    decode_page(&shape, page.format, bytes, &mut k, &mut v);
    (k, v)
}

#[test]
fn pages_hold_rotated_keys_and_plain_values() {
    for architecture in ARCHITECTURES {
        let model = Tiny::new(architecture).build();
        let ids = Random(33).tokens(32, model.tiny.vocabulary);
        let page = |key_rotation| {
            let mut runner = runner(&model, Tier::detect(), key_rotation);
            let pool = roomy_pool(&runner, 32, 64);
            first_page(&mut runner, &pool, &ids)
        };
        let (mut keys, values) = page(KeyRotation::None);
        let (rotated_keys, rotated_values) = page(KeyRotation::Hadamard);
        assert!(values == rotated_values, "{architecture}");
        ops::hadamard(Tier::Scalar, &mut keys, model.tiny.head_dim);
        for (expected, found) in keys.iter().zip(&rotated_keys) {
            assert!((expected - found).abs() < 4e-3, "{architecture}: {found} not {expected}");
        }
    }
}
