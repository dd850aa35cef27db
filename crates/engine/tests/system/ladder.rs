//! Down the ladder in the middle of a sequence: the bytes that come out, what was never touched, and
//! pages that had another life in another format.

use std::collections::BTreeMap;

use reef_engine::config::{pool_config, with_pinned};
use reef_engine::session::{Rules, Session};
use reef_kernels::dispatch::Tier;
use reef_kernels::page::decode_page;
use reef_kv::page::PageFormat;
use reef_kv::policy::{NAMES, PolicyOptions, Sinks, by_name};
use reef_kv::{BlockPool, Fidelity, Sequence, SequenceConfig, check_invariants};
use reef_model::runner::{Activations, ModelRunner, RunnerOptions};

use super::support::drive::{endless, logits_in_chunks, roomy_pool};
use super::support::files::{Likelihood, fetched};
use super::support::random::Random;
use super::support::tiny::{OUTLIER_CHANNEL, Tiny, options};

const ARCHITECTURES: [&str; 2] = ["llama", "gemma3"];

/// (KV group, layer, first position) → format and bytes of the page.
type Pages = BTreeMap<(usize, usize, u32), (PageFormat, Vec<u8>)>;

/// Every sealed page of `sequence`.
fn sealed_pages(sequence: &Sequence) -> Pages {
    let pool = sequence.pool();
    let mut pages = Pages::new();
    for (group, view) in sequence.view().groups.iter().enumerate() {
        let shape = pool.config().groups[group].shape;
        for (layer, held) in view.layers.iter().enumerate() {
            for page in held {
                if page.first as usize + shape.block_size <= sequence.next_position() {
                    let bytes = &pool.arena().bytes()[page.byte_offset()..];
                    let bytes = bytes[..shape.page_bytes(page.format)].to_vec();
                    pages.insert((group, layer, page.first), (page.format, bytes));
                }
            }
        }
    }
    pages
}

/// Logits of `ids` computed `chunk` at a time by `session`.
fn advance(
    session: &mut Session<'_>,
    runner: &mut ModelRunner,
    ids: &[u32],
    chunk: usize,
) -> Vec<f32> {
    let mut logits = Vec::new();
    for tokens in ids.chunks(chunk) {
        session.advance(runner, tokens).unwrap();
        let rows: Vec<usize> = (0..tokens.len()).collect();
        logits.extend_from_slice(runner.logits(&rows));
    }
    logits
}

/// Whichever way a block goes down, it ends as the same bytes, and what is computed after it has the
/// same bits.
fn check_ways_down(runner: &mut ModelRunner, ids: &[u32], past: usize) {
    use PageFormat::{Int4, Int8, K8V4};
    let rules = Rules::default();
    for (target, ways) in [
        (K8V4, vec![vec![K8V4], vec![Int8, K8V4]]),
        (Int4, vec![vec![Int4], vec![Int8, Int4], vec![K8V4, Int4], vec![Int8, K8V4, Int4]]),
    ] {
        let mut expected = None;
        for way in ways {
            let pool = roomy_pool(runner, 32, ids.len());
            let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, usize::MAX));
            advance(&mut session, runner, &ids[..past], 64);
            for format in &way {
                session.re_encode(runner.compute(), *format, 0, 0).unwrap();
            }
            let pages = sealed_pages(session.sequence());
            assert!(pages.values().all(|(format, _)| *format == target), "{way:?}");
            let logits = advance(&mut session, runner, &ids[past..], 1);
            assert_eq!(check_invariants(&pool, &[session.sequence()]), []);
            let (first_pages, first_logits) =
                expected.get_or_insert((pages.clone(), logits.clone()));
            assert!(pages == *first_pages, "{way:?}: other bytes");
            assert!(logits == *first_logits, "{way:?}: other logits");
        }
    }
}

#[test]
fn every_way_down_ends_in_the_same_bytes() {
    for architecture in ARCHITECTURES {
        let model = Tiny::new(architecture).build();
        let ids = Random(51).tokens(240, 101);
        check_ways_down(&mut model.plain_runner(), &ids, 200);
    }
}

#[test]
fn every_way_down_ends_in_the_same_bytes_with_smollm2() {
    let Some(gguf) = fetched("smollm2") else { return };
    let mut runner = ModelRunner::load(&gguf, options(Activations::Int8)).unwrap();
    check_ways_down(&mut runner, &Likelihood::golden("smollm2").ids[..110], 100);
}

