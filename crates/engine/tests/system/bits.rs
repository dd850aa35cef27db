//! A row's logits are the same bits whatever surrounds its computation (kv-memory point 15).

use reef_engine::session::{Rules, Session};
use reef_kernels::dispatch::Tier;
use reef_kv::page::PageFormat;
use reef_kv::policy::{NAMES, PolicyOptions, by_name};
use reef_kv::{BlockPool, Fidelity, Sequence, SequenceConfig};
use reef_model::runner::{Activations, BatchSequence, ModelRunner, RunnerOptions};

use super::support::drive::{endless, logits_in_chunks, roomy_pool};
use super::support::files::{Likelihood, fetched};
use super::support::random::Random;
use super::support::tiny::{Tiny, TinyModel, Weights, options};

const ARCHITECTURES: [&str; 2] = ["llama", "gemma3"];
const ACTIVATIONS: [Activations; 2] = [Activations::Int8, Activations::F32];

fn model(architecture: &'static str) -> TinyModel {
    Tiny { weights: Weights::Mixed, seed: 9, ..Tiny::new(architecture) }.build()
}

fn ids(count: usize) -> Vec<u32> {
    Random(23).tokens(count, 101)
}

/// Every tier with either kind of activations.
fn ways() -> Vec<RunnerOptions> {
    let tiers = Tier::available().into_iter();
    tiers.flat_map(|tier| ACTIVATIONS.map(|a| RunnerOptions { tier, ..options(a) })).collect()
}

fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    let first = found.iter().zip(expected).position(differs);
    assert_eq!(first, None, "{what}: the first logit that differs");
    assert!(expected.iter().all(|logit| logit.is_finite()), "{what}");
}

