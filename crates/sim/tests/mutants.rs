//! Deliberate mistakes: each is caught within a few worlds, so the checks can fail, and do.
#![cfg(feature = "mutants")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use reef_sim::run::{keep_panics, panic_text, run};
use reef_sim::world::{Recipe, World};
use reef_sim::{bare, random::Random};

/// Worlds with an engine within which a mistake has to show.
const WORLDS: u64 = 150;
/// Worlds without one.
const BARE_WORLDS: u64 = 60;

/// The first world of an engine that fails, and what it says.
fn caught() -> Option<(u64, String)> {
    (0..WORLDS).find_map(|seed| {
        let report = run(&World::new(&Recipe::of_seed(seed)), false);
        report.failures.first().map(|failure| (seed, failure.to_string()))
    })
}

/// The first world without an engine that fails, and what it says.
fn caught_bare() -> Option<(u64, String)> {
    (0..BARE_WORLDS).find_map(|seed| {
        match catch_unwind(AssertUnwindSafe(|| bare::run(seed, 300))) {
            Ok(Ok(_)) => None,
            Ok(Err(text)) => Some((seed, text)),
            Err(panic) => Some((seed, format!("panic: {}", panic_text(&*panic)))),
        }
    })
}

/// Prints where each mistake was caught; fails naming those that were not.
fn demand(kind: &str, found: Vec<(String, Option<(u64, String)>)>) {
    let mut missed = Vec::new();
    for (mutant, caught) in found {
        match caught {
            Some((seed, text)) => {
                let text: String = text.chars().take(160).collect();
                println!("{kind} {mutant}: world {seed}: {text}");
            }
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "{kind}: not caught: {missed:?}");
}

#[test]
fn mistakes_of_the_pool_are_caught_without_an_engine() {
    use reef_kv::mutant::{Mutant, activate};
    keep_panics();
    // Nothing is given back during its steps.
    let here = Mutant::ALL.into_iter().filter(|mutant| *mutant != Mutant::SkipFence);
    let mut try_one = |mutant: Mutant| {
        activate(Some(mutant));
        let found = caught_bare();
        activate(None);
        (format!("{mutant:?}"), found)
    };
    let found = here.map(&mut try_one).collect();
    demand("bare", found);
}

#[test]
fn mistakes_of_the_pool_are_caught_under_the_engine() {
    use reef_kv::mutant::{Mutant, activate};
    keep_panics();
    // The engine's hashes do not collide; contexts matter to few of its worlds.
    let elsewhere = [Mutant::SkipTokenCompare, Mutant::IgnoreContext];
    let here = Mutant::ALL.into_iter().filter(|mutant| !elsewhere.contains(mutant));
    let mut try_one = |mutant: Mutant| {
        activate(Some(mutant));
        let found = caught();
        activate(None);
        (format!("{mutant:?}"), found)
    };
    let found = here.map(&mut try_one).collect();
    demand("engine, pool", found);
}

#[test]
fn mistakes_of_the_engine_are_caught() {
    use reef_engine::mutant::{Mutant, activate};
    keep_panics();
    let mut try_one = |mutant: Mutant| {
        activate(Some(mutant));
        let found = caught();
        activate(None);
        (format!("{mutant:?}"), found)
    };
    let found = Mutant::ALL.into_iter().map(&mut try_one).collect();
    demand("engine", found);
}

#[test]
fn without_a_mistake_nothing_is_caught() {
    let mut random = Random::new(1, "mutants");
    for _ in 0..5 {
        let seed = random.between(0, WORLDS - 1);
        let report = run(&World::new(&Recipe::of_seed(seed)), false);
        assert_eq!(report.failures, [], "seed {seed}");
    }
}
