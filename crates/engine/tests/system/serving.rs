//! Many requests in one pool: none is lost, none is changed by the others.

use reef_engine::beam::{BeamRules, BeamSearch};
use reef_engine::event::PauseKind;
use reef_engine::request::Branches;
use reef_engine::store::{Fault, SimulatedSpill, SpillSize, SpillTiming};
use reef_engine::{
    AdmissionPolicy, Engine, EngineConfig, Event, FinishReason, Outcome, PrefixSettings, Progress,
    Request, Rules, Sampling, Scheduling,
};
use reef_kv::Fidelity;
use reef_kv::prefix::IndexKind;

use crate::support::drive::{engine_config, logits_in_chunks};
use crate::support::random::Random;
use crate::support::tiny::{Tiny, TinyModel, options};
use reef_model::runner::Activations;

/// Runs `requests` side by side, submitting one every other turn; outcomes in order.
fn serve(engine: &mut Engine, requests: &[Request]) -> Vec<Outcome> {
    serve_at(engine, requests, &mut |_| {})
}

/// The same; `clock` is told the time of each turn.
fn serve_at(engine: &mut Engine, requests: &[Request], clock: &mut dyn FnMut(u64)) -> Vec<Outcome> {
    let mut outcomes: Vec<Option<Outcome>> = requests.iter().map(|_| None).collect();
    let (mut submitted, mut turns) = (0, 0);
    while outcomes.iter().any(Option::is_none) {
        if turns % 2 == 0 && submitted < requests.len() {
            engine.submit(submitted as u64, requests[submitted].clone()).unwrap();
            submitted += 1;
        }
        clock(turns * 1000);
        let progress = engine.turn(turns * 1000).unwrap();
        assert_eq!(engine.check(), [], "turn {turns}");
        for told in engine.take_events() {
            match told.event {
                Event::Finished(outcome) => outcomes[told.request as usize] = Some(*outcome),
                Event::Failed(error) => panic!("request {}: {error}", told.request),
                _ => {}
            }
        }
        assert!(
            progress != Progress::Idle || submitted < requests.len() || engine.stats().running == 0
        );
        turns += 1;
        assert!(turns < 100_000, "{:?}", engine.stats());
    }
    outcomes.into_iter().flatten().collect()
}

fn engine_of(
    model: &TinyModel,
    budget_bytes: usize,
    change: impl FnOnce(&mut EngineConfig),
) -> Engine {
    let mut config = engine_config(budget_bytes);
    change(&mut config);
    Engine::inline(model.runner(options(Activations::Int8)), config).unwrap()
}

fn requests(random: &mut Random, count: usize, vocabulary: usize) -> Vec<Request> {
    let shared = random.tokens(90, vocabulary);
    let request = |_| {
        let mut prompt = shared[..random.below(91)].to_vec();
        let own = 1 + random.below(60);
        prompt.extend(random.tokens(own, vocabulary));
        let temperature = [0.0, 0.9][random.below(2)];
        Request {
            max_tokens: Some(1 + random.below(80)),
            sampling: Sampling { temperature, seed: random.next(), ..Sampling::default() },
            priority: random.below(3) as i32 - 1,
            logprobs: Some(2),
            ..Request::new(prompt, Fidelity::Exact)
        }
    };
    (0..count).map(request).collect()
}

/// Every exact request gives what it gives alone, whatever is short.
#[test]
fn exact_requests_are_as_if_alone() {
    let tiny =
        Tiny { layers: 2, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new("llama") };
    let gemma =
        Tiny { layers: 3, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new("gemma3") };
    let mut preempted = 0;
    for (seed, tiny) in (0..12).flat_map(|seed| [(seed, tiny), (seed, gemma)]) {
        let model = tiny.build();
        let mut random = Random(seed);
        let requests = requests(&mut random, 14, tiny.vocabulary);
        let mut alone = engine_of(&model, 8 << 20, |_| {});
        let expected: Vec<_> = requests
            .iter()
            .map(|request| {
                alone.run_to_end(request, &mut |_| std::ops::ControlFlow::Continue(())).unwrap()
            })
            .collect();
        let budget = (90 << 10) + random.below(120 << 10);
        let policy = [AdmissionPolicy::Reserve, AdmissionPolicy::Utilize][random.below(2)];
        let kind = [IndexKind::Chain, IndexKind::Radix][random.below(2)];
        let mut engine = engine_of(&model, budget, |config| {
            config.scheduling = Scheduling { admission: policy, ..Scheduling::default() };
            config.prefix = Some(PrefixSettings { kind, ..PrefixSettings::default() });
        });
        let outcomes = serve(&mut engine, &requests);
        for (index, (outcome, expected)) in outcomes.iter().zip(&expected).enumerate() {
            let (got, want) = (&outcome.continuations[0], &expected.continuations[0]);
            assert_eq!(got.token_ids, want.token_ids, "seed {seed} request {index}");
            assert_eq!(got.finish_reason, FinishReason::Length);
            assert_eq!(got.logprobs, want.logprobs, "seed {seed} request {index}");
            preempted += outcome.usage.pauses.len();
        }
        let accounts = engine.pool().accounts();
        assert_eq!(accounts.used_bytes(), accounts.cached_bytes, "only idle prefixes are left");
        println!("{seed} {:?}", engine.stats().counters);
    }
    assert!(preempted > 20, "{preempted}");
}

