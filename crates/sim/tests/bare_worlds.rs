//! Pools without an engine.

#[test]
fn pages_are_their_readers_own_whatever_is_shared() {
    let seeds = std::env::var("REEF_BARE_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    let mut sums = [0; 7];
    for seed in 0..seeds.unwrap_or(60) {
        let run = || reef_sim::bare::run(seed, 300).unwrap_or_else(|error| panic!("{error}"));
        let counts = std::panic::catch_unwind(run).unwrap_or_else(|_| panic!("seed {seed}"));
        let list = [
            counts.attached_blocks,
            counts.copied,
            counts.swapped,
            counts.exact,
            counts.exact_attached,
            counts.forked,
            counts.evicted_bytes / 1024,
        ];
        sums.iter_mut().zip(list).for_each(|(sum, count)| *sum += count);
    }
    assert!(sums.iter().all(|&count| count > 100), "too little was tried: {sums:?}");
}
