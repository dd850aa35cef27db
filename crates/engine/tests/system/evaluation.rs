//! What `reef eval` measures is what it says: treatments beside one another do not disturb one another,
//! questions leave no trace, ways down end in the same bytes, references agree where they must.

use reef_engine::eval::descent::{Descent, Path};
use reef_engine::eval::h2o_reference::H2oReference;
use reef_engine::eval::re_encoded::{Restart, score_re_encoded};
use reef_engine::eval::recall::{Answer, Difficulty, Language, Task, ask};
use reef_engine::eval::stream::stream;
use reef_engine::eval::{Eviction, Lanes, Treatment};
use reef_engine::score::{ScoreOptions, Scoring, TokenScore, score, score_together};
use reef_engine::session::{EngineError, Rules, Session};
use reef_kv::page::PageFormat;
use reef_kv::policy::NAMES;
use reef_model::runner::ModelRunner;

use super::support::drive::{endless, mean, roomy_pool};
use super::support::random::Random;
use super::support::tiny::Tiny;

const BLOCK_SIZE: usize = 32;

fn evicting(format: PageFormat, policy: &str, budget_tokens: usize) -> Treatment {
    let eviction = Eviction { policy: policy.into(), budget_tokens, seed: 1 };
    Treatment { eviction: Some(eviction), ..Treatment::flat(format) }
}

fn rules(treatments: &[Treatment]) -> Vec<Rules> {
    treatments.iter().map(|treatment| treatment.rules().unwrap()).collect()
}

fn lanes(treatments: &[Rules]) -> Lanes<'_> {
    Lanes { block_size: BLOCK_SIZE, treatments, pinned_layers: &[] }
}

/// Every format, and every policy.
fn all_treatments() -> Vec<Treatment> {
    let formats = PageFormat::ALL.into_iter().map(Treatment::flat);
    let policies = NAMES.iter().map(|name| evicting(PageFormat::F16, name, 96));
    formats.chain(policies).chain([evicting(PageFormat::Int4, "keydiff", 128)]).collect()
}

fn scores(runner: &mut ModelRunner, ids: &[u32], treatments: &[Treatment]) -> Vec<Vec<TokenScore>> {
    let rules = rules(treatments);
    let scoring = Scoring { context: 200, lanes: lanes(&rules), compare: true };
    let mut scores = vec![Vec::new(); treatments.len()];
    score_together(runner, ids, &scoring, &mut |treatment, scored| scores[treatment].push(scored))
        .unwrap();
    scores
}

#[test]
fn treatments_in_one_batch_score_as_each_alone() {
    for architecture in ["llama", "gemma3"] {
        let tiny = Tiny::new(architecture).build();
        let mut runner = tiny.plain_runner();
        let ids = Random(5).tokens(430, 101);
        let treatments = all_treatments();
        let together = scores(&mut runner, &ids, &treatments);
        for (treatment, together) in treatments.iter().zip(&together) {
            let options = ScoreOptions {
                context: 200,
                block_size: BLOCK_SIZE,
                rules: treatment.rules().unwrap(),
                compare: true,
            };
            let mut alone = Vec::new();
            score(&mut runner, &ids, &options, &mut |scored| alone.push(scored)).unwrap();
            let bits = |scores: &[TokenScore]| -> Vec<_> {
                scores.iter().map(|s| (s.index, s.nll.to_bits(), s.kld.map(f64::to_bits))).collect()
            };
            let label = treatment.label();
            assert_eq!(bits(&alone), bits(together), "{architecture}, {label}");
            // Windows of 200, 200 and 30: the first token of each is not scored.
            assert_eq!(alone.len(), 427);
            assert!(!alone.iter().any(|scored| scored.index % 200 == 0));
            let divergence: Vec<f64> = alone.iter().map(|scored| scored.kld.unwrap()).collect();
            assert_eq!(mean(&divergence) > 0.0, *treatment != Treatment::default(), "{label}");
            let same = alone.iter().all(|s| Some(s.nll) == s.reference_nll);
            assert_eq!(same, *treatment == Treatment::default(), "{label}");
        }
    }
}

