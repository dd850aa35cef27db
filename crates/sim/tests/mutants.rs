//! Deliberate mistakes: each is caught within a few worlds, so the checks can fail, and do.
#![cfg(feature = "mutants")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use reef_kv::mutant::{Mutant, activate};

/// Worlds within which a mistake has to show.
const WORLDS: u64 = 60;

/// What the first world that catches `mutant` says.
fn caught_bare(mutant: Mutant) -> Option<(u64, String)> {
    activate(Some(mutant));
    let found = (0..WORLDS).find_map(|seed| {
        let end = catch_unwind(AssertUnwindSafe(|| reef_sim::bare::run(seed, 300)));
        let text = match end {
            Ok(Ok(_)) => return None,
            Ok(Err(text)) => text,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or(panic.downcast_ref::<&str>().map(|text| text.to_string()));
                format!("panic: {}", text.unwrap_or_default())
            }
        };
        Some((seed, text))
    });
    activate(None);
    found
}

#[test]
fn mistakes_of_the_pool_are_caught_without_an_engine() {
    let mut missed = Vec::new();
    for mutant in Mutant::ALL {
        match caught_bare(mutant) {
            Some((seed, text)) => println!("{mutant:?}: world {seed}: {text}"),
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "not caught in {WORLDS} worlds: {missed:?}");
}
