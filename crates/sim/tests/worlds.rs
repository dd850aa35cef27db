//! Worlds with an engine: nothing is lost, nothing is wrong, and each is the same each time.

use reef_sim::campaign::campaign;
use reef_sim::run::run;
use reef_sim::world::{Recipe, World};

/// Few enough for a quick test; `cargo xtask sim` runs as many as asked.
const WORLDS: u64 = 40;

#[test]
fn every_exact_request_is_as_if_alone_and_every_invariant_holds() {
    let result = campaign(0..WORLDS, 2);
    let failures: Vec<String> = result
        .failures
        .iter()
        .map(|(recipe, failure)| format!("cargo xtask sim {recipe}: {failure}"))
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(result.worlds, WORLDS);
}

#[test]
fn the_same_seed_is_the_same_world() {
    for seed in 0..6 {
        let world = World::new(&Recipe::of_seed(seed));
        let (one, other) = (run(&world, true), run(&world, true));
        assert!(one.lines == other.lines && one.hash == other.hash, "seed {seed}");
        assert!(!one.lines.is_empty());
    }
    let hash = |seed| run(&World::new(&Recipe::of_seed(seed)), false).hash;
    assert_ne!(hash(0), hash(1));
}