fn language() -> Language {
    Language {
        start: vec![1],
        words: (20..100).collect(),
        before_key: vec![2],
        between: vec![3],
        after_value: vec![4],
        filler: (5..20).collect(),
    }
}

#[test]
fn questions_leave_no_trace_and_come_after_compression() {
    let tiny = Tiny::new("llama").build();
    let mut runner = tiny.plain_runner();
    let difficulty = Difficulty { pairs: 5, key_words: 2, repeats: 1 };
    let task = Task { context_tokens: 300, difficulty, contexts: 0..2, seed: 9 };
    let treatments = [Treatment::default(), evicting(PageFormat::Int4, "sinks", 96)];
    let rules = rules(&treatments);
    let mut answers: [Vec<Answer>; 2] = Default::default();
    ask(&mut runner, &language(), &task, &lanes(&rules), &mut |treatment, answer| {
        answers[treatment].push(answer);
    })
    .unwrap();
    // The same by hand: a sequence of its own for every question, computed from the start.
    for (treatment, rules) in rules.iter().enumerate() {
        let mut by_hand = Vec::new();
        for index in 0..2 {
            let context = language().context(&task, index).unwrap();
            for question in &context.questions {
                let pool = roomy_pool(&runner, BLOCK_SIZE, 400);
                let config = endless(reef_kv::Fidelity::Evict, 4096);
                let mut session = Session::new(&pool, rules, config);
                for chunk in context.ids.chunks(BLOCK_SIZE) {
                    session.advance(&mut runner, chunk).unwrap();
                }
                let held = session.sequence().usage().tokens_by_format;
                let compressed = held[PageFormat::Int4] > 0.0 && held[PageFormat::F16] < 32.0;
                assert_eq!(compressed, treatment == 1, "{held:?}");
                session.advance(&mut runner, &question.ids).unwrap();
                let logits = runner.logits(&[question.ids.len() - 1]);
                let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let right = logits[question.value as usize] == best;
                by_hand.push(Answer { context: index, distance: question.distance, right });
            }
        }
        assert_eq!(answers[treatment], by_hand);
    }
    let too_long = Task { context_tokens: 20, ..task };
    let refused = ask(&mut runner, &language(), &too_long, &lanes(&rules), &mut |_, _| ());
    assert!(matches!(refused, Err(EngineError::Task(_))), "{refused:?}");
}

#[test]
fn ways_down_agree_where_they_must() {
    for architecture in ["llama", "gemma3"] {
        let tiny = Tiny::new(architecture).build();
        let mut runner = tiny.plain_runner();
        let ids = Random(7).tokens(384, 101);
        let rungs = [PageFormat::Int8, PageFormat::K8V4, PageFormat::Int4];
        let descent = Descent {
            context: 192,
            switch: 96,
            rungs: &rungs,
            block_size: BLOCK_SIZE,
            pinned_layers: &[],
        };
        let paths = descent.paths();
        let mut scores = vec![Vec::new(); paths.len()];
        let mut reference = Vec::new();
        let identity = descent
            .score(&mut runner, &ids, &mut |path, scored| {
                scores[path].push(scored.nll);
                if path == 0 {
                    reference.extend(scored.reference_nll);
                }
            })
            .unwrap();
        assert!(identity.pages > 0 && identity.different == 0, "{identity:?}");
        let of = |path| &scores[paths.iter().position(|other| *other == path).unwrap()];
        // Walking down all rungs at once is going down at once, to the bit.
        assert_eq!(of(Path::Walk), of(Path::Switch(PageFormat::Int4)));
        // Before the switch a late way is f16; from the start, it is the format at seal.
        for path in &paths {
            let same = of(*path)[..96] == reference[..96];
            assert_eq!(same, !matches!(path, Path::Start(_)), "{architecture}, {path:?}");
            assert!(of(*path)[96..191] != reference[96..191]);
        }
        let options = ScoreOptions {
            context: 192,
            block_size: BLOCK_SIZE,
            rules: Treatment::flat(PageFormat::Int4).rules().unwrap(),
            compare: false,
        };
        let mut flat = Vec::new();
        score(&mut runner, &ids, &options, &mut |scored| flat.push(scored.nll)).unwrap();
        assert_eq!(of(Path::Start(PageFormat::Int4)), &flat);
    }
}

