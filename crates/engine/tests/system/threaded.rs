//! The model on its own thread: the same bits as on the caller's, nothing copied, nothing lost.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reef_engine::executor::calibrate::calibrate;
use reef_engine::executor::inline::{ASSUMED_COSTS, InlineExecutor, ModelWorker};
use reef_engine::executor::model::ThreadedExecutor;
use reef_engine::executor::{
    Completion, Executor, ExecutorDead, Polled, SlotKey, SlotWork, StepWork,
};
use reef_engine::{Engine, EngineHandle, Event, Request, Sampling};
use reef_kv::{BlockPool, Fidelity, Sequence};
use reef_model::runner::Activations;

use crate::support::drive::{endless, engine_config, roomy_pool};
use crate::support::random::Random;
use crate::support::tiny::{Tiny, TinyModel, options};

fn tiny() -> TinyModel {
    Tiny { layers: 2, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new("llama") }.build()
}

/// A worker on a pool of its own, and the pool.
fn worker(model: &TinyModel) -> (ModelWorker, BlockPool) {
    let runner = model.runner(options(Activations::Int8));
    let pool = roomy_pool(&runner, 32, 512);
    (ModelWorker::new(runner, pool.clone()), pool)
}

fn threaded(model: &TinyModel) -> (ThreadedExecutor, BlockPool) {
    let (worker, pool) = worker(model);
    (ThreadedExecutor::spawn(worker, ASSUMED_COSTS).unwrap(), pool)
}

/// The next `tokens` of `sequence` as step `step`, logits of all.
fn work(step: u64, sequence: &mut Sequence, tokens: &[u32]) -> StepWork {
    sequence.grow(tokens.len()).unwrap();
    let key = SlotKey { slot: 0, request: 7, generation: step as u32 };
    let slot = SlotWork {
        key,
        tokens: tokens.to_vec(),
        first_position: sequence.next_position() as u32,
        view: sequence.shared_view(),
        observe: false,
        logits_from: 0,
    };
    StepWork { step, slots: vec![slot] }
}

/// Polls until the executor has nothing more to do.
fn wait(executor: &mut dyn Executor) -> Result<Polled, ExecutorDead> {
    let start = Instant::now();
    let mut all = Polled::default();
    while !all.idle {
        assert!(start.elapsed() < Duration::from_secs(60), "no completion");
        let polled = executor.poll()?;
        all.completions.extend(polled.completions);
        all.elapsed_us = all.elapsed_us.or(polled.elapsed_us);
        all.idle = polled.idle;
        std::thread::yield_now();
    }
    Ok(all)
}

fn only(polled: Polled) -> Completion {
    assert_eq!(polled.completions.len(), 1);
    polled.completions.into_iter().next().unwrap()
}

/// Computes the step and accepts its tokens.
fn step(
    executor: &mut dyn Executor,
    step: u64,
    sequence: &mut Sequence,
    tokens: &[u32],
) -> Completion {
    executor.submit(work(step, sequence, tokens)).unwrap();
    let completion = only(wait(executor).unwrap());
    assert_eq!((completion.step, completion.key.generation), (step, step as u32));
    sequence.commit(tokens.len());
    completion
}

#[test]
fn logits_are_the_same_bits_and_their_buffers_go_around() {
    let model = tiny();
    let (mut threaded, pool) = threaded(&model);
    let (own, own_pool) = worker(&model);
    let mut inline = InlineExecutor::new(own);
    let mut ours = Sequence::new(&pool, endless(Fidelity::Exact, 4096));
    let mut theirs = Sequence::new(&own_pool, endless(Fidelity::Exact, 4096));
    let mut random = Random(5);
    let mut buffers = BTreeSet::new();
    for number in 0..40 {
        // The first steps are the largest: buffers have then grown.
        let count = if number < 6 { 3 } else { 1 + random.below(3) };
        let tokens = random.tokens(count, threaded.facts().vocabulary);
        let got = step(&mut threaded, number, &mut ours, &tokens);
        let expected = step(&mut inline, number, &mut theirs, &tokens);
        for row in 0..count {
            let bits = |of: &Completion| -> Vec<u32> {
                of.logits.row(row).iter().map(|x| x.to_bits()).collect()
            };
            assert_eq!(bits(&got), bits(&expected), "step {number}");
        }
        if number >= 6 {
            buffers.insert(got.logits.row(0).as_ptr() as usize);
        }
        threaded.recycle(got.logits);
        inline.recycle(expected.logits);
    }
    assert!(buffers.len() <= 3, "{} buffers: logits were copied or made anew", buffers.len());
}

/// What a caller still reads is not written again.
#[test]
fn logits_that_are_kept_stay_as_they_are() {
    let (mut executor, pool) = threaded(&tiny());
    let mut sequence = Sequence::new(&pool, endless(Fidelity::Exact, 4096));
    let kept: Vec<_> = (0..5u32)
        .map(|number| {
            let logits = step(&mut executor, u64::from(number), &mut sequence, &[number]).logits;
            let seen = logits.row(0).to_vec();
            // Given back while a clone is held: not to be used.
            executor.recycle(logits.clone());
            (logits, seen)
        })
        .collect();
    for (logits, seen) in kept {
        assert_eq!(logits.row(0), seen);
    }
}