/// The same with a spill store that swaps whoever stands still, and sometimes fails.
#[test]
fn swapped_requests_are_as_if_alone_whatever_the_disk_does() {
    let tiny =
        Tiny { layers: 3, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new("gemma3") };
    let model = tiny.build();
    let (mut swapped, mut failed) = (0, 0);
    for seed in 0..16 {
        let mut random = Random(seed);
        let mut requests = requests(&mut random, 14, tiny.vocabulary);
        for request in &mut requests {
            request.max_tokens = Some(60 + random.below(140));
            request.priority = random.below(4) as i32 / 3;
        }
        let mut alone = engine_of(&model, 8 << 20, |_| {});
        let mut go_on = |_| std::ops::ControlFlow::Continue(());
        let expected: Vec<_> = requests
            .iter()
            .map(|request| alone.generate(request, &mut go_on).unwrap().token_ids)
            .collect();
        let budget = (90 << 10) + random.below(120 << 10);
        let mut engine = engine_of(&model, budget, |config| {
            config.scheduling = Scheduling {
                admission: AdmissionPolicy::Utilize,
                spill_bytes_per_second: 1e12,
                ..Scheduling::default()
            };
            config.prefix = (seed % 2 == 0).then(PrefixSettings::default);
        });
        let size = SpillSize { file_bytes: 1 << 20, slot_bytes: 4096 };
        let timing = SpillTiming { latency_us: 500, slot_us: 300 };
        let faulty = seed % 4 > 1;
        let mut faults = Random(seed + 100);
        let script = move |_| (faulty && faults.below(12) == 0).then_some(Fault::Broken);
        let (spill, clock) = SimulatedSpill::new(size, timing, Box::new(script)).unwrap();
        engine.set_spill(Box::new(spill));
        let outcomes = serve_at(&mut engine, &requests, &mut |now_us| clock.advance_to(now_us));
        for (index, (outcome, expected)) in outcomes.iter().zip(&expected).enumerate() {
            assert_eq!(&outcome.continuations[0].token_ids, expected, "seed {seed} {index}");
        }
        let stats = engine.stats();
        assert_eq!(stats.accounts.used_bytes(), stats.accounts.cached_bytes);
        assert_eq!(stats.spill.unwrap().used_bytes, 0);
        swapped += stats.counters.pauses(PauseKind::Swap);
        failed += stats.counters.spill_failures;
    }
    assert!(swapped > 12 && failed > 5, "{swapped} {failed}");
}

/// Branches share the prompt, and each is what its seed gives alone.
#[test]
fn branches_are_as_if_each_were_alone() {
    let tiny =
        Tiny { layers: 2, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new("llama") };
    let model = tiny.build();
    let prompt = Random(5).tokens(70, tiny.vocabulary);
    let sampling = |seed| Sampling { temperature: 0.8, seed, ..Sampling::default() };
    let request = |seed| Request {
        max_tokens: Some(50),
        sampling: sampling(seed),
        ..Request::new(prompt.clone(), Fidelity::Exact)
    };
    let mut engine = engine_of(&model, 1 << 20, |_| {});
    let alone: Vec<_> = (0..4)
        .map(|branch| {
            engine
                .generate(&request(9 + branch), &mut |_| std::ops::ControlFlow::Continue(()))
                .unwrap()
                .token_ids
        })
        .collect();
    let branches = Branches::Sample { n: 4, best_of: 4 };
    let outcome = serve(&mut engine, &[Request { branches, ..request(9) }]).remove(0);
    let got: Vec<_> = outcome.continuations.into_iter().map(|of| of.token_ids).collect();
    assert_eq!(got, alone);
    assert_eq!(engine.pool().accounts().used_bytes(), 0);
}

/// Beams over shared blocks find what a search that computes every beam anew finds, alone and in a pool so
/// small that others give way.
#[test]
fn beams_are_those_of_an_unpaged_search() {
    let tiny =
        Tiny { layers: 2, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new("llama") };
    let model = tiny.build();
    let mut runner = model.runner(options(Activations::Int8));
    let mut random = Random(11);
    for (width, length_penalty, early_stopping) in
        [(1, 1.0, false), (3, 1.0, true), (4, 0.5, false)]
    {
        let length = 20 + random.below(40);
        let prompt = random.tokens(length, tiny.vocabulary);
        let end_ids: Vec<u32> = random.tokens(6, tiny.vocabulary);
        let max_tokens = 40;
        let rules = BeamRules {
            width,
            length_penalty,
            early_stopping,
            max_tokens,
            end_ids: end_ids.clone(),
        };
        let mut search = BeamSearch::new(rules);
        let mut live = vec![prompt.clone()];
        while !live.is_empty() {
            let rows: Vec<Vec<f32>> = live
                .iter()
                .map(|tokens| {
                    let all = logits_in_chunks(&mut runner, 32, &Rules::default(), tokens, 64);
                    all[all.len() - tiny.vocabulary..].to_vec()
                })
                .collect();
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            let descents = search.step(&rows).unwrap();
            let next = descents.iter().map(|of| [&live[of.parent][..], &[of.token]].concat());
            live = next.collect();
        }
        let expected: Vec<Vec<u32>> = search.best(width).into_iter().map(|of| of.tokens).collect();
        let branches = Branches::Beams { width, n: width, length_penalty, early_stopping };
        let beams = Request {
            max_tokens: Some(max_tokens),
            end_ids,
            branches,
            ..Request::new(prompt, Fidelity::Exact)
        };
        let mut all = requests(&mut random, 6, tiny.vocabulary);
        all.insert(2, beams);
        for budget in [8 << 20, 130 << 10] {
            let mut engine = engine_of(&model, budget, |config| {
                config.scheduling.admission = AdmissionPolicy::Utilize;
            });
            let outcome = serve(&mut engine, &all).remove(2);
            let got: Vec<_> = outcome.continuations.into_iter().map(|of| of.token_ids).collect();
            assert_eq!(got, expected, "{width} beams in {budget}");
            assert_eq!(engine.pool().accounts().used_bytes(), 0);
        }
    }
}