fn plain(runner: &mut ModelRunner, ids: &[u32]) -> Vec<f64> {
    let (block_size, rules) = (BLOCK_SIZE, Rules::default());
    let options = ScoreOptions { context: ids.len(), block_size, rules, compare: false };
    let mut nll = Vec::new();
    score(runner, ids, &options, &mut |scored| nll.push(scored.nll)).unwrap();
    nll
}

#[test]
fn the_window_that_is_computed_anew_sees_what_it_should() {
    let tiny = Tiny::new("llama").build();
    let mut runner = tiny.plain_runner();
    let ids = Random(3).tokens(700, 101);
    let restart = Restart { window: 300, stride: 130, block_size: BLOCK_SIZE };
    let mut found = Vec::new();
    score_re_encoded(&mut runner, &ids, &restart, &mut |index, nll| found.push((index, nll)))
        .unwrap();
    // Every token from window - stride on, once.
    assert!(found.iter().map(|(index, _)| *index).eq(170..700));
    for (index, nll) in found {
        let start = (index - 170) / 130 * 130;
        let seen = index - start;
        assert!((170..300).contains(&seen), "{index} sees {seen}");
        if index % 37 == 0 {
            let expected = plain(&mut runner, &ids[start..=index]);
            assert_eq!(expected.last(), Some(&nll), "token {index}");
        }
    }
}

#[test]
fn h2o_with_room_for_all_is_plain_attention() {
    for architecture in ["llama", "gemma3"] {
        let tiny = Tiny::new(architecture).build();
        let mut runner = tiny.plain_runner();
        let ids = Random(11).tokens(150, 101);
        let expected = plain(&mut runner, &ids);
        let mut by = |budget| {
            runner.set_reference_attention(Some(Box::new(H2oReference::new(budget))));
            let nll = plain(&mut runner, &ids);
            runner.set_reference_attention(None);
            nll
        };
        let apart =
            |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // K and V in f32 here, in f16 there.
        let roomy = by(150);
        assert!(apart(&roomy, &expected) < 5e-3, "{}", apart(&roomy, &expected));
        let tight = by(40);
        assert_eq!(tight[..39], roomy[..39]);
        assert!(apart(&tight, &roomy) > 1e-3);
        assert_eq!(plain(&mut runner, &ids), expected);
    }
}

#[test]
fn a_stream_goes_past_the_trained_context_in_flat_memory() {
    let tiny = Tiny { context: 256, ..Tiny::new("llama") }.build();
    let mut runner = tiny.plain_runner();
    let ids = Random(2).tokens(1500, 101);
    for name in NAMES {
        let rules = rules(&[evicting(PageFormat::Int8, name, 128)]);
        let (mut states, mut scored) = (Vec::new(), 0);
        stream(&mut runner, &ids, &lanes(&rules), &mut |scores, state| {
            scored += scores.len();
            assert!(scores.iter().all(|score| score.nll.is_finite()));
            states.push(state);
        })
        .unwrap();
        assert_eq!(scored, 1499);
        assert!(states.iter().all(|state| state.kept_tokens <= 128), "{name}");
        let late: Vec<usize> = states[8..].iter().map(|state| state.used_bytes).collect();
        let (least, most) = (late.iter().min().unwrap(), late.iter().max().unwrap());
        // One block comes while another goes; the last of the text is a part of one.
        assert!(*most as f64 <= 1.35 * *least as f64, "{name}: {least} to {most}");
        assert!(states[7].tokens == 256 && !states[7].relative);
        assert!(states.last().unwrap().relative && states.last().unwrap().tokens == 1500);
    }
}
