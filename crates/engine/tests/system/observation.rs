//! What policies are shown, checked against plain arithmetic, and that they act on it.

use std::collections::BTreeMap;

use reef_engine::session::{Rules, Session};
use reef_kernels::page::decode_page;
use reef_kv::page::PageFormat;
use reef_kv::policy::{PolicyOptions, by_name};
use reef_kv::{BlockPool, Fidelity, Sequence};
use reef_model::runner::{Activations, BatchSequence, ModelRunner};

use super::support::drive::{endless, roomy_pool};
use super::support::random::Random;
use super::support::tiny::{Tiny, options};

fn rules(policy: &str) -> Rules {
    Rules {
        policy: by_name(policy, &PolicyOptions { tail_tokens: 0, seed: 0 }).unwrap(),
        token_budget: Some(160),
        ..Rules::default()
    }
}

/// Layers of full-attention groups: (KV group, layer in it).
fn full_layers(pool: &BlockPool) -> Vec<(usize, usize)> {
    let groups = pool.config().groups.iter().enumerate();
    let full = groups.filter(|(_, group)| group.window.is_none());
    full.flat_map(|(index, group)| (0..group.layers).map(move |layer| (index, layer))).collect()
}

/// First positions of a layer's blocks.
fn held(sequence: &Sequence, (group, layer): (usize, usize)) -> Vec<usize> {
    let pages = &sequence.view().groups[group].layers[layer];
    pages.iter().map(|page| page.first as usize).collect()
}

#[test]
fn masses_are_probabilities_of_observed_sequences_alone() {
    for architecture in ["llama", "gemma3"] {
        let tiny = Tiny { layers: 6, ..Tiny::new(architecture) };
        let mut runner = tiny.build().runner(options(Activations::F32));
        let pool = roomy_pool(&runner, 32, 400);
        let ids = Random(61).tokens(100, 101);
        let start = |length: usize| {
            let mut sequence = Sequence::new(&pool, endless(Fidelity::Evict, usize::MAX));
            sequence.grow(length).unwrap();
            sequence
        };
        let (first, second) = (start(100), start(70));
        let run = |runner: &mut ModelRunner, observed: [bool; 2]| {
            let batch = [(&first, 100, observed[0]), (&second, 70, observed[1])].map(
                |(sequence, length, observe)| BatchSequence {
                    tokens: &ids[..length],
                    first_position: 0,
                    view: sequence.view(),
                    observe,
                },
            );
            runner.forward(pool.arena(), &batch).unwrap();
            let rows: Vec<usize> = (0..170).collect();
            runner.logits(&rows).to_vec()
        };
        let plain = run(&mut runner, [false, false]);
        assert!(full_layers(&pool).iter().all(|at| runner.masses(1, at.0, at.1).is_empty()));
        assert!(run(&mut runner, [false, true]) == plain, "observing changes no logit");
        for (index, group) in pool.config().groups.iter().enumerate() {
            for layer in 0..group.layers {
                assert!(runner.masses(0, index, layer).is_empty(), "not asked for");
                let masses = runner.masses(1, index, layer);
                if group.window.is_some() {
                    assert!(masses.is_empty(), "windows are not observed");
                    continue;
                }
                assert_eq!(masses.len(), 70 * 3);
                for (row, masses) in masses.chunks(3).enumerate() {
                    let sum: f32 = masses.iter().sum();
                    assert!((sum - tiny.heads as f32).abs() < 1e-4, "row {row}: {masses:?}");
                    // A row sees no block that begins after it.
                    assert!((0..3).all(|page| page * 32 <= row || masses[page] == 0.0));
                    assert!(masses.iter().all(|mass| *mass >= 0.0));
                }
            }
        }
        let alone = runner.masses(1, full_layers(&pool)[0].0, 0).to_vec();
        run(&mut runner, [true, true]);
        assert!(runner.masses(1, full_layers(&pool)[0].0, 0) == alone, "whatever the neighbor");
    }
}

/// TOVA drops in each layer the block that the last query of the step before attended to least.
#[test]
fn tova_drops_what_the_last_query_attended_to_least() {
    for architecture in ["llama", "gemma3"] {
        let model = Tiny { layers: 6, ..Tiny::new(architecture) }.build();
        let mut runner = model.runner(options(Activations::F32));
        let pool = roomy_pool(&runner, 32, 400);
        let rules = rules("tova");
        let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, usize::MAX));
        let ids = Random(62).tokens(500, 101);
        let mut last: BTreeMap<(usize, usize), Vec<(usize, f32)>> = BTreeMap::new();
        let (mut drops, mut oldest) = (0, 0);
        for tokens in ids.chunks(16) {
            session.advance(&mut runner, tokens).unwrap();
            for at in full_layers(&pool) {
                let now = held(session.sequence(), at);
                let next = session.sequence().next_position() - tokens.len();
                if let Some(seen) = last.get(&at) {
                    // Neither the first block nor an open one.
                    let may_go = |first: usize| first > 0 && first + 32 <= next;
                    let candidates = seen.iter().filter(|(first, _)| may_go(*first));
                    let least = candidates.clone().min_by(|a, b| a.1.total_cmp(&b.1));
                    for (first, _) in seen.iter().filter(|(first, _)| !now.contains(first)) {
                        assert_eq!(
                            Some(*first),
                            least.map(|(first, _)| *first),
                            "{at:?} at {next}"
                        );
                        drops += 1;
                        oldest += usize::from(candidates.clone().next().unwrap().0 == *first);
                    }
                }
                let masses = runner.masses(0, at.0, at.1);
                let row = &masses[masses.len() - now.len()..];
                last.insert(at, now.into_iter().zip(row.iter().copied()).collect());
            }
        }
        assert!(drops >= 20 && oldest < drops, "{drops} drops, {oldest} of the oldest block");
    }
}

