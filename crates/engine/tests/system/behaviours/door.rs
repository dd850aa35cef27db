//! The door to the engine's thread: it is never waited at, and whoever asked is answered.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use reef_engine::session::EngineError;
use reef_engine::{EngineHandle, Event, FinishReason, Refusal};

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

fn handle() -> EngineHandle {
    let model = plain();
    let mut config = engine_config(budget_of(&model, 20));
    config.scheduling.max_waiting = 10_000;
    EngineHandle::spawn(Engine::new(model.plain_runner(), config).unwrap()).unwrap()
}

/// Keeps the engine's thread busy until the sender is used or gone.
fn hold(handle: &EngineHandle) -> Sender<()> {
    let ((release, released), (begun, began)) = (channel(), channel());
    handle.look(Box::new(move |engine| {
        begun.send(engine.is_some()).unwrap();
        let _ = released.recv_timeout(PATIENCE);
    }));
    assert_eq!(began.recv_timeout(PATIENCE), Ok(true));
    release
}

/// Fills the door with requests for `max_tokens` each; returns the keys, and what tells of their ends.
fn fill(handle: &EngineHandle, max_tokens: usize) -> (Vec<u64>, Receiver<(usize, FinishReason)>) {
    let (sender, ends) = channel();
    let mut keys = Vec::new();
    loop {
        let (sender, index) = (sender.clone(), keys.len());
        let listener = Box::new(move |event| {
            if let Event::Finished(outcome) = event {
                let reason = outcome.continuations[0].finish_reason;
                sender.send((index, reason)).unwrap();
            }
            true
        });
        match handle.submit(exact(vec![1, 2, 3], max_tokens), listener) {
            Ok(key) => keys.push(key),
            Err(EngineError::Refused(Refusal::QueueFull { .. })) => return (keys, ends),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Row 109 again: ends said before a full door are not waited with, and none is lost, also those of requests
/// that the engine has not seen yet.
#[test]
fn an_end_never_waits_and_is_never_lost() {
    let handle = handle();
    let release = hold(&handle);
    let (keys, ends) = fill(&handle, 2);
    let start = Instant::now();
    for (index, key) in keys.iter().enumerate() {
        if index % 2 == 1 {
            handle.end(*key, FinishReason::Cancelled);
        }
    }
    handle.end(u64::MAX, FinishReason::Cancelled);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    drop(release);
    let mut cancelled = 0;
    for _ in &keys {
        let (index, reason) = ends.recv_timeout(PATIENCE).expect("each ends");
        match (index % 2, reason) {
            (1, FinishReason::Cancelled) => cancelled += 1,
            // Those in front may have been served before the engine came to the end.
            (1, FinishReason::Length) => assert!(index < keys.len() / 2, "{index}"),
            (remainder, reason) => assert_eq!((remainder, reason), (0, FinishReason::Length)),
        }
    }
    assert!(cancelled > keys.len() / 4, "{cancelled}");
    assert_eq!(handle.stats().unwrap().waiting, 0);
}

/// A look at the engine is answered whatever happens: with the engine, or without at once where the door is
/// full, where it stops before, where it has died. What breaks in a look stays there.
#[test]
fn whoever_looks_is_answered_once() {
    let handle = handle();
    let seen = Arc::new(Mutex::new(Vec::<(&str, bool, ThreadId)>::new()));
    let look = |handle: &EngineHandle, name| {
        let (seen, (done, answered)) = (seen.clone(), channel());
        handle.look(Box::new(move |engine| {
            seen.lock().unwrap().push((name, engine.is_some(), std::thread::current().id()));
            let _ = done.send(());
        }));
        answered
    };
    handle.look(Box::new(|engine| assert!(engine.is_none(), "a mistake of who looks")));
    look(&handle, "idle").recv_timeout(PATIENCE).unwrap();
    assert!(handle.is_alive() && handle.stats().is_some());
    let release = hold(&handle);
    let queued = look(&handle, "queued");
    fill(&handle, 1);
    look(&handle, "full").try_recv().expect("at once");
    drop(release);
    queued.recv_timeout(PATIENCE).unwrap();
    let here = std::thread::current().id();
    let seen: Vec<_> =
        seen.lock().unwrap().iter().map(|(name, some, id)| (*name, *some, *id == here)).collect();
    assert_eq!(seen, [("idle", true, false), ("full", false, true), ("queued", true, false)]);
}

/// Looks that were asked for and not come to as the engine stops or dies are answered with nothing.
#[test]
fn looks_at_an_engine_that_goes_are_answered() {
    let model = plain();
    for dies in [false, true] {
        let script = move |step| if dies && step == 1 { Deed::Die } else { Deed::Deliver };
        let config = engine_config(budget_of(&model, 12));
        let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
        let handle = Arc::new(EngineHandle::spawn(engine).unwrap());
        let answers = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        if dies {
            handle.submit(exact(vec![1, 2, 3], 5), Box::new(|_| true)).unwrap();
        }
        let mut asked = 0;
        while asked < 200 || (dies && handle.is_alive()) {
            let answers = answers.clone();
            handle.look(Box::new(move |engine| {
                answers[usize::from(engine.is_some())].fetch_add(1, Ordering::SeqCst);
            }));
            asked += 1;
        }
        drop(handle);
        let [without, with] = [0, 1].map(|index| answers[index].load(Ordering::SeqCst));
        assert_eq!(without + with, asked, "{without} without, {with} with");
    }
}