/// K and V of a model of one layer do not depend on what its rows attended: so blocks brought down in
/// the middle are those of a run that sealed them so from the start, and so is what comes after.
#[test]
fn down_in_the_middle_is_as_if_from_the_start() {
    let model = Tiny { layers: 1, ..Tiny::new("llama") }.build();
    let ids = Random(52).tokens(220, 101);
    for format in PageFormat::ALL {
        let mut runner = model.plain_runner();
        let from_start = Rules { format_at_seal: format, ..Rules::default() };
        let pool = roomy_pool(&runner, 32, 220);
        let mut started = Session::new(&pool, &from_start, endless(Fidelity::Evict, usize::MAX));
        advance(&mut started, &mut runner, &ids[..192], 32);
        let plain = Rules::default();
        let config = SequenceConfig { request: 1, ..endless(Fidelity::Evict, usize::MAX) };
        let mut degraded = Session::new(&pool, &plain, config);
        advance(&mut degraded, &mut runner, &ids[..192], 64);
        degraded.re_encode(runner.compute(), format, 0, 0).unwrap();
        let decoded = |session: &Session<'_>| -> Vec<Vec<u32>> {
            let pages = sealed_pages(session.sequence());
            pages.into_values().map(|(format, bytes)| decode(&runner, format, &bytes).1).collect()
        };
        assert!(decoded(&started) == decoded(&degraded), "{format:?}");
        let expected = advance(&mut started, &mut runner, &ids[192..], 1);
        let found = advance(&mut degraded, &mut runner, &ids[192..], 1);
        assert!(expected == found, "{format:?}");
    }
}

/// A page's numbers, `[kv_heads][32][head_dim]` of K and then of V, and their bits.
fn decode(runner: &ModelRunner, format: PageFormat, page: &[u8]) -> (Vec<f32>, Vec<u32>) {
    let shape = runner.spec().page_shape(32);
    let count = shape.kv_heads * 32 * shape.head_dim;
    let mut numbers = vec![0.0; 2 * count];
    let (keys, values) = numbers.split_at_mut(count);
    decode_page(&shape, format, page, keys, values);
    let bits = numbers.iter().map(|number| number.to_bits()).collect();
    (numbers, bits)
}

/// Cases 44 and 55: blocks are dropped from the middle of lossy pages, again and again, and past the
/// trained context; the bytes of what stays never change.
#[test]
fn fifty_drops_change_no_byte_of_what_stays() {
    for architecture in ARCHITECTURES {
        let model = Tiny::new(architecture).build();
        let ids = Random(53).tokens(2000, 101);
        for format_at_seal in PageFormat::ALL {
            let mut runner = model.plain_runner();
            let rules = Rules {
                policy: Box::new(Sinks { tail_tokens: 64 }),
                format_at_seal,
                token_budget: Some(192),
                ..Rules::default()
            };
            let pool = roomy_pool(&runner, 32, 300);
            let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, 500));
            let (mut before, mut dropped) = (Pages::new(), 0);
            for tokens in ids.chunks(32) {
                let logits = advance(&mut session, &mut runner, tokens, 32);
                assert!(logits.iter().all(|logit| logit.is_finite()));
                let now = sealed_pages(session.sequence());
                for (place, page) in &before {
                    match now.get(place) {
                        Some(kept) => assert!(kept == page, "{format_at_seal:?} {place:?}"),
                        None => dropped += usize::from(place.0 == 0 && place.1 == 0),
                    }
                }
                before = now;
            }
            assert!(dropped >= 50, "{dropped} blocks were dropped");
            assert!(session.sequence().positions_are_relative());
        }
    }
}

/// Case 40: the newest tokens and the sinks in f16, what is older in int8: every page has the format that
/// its place asks for, at every step.
#[test]
fn formats_follow_the_age_of_blocks() {
    const SINKS: usize = 40;
    const TAIL: usize = 100;
    let model = Tiny::new("llama").build();
    let mut runner = model.plain_runner();
    let ids = Random(55).tokens(400, 101);
    let pool = roomy_pool(&runner, 32, 400);
    let rules = Rules {
        format_at_seal: PageFormat::Int8,
        sink_tokens: SINKS,
        tail_tokens: TAIL,
        ..Rules::default()
    };
    let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, 4096));
    for tokens in ids.chunks(7) {
        session.advance(&mut runner, tokens).unwrap();
        let next = session.sequence().next_position();
        for page in session.sequence().view().groups[0].layers.iter().flatten() {
            let first = page.first as usize;
            let old = first >= SINKS && first + 32 <= next.saturating_sub(TAIL);
            let expected = if old { PageFormat::Int8 } else { PageFormat::F16 };
            assert_eq!(page.format, expected, "block at {first} of {next} tokens");
        }
    }
}

/// Case 41: with every layer pinned nothing changes; with some pinned these hold f16 and the others the
/// format, and what is computed lies between.
#[test]
fn pinned_layers_are_read_in_f16() {
    let model = Tiny::new("llama").build();
    let ids = Random(56).tokens(200, 101);
    let rules = Rules { format_at_seal: PageFormat::Int4, ..Rules::default() };
    let mut runner = model.plain_runner();
    let mut run = |pinned: &[usize]| {
        let config = with_pinned(pool_config(runner.spec(), 32, 16 << 20), runner.spec(), pinned);
        let pool = BlockPool::new(config.unwrap()).unwrap();
        let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, 4096));
        let logits = advance(&mut session, &mut runner, &ids, 32);
        for ((_, layer, first), (format, _)) in sealed_pages(session.sequence()) {
            let expected = if pinned.contains(&layer) { PageFormat::F16 } else { PageFormat::Int4 };
            assert_eq!(format, expected, "layer {layer}, block at {first}");
        }
        logits
    };
    let (all, none, ends) = (run(&[0, 1, 2]), run(&[]), run(&[0, 2]));
    assert!(ends != none && ends != all);
    let mut runner = model.plain_runner();
    assert!(logits_in_chunks(&mut runner, 32, &Rules::default(), &ids, 32) == all);
    assert!(logits_in_chunks(&mut runner, 32, &rules, &ids, 32) == none);
}