/// KeyDiff drops in each layer the block whose keys are most like the mean direction of all keys, by
/// plain arithmetic over the page as it was when sealed, in f16, before it went to 4 bits.
#[test]
fn keydiff_drops_the_keys_that_are_most_like_the_rest() {
    for format_at_seal in [PageFormat::F16, PageFormat::Int4] {
        let model = Tiny::new("llama").build();
        let mut runner = model.runner(options(Activations::F32));
        let pool = roomy_pool(&runner, 32, 400);
        let rules = Rules { format_at_seal, ..rules("keydiff") };
        let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, usize::MAX));
        let ids = Random(63).tokens(500, 101);
        let mut twins = vec![KeyTwin::default(); 3];
        let mut drops = 0;
        for tokens in ids.chunks(32) {
            // The same positions first without accepting them: their pages are still in f16.
            Session::probe_all(&mut runner, std::slice::from_mut(&mut session), tokens).unwrap();
            for (layer, twin) in twins.iter_mut().enumerate() {
                let now = held(session.sequence(), (0, layer));
                drops += twin.check_drops(&now);
                if tokens.len() == 32 {
                    twin.seal(&runner, &pool, session.sequence(), layer);
                }
            }
            session.advance(&mut runner, tokens).unwrap();
        }
        assert!(drops >= 15, "{drops} drops");
    }
}

/// Scores of one layer's blocks in f64.
#[derive(Clone, Default)]
struct KeyTwin {
    /// Sum of unit keys per KV head.
    anchors: Vec<Vec<f64>>,
    /// First position → score.
    scores: BTreeMap<usize, f64>,
}

impl KeyTwin {
    /// Every block that is gone had the lowest score of those that might go (the first may not). Scores
    /// closer than f32 tells apart may go in any order.
    fn check_drops(&mut self, held: &[usize]) -> usize {
        let gone: Vec<usize> =
            self.scores.keys().copied().filter(|first| !held.contains(first)).collect();
        for first in &gone {
            let score = self.scores.remove(first).unwrap();
            let others =
                self.scores.iter().filter(|(first, _)| **first > 0 && !gone.contains(first));
            let least = others.map(|(_, score)| *score).fold(f64::INFINITY, f64::min);
            assert!(score <= least + 1e-5, "{first} with {score} went before one with {least}");
        }
        gone.len()
    }

    /// Adds the newest block, whose page is still in f16.
    fn seal(&mut self, runner: &ModelRunner, pool: &BlockPool, sequence: &Sequence, layer: usize) {
        let page = *sequence.view().groups[0].layers[layer].last().unwrap();
        assert_eq!(page.format, PageFormat::F16);
        let shape = runner.spec().page_shape(32);
        let dim = shape.head_dim;
        let mut keys = vec![0.0; shape.kv_heads * 32 * dim];
        let mut values = keys.clone();
        let bytes = &pool.arena().bytes()[page.byte_offset()..];
        decode_page(&shape, page.format, bytes, &mut keys, &mut values);
        self.anchors.resize(shape.kv_heads, vec![0.0; dim]);
        let unit = |key: &[f32]| {
            let norm = key.iter().map(|k| f64::from(*k).powi(2)).sum::<f64>().sqrt();
            key.iter().map(|k| f64::from(*k) / norm).collect::<Vec<f64>>()
        };
        let mut sum = 0.0;
        for (anchor, keys) in self.anchors.iter_mut().zip(keys.chunks(32 * dim)) {
            let units: Vec<Vec<f64>> = keys.chunks(dim).map(unit).collect();
            for key in &units {
                anchor.iter_mut().zip(key).for_each(|(anchor, key)| *anchor += key);
            }
            let norm = anchor.iter().map(|a| a * a).sum::<f64>().sqrt();
            let cosine = |key: &Vec<f64>| -> f64 {
                key.iter().zip(&*anchor).map(|(k, a)| k * a / norm).sum()
            };
            sum += units.iter().map(cosine).sum::<f64>();
        }
        self.scores.insert(page.first as usize, -sum / (shape.kv_heads * 32) as f64);
    }
}
