//! Drafts change the number of steps and nothing else: tokens, log-probabilities and what is left of the
//! pool are those of generating without.

use std::ops::ControlFlow;

use reef_engine::speculate::{
    DraftModel, DraftModelError, DraftModelOptions, Drafter, Ngram, RunKey,
};
use reef_engine::{Engine, Outcome, Request, Sampling};
use reef_kernels::dispatch::Tier;
use reef_kv::Fidelity;
use reef_model::runner::Activations;
use reef_model::tokenizer::{SpecialIds, Vocabulary};

use super::support::drive::{engine, engine_config};
use super::support::random::Random;
use super::support::tiny::{Tiny, TinyModel, options, token_text};

fn tiny(architecture: &'static str) -> Tiny {
    Tiny { heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new(architecture) }
}

/// The vocabulary of every tiny model, but for `change`.
fn vocabulary(tokens: usize, change: impl Fn(usize, String) -> String) -> Vocabulary {
    let texts: Vec<String> = (0..tokens).map(|id| change(id, token_text(id))).collect();
    Vocabulary::new(texts.iter().map(String::as_str), &[], SpecialIds::default()).unwrap()
}

fn draft_options(budget_bytes: usize) -> DraftModelOptions {
    DraftModelOptions {
        threads: 1,
        tier: Tier::detect(),
        block_size: 32,
        budget_bytes,
        // Random weights are never sure of anything.
        least_probability: 0.0,
    }
}

fn draft_model(model: &TinyModel, budget_bytes: usize) -> DraftModel {
    let target = vocabulary(model.tiny.vocabulary, |_, text| text);
    DraftModel::load(&model.gguf(), &target, draft_options(budget_bytes)).unwrap()
}

/// Prompts that repeat themselves, greedy and not, with and without penalties.
fn requests(random: &mut Random, vocabulary: usize) -> Vec<Request> {
    let request = |index: usize| {
        let phrase = random.tokens(12, vocabulary);
        let mut prompt = phrase.repeat(1 + index % 4);
        prompt.extend(random.tokens(1 + index * 7 % 40, vocabulary));
        prompt.extend(&phrase);
        let sampling = Sampling {
            temperature: [0.0, 0.3, 1.0][index % 3],
            presence_penalty: [0.0, 0.5][index % 2],
            min_tokens: 5,
            seed: random.next(),
            ..Sampling::default()
        };
        Request {
            max_tokens: Some(1 + random.below(90)),
            sampling,
            end_ids: vec![random.below(vocabulary) as u32],
            logprobs: Some(2),
            ..Request::new(prompt, Fidelity::Exact)
        }
    };
    (0..24).map(request).collect()
}