/// Case 50: K and V of 600 in one channel. Scales are per block: nothing saturates, in any format, and
/// the outlier itself comes back within its format's rounding.
#[test]
fn an_outlier_does_not_saturate() {
    const OUTLIER: f32 = 600.0;
    let model = Tiny { layers: 1, outlier: OUTLIER, ..Tiny::new("llama") }.build();
    let ids = Random(57).tokens(70, 101);
    let mut runner = model.plain_runner();
    let mut pages = |format_at_seal| {
        let rules = Rules { format_at_seal, ..Rules::default() };
        let pool = roomy_pool(&runner, 32, 100);
        let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, 4096));
        let logits = advance(&mut session, &mut runner, &ids, 32);
        assert!(logits.iter().all(|logit| logit.is_finite()));
        let (format, bytes) = sealed_pages(session.sequence()).remove(&(0, 0, 0)).unwrap();
        assert_eq!(format, format_at_seal);
        decode(&runner, format, &bytes).0
    };
    let exact = pages(PageFormat::F16);
    let is_outlier = |i: &usize| i % 32 == OUTLIER_CHANNEL && i / 32 % 64 < 32;
    let outliers: Vec<usize> = (0..exact.len()).filter(is_outlier).collect();
    assert_eq!(outliers.len(), 64, "32 of K and 32 of V");
    assert!(outliers.iter().all(|i| (exact[*i] / OUTLIER - 1.0).abs() < 0.02));
    for format in PageFormat::ALL {
        // Half a step of three bits of mantissa, or of two; codes reach the extremes of a group.
        let tolerance = match format {
            PageFormat::Fp8E4M3 => 1.0 / 16.0,
            PageFormat::Fp8E5M2 => 1.0 / 8.0,
            _ => 1.0 / 512.0,
        };
        let found = pages(format);
        for i in &outliers {
            let error = (found[*i] / exact[*i] - 1.0).abs();
            assert!(error <= tolerance, "{format:?}: {} became {}", exact[*i], found[*i]);
        }
    }
}

/// Every policy with every format, past the trained context, on models with and without windows, on
/// every tier: the logits are finite and the same, the kept tokens within the budget, the accounts in
/// order.
#[test]
fn every_policy_with_every_format_past_the_trained_context() {
    const BUDGET: usize = 192;
    let ids = Random(58).tokens(420, 101);
    for architecture in ARCHITECTURES {
        let model = Tiny { layers: 6, ..Tiny::new(architecture) }.build();
        for (index, (policy, format_at_seal)) in pairs().enumerate() {
            let rules = Rules {
                policy: by_name(policy, &PolicyOptions { tail_tokens: 32, seed: 9 }).unwrap(),
                format_at_seal,
                token_budget: Some(BUDGET),
                ..Rules::default()
            };
            let mut expected: Option<Vec<f32>> = None;
            // The scalar tier takes its time: every fifth pair has each policy and each format once.
            let slow = |tier: &Tier| *tier == Tier::Scalar && index % 5 != 0;
            for tier in Tier::available().into_iter().filter(|tier| !slow(tier)) {
                let options = RunnerOptions { tier, ..options(Activations::Int8) };
                let mut runner = model.runner(options);
                let pool = roomy_pool(&runner, 32, 300);
                let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, 256));
                let mut logits = Vec::new();
                for tokens in ids.chunks(16) {
                    logits.extend(advance(&mut session, &mut runner, tokens, 16));
                    let sequence = session.sequence();
                    assert!(sequence.kept_tokens() <= BUDGET, "{policy} {format_at_seal:?}");
                    assert_eq!(check_invariants(&pool, &[sequence]), []);
                }
                let what = format!("{architecture} {policy} {format_at_seal:?} {tier:?}");
                assert!(session.sequence().positions_are_relative(), "{what}");
                assert!(session.sequence().usage().dropped_tokens > 0.0, "{what}");
                assert!(logits.iter().all(|logit| logit.is_finite()), "{what}");
                let expected = expected.get_or_insert_with(|| logits.clone());
                assert!(logits == *expected, "{what}");
            }
        }
    }
}

fn pairs() -> impl Iterator<Item = (&'static str, PageFormat)> {
    NAMES.into_iter().flat_map(|policy| PageFormat::ALL.map(|format| (policy, format)))
}