#[test]
fn the_waker_is_called_once_a_step_and_time_is_told() {
    let (mut executor, pool) = threaded(&tiny());
    let calls = Arc::new(AtomicUsize::new(0));
    let of_waker = calls.clone();
    executor.set_waker(Arc::new(move || {
        of_waker.fetch_add(1, Ordering::SeqCst);
    }));
    let mut sequence = Sequence::new(&pool, endless(Fidelity::Exact, 4096));
    assert!(executor.poll().unwrap().idle, "nothing was submitted");
    for number in 0..10 {
        executor.submit(work(number, &mut sequence, &[1])).unwrap();
        let polled = wait(&mut executor).unwrap();
        assert_eq!(polled.elapsed_us.map(|(step, _)| step), Some(number));
        sequence.commit(1);
        let start = Instant::now();
        // The call comes after the completion can be seen.
        while calls.load(Ordering::SeqCst) < number as usize + 1 {
            assert!(start.elapsed() < Duration::from_secs(60), "not called");
            std::thread::yield_now();
        }
    }
    assert_eq!(calls.load(Ordering::SeqCst), 10);
}

/// Nobody holds a view once its completion is out: the engine changes it without a copy.
#[test]
fn views_are_let_go_of() {
    let (mut executor, pool) = threaded(&tiny());
    let mut sequence = Sequence::new(&pool, endless(Fidelity::Exact, 4096));
    for number in 0..20 {
        let logits = step(&mut executor, number, &mut sequence, &[2, 3]).logits;
        assert_eq!(Arc::strong_count(&sequence.shared_view()), 2, "the table's and this one");
        executor.recycle(logits);
    }
}

#[test]
fn a_panic_in_a_step_is_told() {
    let (mut executor, pool) = threaded(&tiny());
    let mut sequence = Sequence::new(&pool, endless(Fidelity::Exact, 4096));
    let mut broken = work(0, &mut sequence, &[1]);
    // No page holds this position.
    broken.slots[0].first_position = 4000;
    executor.submit(broken).unwrap();
    let dead = wait(&mut executor).unwrap_err();
    let text = dead.to_string();
    assert!(
        text.contains("a step panicked") && text.contains("positions without a page"),
        "{dead}"
    );
    let again = work(1, &mut sequence, &[1]);
    assert_eq!(executor.submit(again).unwrap_err(), dead);
    assert_eq!(executor.poll().unwrap_err(), dead);
}

#[test]
fn a_token_outside_the_vocabulary_is_told() {
    let (mut executor, pool) = threaded(&tiny());
    let mut sequence = Sequence::new(&pool, endless(Fidelity::Exact, 4096));
    executor.submit(work(0, &mut sequence, &[5000])).unwrap();
    let dead = wait(&mut executor).unwrap_err();
    assert!(dead.to_string().contains("token id 5000 is outside the vocabulary"), "{dead}");
}

#[test]
fn dropping_it_waits_for_the_step_in_flight() {
    for _ in 0..20 {
        let (mut executor, pool) = threaded(&tiny());
        let mut sequence = Sequence::new(&pool, endless(Fidelity::Exact, 4096));
        let view = {
            let work = work(0, &mut sequence, &[1, 2, 3]);
            let view = work.slots[0].view.clone();
            executor.submit(work).unwrap();
            view
        };
        drop(executor);
        drop(view);
        assert_eq!(
            Arc::strong_count(&sequence.shared_view()),
            2,
            "nobody reads the pages any more"
        );
    }
}

/// The engine on either executor, behind its handle, with relief and policies that observe.
#[test]
fn an_engine_generates_the_same_on_either() {
    let model = tiny();
    let generate = |on_thread: bool| {
        let (worker, pool) = worker(&model);
        let executor: Box<dyn Executor> = match on_thread {
            true => Box::new(ThreadedExecutor::spawn(worker, ASSUMED_COSTS).unwrap()),
            false => Box::new(InlineExecutor::new(worker)),
        };
        let budget_bytes = pool.config().budget_bytes;
        let engine = Engine::with_executor(executor, pool, engine_config(budget_bytes)).unwrap();
        let handle = EngineHandle::spawn(engine).unwrap();
        let mut random = Random(9);
        let streams: Vec<_> = (0..8)
            .map(|index| {
                let request = Request {
                    max_tokens: Some(40),
                    sampling: Sampling { temperature: 0.8, seed: index, ..Sampling::default() },
                    ..Request::new(random.tokens(30, 101), Fidelity::Exact)
                };
                let (sender, events) = std::sync::mpsc::channel();
                handle.submit(request, Box::new(move |event| sender.send(event).is_ok())).unwrap();
                events
            })
            .collect();
        let ends = streams.into_iter().map(|events| {
            events.into_iter().find_map(|event| match event {
                Event::Finished(outcome) => Some(outcome.continuations[0].token_ids.clone()),
                Event::Failed(error) => panic!("{error}"),
                _ => None,
            })
        });
        ends.collect::<Option<Vec<_>>>().unwrap()
    };
    assert_eq!(generate(true), generate(false));
}

#[test]
fn calibration_measures_every_kind_of_step() {
    let mut runner = tiny().runner(options(Activations::Int8));
    let measured = calibrate(&mut runner, 32, Duration::from_secs(60)).unwrap();
    let counts = |points: &[(usize, f64)]| points.iter().map(|(n, _)| *n).collect::<Vec<_>>();
    assert_eq!(counts(&measured.decode_us), [1, 4, 8, 16]);
    assert_eq!(counts(&measured.prefill_us), [16, 64, 256]);
    assert!(measured.costs.base_us > 0.0 && measured.costs.prefill_token_us > 0.0, "{measured:?}");
    // No time at all: still something to go by.
    let hurried = calibrate(&mut runner, 32, Duration::ZERO).unwrap();
    assert_eq!((counts(&hurried.decode_us), counts(&hurried.prefill_us)), (vec![1], vec![16]));
}