fn run(engine: &mut Engine, request: &Request) -> Outcome {
    let outcome = engine.run_to_end(request, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(engine.check(), []);
    let accounts = engine.pool().accounts();
    assert_eq!(accounts.used_bytes(), accounts.cached_bytes);
    outcome
}

/// Runs everything with and without `drafter`; returns (drafts, accepted).
fn compare(model: &TinyModel, drafter: Box<dyn Drafter>, seed: u64) -> (usize, usize) {
    let requests = requests(&mut Random(seed), model.tiny.vocabulary);
    let mut plain = engine(model.runner(options(Activations::Int8)), 4 << 20);
    let mut drafting = engine(model.runner(options(Activations::Int8)), 4 << 20);
    drafting.set_drafter(drafter, 0.0);
    let (mut proposed, mut accepted) = (0, 0);
    for request in &requests {
        let (expected, found) = (run(&mut plain, request), run(&mut drafting, request));
        let (expected, of) = (&expected.continuations[0], &found.continuations[0]);
        assert_eq!(of.token_ids, expected.token_ids, "{request:?}");
        assert_eq!(of.finish_reason, expected.finish_reason);
        assert_eq!(of.logprobs, expected.logprobs);
        proposed += found.usage.drafts.0;
        accepted += found.usage.drafts.1;
    }
    let counted = drafting.stats().speculation.unwrap();
    assert_eq!((counted.proposed, counted.accepted), (proposed, accepted));
    // A step gives what was accepted and at most one token more, and computes a row for each draft and one.
    let steps = counted.computed - counted.proposed;
    assert!(counted.emitted <= accepted + steps && counted.emitted <= counted.computed);
    (proposed, accepted)
}

#[test]
fn output_with_n_grams_is_that_without() {
    for architecture in ["llama", "gemma3"] {
        let model = tiny(architecture).build();
        let (proposed, accepted) = compare(&model, Box::new(Ngram::new(1, 3)), 1);
        assert!(accepted > 20 && accepted < proposed, "{architecture}: {accepted} of {proposed}");
    }
}

#[test]
fn output_with_a_draft_model_is_that_without() {
    for architecture in ["llama", "gemma3"] {
        let model = tiny(architecture).build();
        // The model itself drafts well, a model of other weights badly; neither changes the output.
        for (seed, least_accepted) in [(1, 200), (9, 0)] {
            let draft = Tiny { seed, ..tiny(architecture) }.build();
            let drafter = Box::new(draft_model(&draft, 4 << 20));
            let (proposed, accepted) = compare(&model, drafter, 2);
            assert!(accepted >= least_accepted, "{architecture}: {accepted} of {proposed}");
            assert!(accepted < proposed);
        }
    }
}

/// A draft pool that is short must not cost anybody anything but drafts.
#[test]
fn a_draft_pool_that_is_short_drafts_nothing_and_ends_nobody() {
    let model = tiny("llama").build();
    let room = engine_config(4 << 20).budget_bytes;
    let mut least = None;
    for budget_bytes in (1..40).map(|step| step * (16 << 10)).filter(|bytes| *bytes < room) {
        let target = vocabulary(model.tiny.vocabulary, |_, text| text);
        match DraftModel::load(&model.gguf(), &target, draft_options(budget_bytes)) {
            Ok(_) => {
                least = Some(budget_bytes);
                break;
            }
            Err(DraftModelError::Pool(_)) => {}
            Err(other) => panic!("{other}"),
        }
    }
    let drafter = draft_model(&model, least.unwrap());
    let pool = drafter.pool().clone();
    let (proposed, _) = compare(&model, Box::new(drafter), 2);
    let (roomy, _) = compare(&model, Box::new(draft_model(&model, 4 << 20)), 2);
    assert!(proposed < roomy, "{proposed} drafts in the smallest pool, {roomy} in a large one");
    assert_eq!(pool.accounts().used_bytes(), 0, "forgotten runs hold nothing");
}

/// Runs that together are more than the pool take turns; each is drafted for again once others are gone.
#[test]
fn a_draft_pool_that_is_full_serves_others_once_there_is_room() {
    let model = tiny("llama").build();
    let mut drafter = draft_model(&model, 160 << 10);
    let capacity = drafter.pool().capacity_tokens(reef_kv::page::PageFormat::F16).unwrap();
    let tokens = Random(3).tokens(capacity * 3 / 5, model.tiny.vocabulary);
    let (first, second) = (RunKey(1), RunKey(2));
    let mut out = Vec::new();
    // A prompt longer than a chunk is caught up with over several calls.
    let mut drafted = |drafter: &mut DraftModel, run| {
        for _ in 0..=tokens.len() / 128 {
            drafter.draft(run, &tokens, 3, &mut out);
        }
        let view_bytes = drafter.pool().accounts().used_bytes();
        (out.clone(), view_bytes)
    };
    let (_, alone_bytes) = drafted(&mut drafter, first);
    assert!(alone_bytes > 0);
    let (nothing, both_bytes) = drafted(&mut drafter, second);
    assert_eq!((nothing, both_bytes), (vec![], alone_bytes), "it gave back what it had begun");
    drafter.forget(first);
    assert_eq!(drafter.pool().accounts().used_bytes(), 0);
    let (_, again_bytes) = drafted(&mut drafter, second);
    assert_eq!(again_bytes, alone_bytes);
}

/// What is drafted depends on the tokens alone: not on what was accepted before, nor on the calls.
#[test]
fn drafts_after_accepted_and_rejected_ones_are_those_of_a_fresh_drafter() {
    let model = tiny("gemma3").build();
    let mut random = Random(8);
    let mut tokens = random.tokens(70, model.tiny.vocabulary);
    let mut old = draft_model(&model, 4 << 20);
    let (mut found, mut expected, mut some) = (Vec::new(), Vec::new(), 0);
    for round in 0..60 {
        old.draft(RunKey(0), &tokens, 4, &mut found);
        let mut fresh = draft_model(&model, 4 << 20);
        for _ in 0..=tokens.len() / 128 {
            fresh.draft(RunKey(0), &tokens, 4, &mut expected);
        }
        assert_eq!(found, expected, "round {round}");
        some += found.len();
        // Some are accepted, then another token comes; now and then the text is suddenly another.
        let accepted = random.below(found.len() + 1);
        tokens.extend(&found[..accepted]);
        tokens.extend(random.tokens(1, model.tiny.vocabulary));
        if round % 20 == 19 {
            tokens.truncate(50);
        }
    }
    assert!(some > 30, "{some}");
}

#[test]
fn another_tokenizer_is_refused_by_the_first_token_that_differs() {
    let model = tiny("llama").build();
    let count = model.tiny.vocabulary;
    let error = |target: &Vocabulary| {
        let loaded = DraftModel::load(&model.gguf(), target, draft_options(1 << 20));
        loaded.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let line = error(&vocabulary(count + 1, |_, text| text));
    assert!(line.contains(&format!("{count} tokens, the model of {}", count + 1)), "{line}");
    let changed = |id, text: String| if id == 17 { text + "!" } else { text };
    let line = error(&vocabulary(count, changed));
    assert!(line.contains("token 17 is \"token 17\", in the model it is \"token 17!\""), "{line}");
    assert!(line.contains("give a GGUF of the same family"), "{line}");
}