#[test]
fn chunking_changes_no_bit() {
    for architecture in ARCHITECTURES {
        let (model, ids) = (model(architecture), ids(300));
        for options in ways() {
            let mut runner = model.runner(options);
            let whole = logits_in_chunks(&mut runner, 32, &Rules::default(), &ids, 256);
            for chunk in [1, 7, 32, 40] {
                let parts = logits_in_chunks(&mut runner, 32, &Rules::default(), &ids, chunk);
                assert_same(&parts, &whole, &format!("{architecture} {options:?} by {chunk}"));
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    for architecture in ARCHITECTURES {
        let (model, ids) = (model(architecture), ids(150));
        for options in ways() {
            let run = |threads, chunk| {
                let mut runner = model.runner(RunnerOptions { threads, ..options });
                logits_in_chunks(&mut runner, 32, &Rules::default(), &ids, chunk)
            };
            let one = run(1, 64);
            for (threads, chunk) in [(2, 64), (3, 64), (2, 1), (3, 7)] {
                let what = format!("{architecture} {options:?} on {threads} threads by {chunk}");
                assert_same(&run(threads, chunk), &one, &what);
            }
        }
    }
}

#[test]
fn tiers_change_no_bit() {
    for architecture in ARCHITECTURES {
        let (model, ids) = (model(architecture), ids(150));
        for activations in ACTIVATIONS {
            let in_format = |format_at_seal| Rules { format_at_seal, ..Rules::default() };
            for rules in PageFormat::ALL.map(in_format) {
                let run = |tier| {
                    let mut runner = model.runner(RunnerOptions { tier, ..options(activations) });
                    logits_in_chunks(&mut runner, 32, &rules, &ids, 32)
                };
                let scalar = run(Tier::Scalar);
                for tier in Tier::available() {
                    assert_same(
                        &run(tier),
                        &scalar,
                        &format!("{architecture} {activations:?} {tier:?}"),
                    );
                }
            }
        }
    }
}

/// Cases 38 and 49: every format by prefill chunks and token by token. With lossy sealed blocks a chunk
/// may not cross a seal: its rows would see the block before in f16.
#[test]
fn chunking_changes_no_bit_beside_lossy_blocks() {
    for architecture in ARCHITECTURES {
        let (model, ids) = (model(architecture), ids(170));
        for format_at_seal in PageFormat::ALL.into_iter().filter(|f| *f != PageFormat::F16) {
            let rules = Rules { format_at_seal, ..Rules::default() };
            for tier in Tier::available() {
                let options = RunnerOptions { tier, ..options(Activations::Int8) };
                let mut runner = model.runner(options);
                let plain = logits_in_chunks(&mut runner, 32, &Rules::default(), &ids, 32);
                let blocks = logits_in_chunks(&mut runner, 32, &rules, &ids, 32);
                assert!(plain[..32 * 101] == blocks[..32 * 101] && plain != blocks);
                for chunk in [1, 16] {
                    let parts = logits_in_chunks(&mut runner, 32, &rules, &ids, chunk);
                    let what = format!("{architecture} {format_at_seal:?} {options:?} by {chunk}");
                    assert_same(&parts, &blocks, &what);
                }
            }
        }
    }
}

/// Case 46: eight sequences side by side, each with its own format and policy, on a model with windows,
/// past the trained context: each has the bits it has alone.
#[test]
fn a_batch_of_eight_formats_and_policies_changes_no_bit() {
    const TRAINED_CONTEXT: usize = 200;
    for architecture in ARCHITECTURES {
        let (model, ids) = (model(architecture), ids(300));
        let formats = PageFormat::ALL.into_iter().chain([PageFormat::K8V4, PageFormat::Int8]);
        let policies = NAMES.into_iter().cycle();
        let rules: Vec<Rules> = formats
            .zip(policies)
            .map(|(format_at_seal, policy)| Rules {
                format_at_seal,
                policy: by_name(policy, &PolicyOptions { tail_tokens: 32, seed: 1 }).unwrap(),
                token_budget: Some(192),
                ..Rules::default()
            })
            .collect();
        let options = RunnerOptions { threads: 2, ..options(Activations::Int8) };
        let mut runner = model.runner(options);
        let run = |runner: &mut ModelRunner, rules: &[Rules]| {
            let pool = roomy_pool(runner, 32, 300 * rules.len());
            let config = |request: usize| SequenceConfig {
                request: request as u64,
                ..endless(Fidelity::Evict, TRAINED_CONTEXT)
            };
            let of_rules = |(request, rules)| Session::new(&pool, rules, config(request));
            let mut sessions: Vec<Session<'_>> = rules.iter().enumerate().map(of_rules).collect();
            let mut logits = vec![Vec::new(); rules.len()];
            for tokens in ids.chunks(16) {
                let batch = tokens.repeat(rules.len());
                Session::advance_all(runner, &mut sessions, &batch).unwrap();
                let rows: Vec<usize> = (0..batch.len()).collect();
                let all = runner.logits(&rows).chunks(tokens.len() * 101);
                logits.iter_mut().zip(all).for_each(|(sum, part)| sum.extend_from_slice(part));
            }
            assert!(sessions.iter().all(|s| s.sequence().positions_are_relative()));
            logits
        };
        let together = run(&mut runner, &rules);
        for (rules, found) in rules.iter().zip(&together) {
            let alone = run(&mut runner, std::slice::from_ref(rules)).remove(0);
            let what = (architecture, rules.format_at_seal, rules.policy.name());
            assert_same(found, &alone, &format!("{what:?}"));
        }
    }
}

/// A sequence in the middle of its way, and the tokens that come next.
struct Neighbor {
    sequence: Sequence,
    next: Vec<u32>,
}

impl Neighbor {
    fn new(runner: &mut ModelRunner, pool: &BlockPool, past: &[u32], next: &[u32]) -> Neighbor {
        let mut sequence = Sequence::new(pool, endless(Fidelity::Evict, usize::MAX));
        sequence.grow(past.len()).unwrap();
        let batch = [BatchSequence {
            tokens: past,
            first_position: 0,
            view: sequence.view(),
            observe: false,
        }];
        runner.forward(pool.arena(), &batch).unwrap();
        sequence.commit(past.len());
        sequence.grow(next.len()).unwrap();
        Neighbor { sequence, next: next.to_vec() }
    }

    fn batch(&self) -> BatchSequence<'_> {
        let first_position = self.sequence.next_position() as u32;
        BatchSequence {
            tokens: &self.next,
            first_position,
            view: self.sequence.view(),
            observe: false,
        }
    }
}

#[test]
fn neighbors_change_no_bit() {
    for architecture in ARCHITECTURES {
        let (model, ids) = (model(architecture), ids(200));
        for options in ways() {
            let mut runner = model.runner(options);
            let pool = roomy_pool(&runner, 32, 400);
            // (tokens before, tokens now): decode, verify and prefill rows side by side.
            let shapes = [(70, 1), (33, 5), (1, 40), (120, 1), (64, 17)];
            let sequences = shapes.map(|(past, next)| {
                Neighbor::new(&mut runner, &pool, &ids[..past], &ids[past..past + next])
            });
            let batch: Vec<BatchSequence<'_>> = sequences.iter().map(Neighbor::batch).collect();
            runner.forward(pool.arena(), &batch).unwrap();
            let rows: Vec<usize> = (0..shapes.iter().map(|(_, next)| next).sum()).collect();
            let together = runner.logits(&rows).to_vec();
            let mut first = 0;
            for (neighbor, (past, next)) in sequences.iter().zip(shapes) {
                runner.forward(pool.arena(), &[neighbor.batch()]).unwrap();
                let what = format!("{architecture} {options:?}, {next} tokens after {past}");
                for row in 0..next {
                    let alone = runner.logits(&[row]);
                    let at = (first + row) * alone.len();
                    assert_same(&together[at..][..alone.len()], alone, &what);
                }
                first += next;
            }
        }
    }
}

#[test]
fn a_session_among_others_changes_no_bit() {
    let (model, ids) = (model("llama"), ids(96));
    let mut runner = model.plain_runner();
    let pool = roomy_pool(&runner, 32, 400);
    let rules = Rules::default();
    let alone = logits_in_chunks(&mut runner, 32, &rules, &ids[..32], 32);
    let mut sessions =
        [0, 1, 2].map(|_| Session::new(&pool, &rules, endless(Fidelity::Exact, usize::MAX)));
    Session::advance_all(&mut runner, &mut sessions, &ids).unwrap();
    let rows: Vec<usize> = (0..32).collect();
    assert_same(runner.logits(&rows), &alone, "the first of three sessions");
    assert!(sessions.iter().all(|session| session.sequence().next_position() == 32));
}

/// The formats and sizes of real files: their prefill kernels against their decode kernels.
fn check_fetched(alias: &str, tokens: usize) {
    let Some(gguf) = fetched(alias) else { return };
    let ids = Likelihood::golden(alias).ids;
    let ids = &ids[..tokens];
    let tiers: Vec<Tier> = Tier::available().into_iter().filter(|t| *t != Tier::Scalar).collect();
    let mut across: Option<Vec<f32>> = None;
    for tier in tiers {
        let mut one =
            ModelRunner::load(&gguf, RunnerOptions { tier, ..options(Activations::Int8) }).unwrap();
        let whole = logits_in_chunks(&mut one, 32, &Rules::default(), ids, tokens);
        let by_token = logits_in_chunks(&mut one, 32, &Rules::default(), ids, 1);
        assert_same(&by_token, &whole, &format!("{alias} {tier:?} by token"));
        let options = RunnerOptions { tier, threads: 2, ..options(Activations::Int8) };
        let mut two = ModelRunner::load(&gguf, options).unwrap();
        let parts = logits_in_chunks(&mut two, 32, &Rules::default(), ids, 7);
        assert_same(&parts, &whole, &format!("{alias} {tier:?} on two threads by 7"));
        let expected = across.get_or_insert_with(|| whole.clone());
        assert_same(&whole, expected, &format!("{alias} {tier:?} against another tier"));
    }
}

#[test]
fn smollm2_prefill_and_decode_give_the_same_bits() {
    check_fetched("smollm2", 70);
}

#[test]
fn gemma3_prefill_and_decode_give_the_same_bits() {
    check_fetched("gemma3", 40);
}
