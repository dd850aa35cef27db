//! What the block tables cost: `cargo run --release -p reef-kv --example table_bench [rounds]`.
//!
//! Prints medians of `rounds` (11): a token of a running sequence (grow + commit), a fork, the first token of
//! a fork (copy-on-write of its open block), and a sequence out and back.

use std::time::Instant;

use reef_kv::page::PageShape;
use reef_kv::*;

/// Like SmolLM2-135M.
fn pool(budget_bytes: usize) -> Result<BlockPool, ConfigError> {
    let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };
    let groups = vec![GroupConfig { layers: 30, shape, window: None, pinned: vec![] }];
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: true, ladder: Ladder::default() })
}

fn request(request: u64) -> SequenceConfig {
    let (contract, trained_context) = (Fidelity::Evict, 8192);
    SequenceConfig { request, contract, priority: 0, trained_context, max_tokens: Some(8192) }
}

/// Microseconds of `work`, and what it made.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let made = std::hint::black_box(work());
    (start.elapsed().as_secs_f64() * 1e6, made)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// 16 sequences of 2,048 tokens grow by 64 tokens each in turn: microseconds a token.
fn tokens(pool: &BlockPool) -> Result<f64, Shortage> {
    let mut sequences: Vec<Sequence> = (0..16).map(|id| Sequence::new(pool, request(id))).collect();
    for sequence in &mut sequences {
        sequence.grow(2048)?;
        sequence.commit(2048);
    }
    let (time_us, done) = timed(|| {
        for _ in 0..64 {
            for sequence in &mut sequences {
                sequence.grow(1)?;
                sequence.commit(1);
            }
        }
        Ok(())
    });
    done.map(|()| time_us / (64.0 * 16.0))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rounds = std::env::args().nth(1).map_or(Ok(11), |rounds| rounds.parse::<usize>())?.max(1);
    let pool = pool(900 << 20)?;
    let (mut token, mut fork, mut copy) = (Vec::new(), Vec::new(), Vec::new());
    let (mut out, mut back, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        token.push(tokens(&pool)?);
        let mut sequence = Sequence::new(&pool, request(0));
        sequence.grow(1500)?;
        sequence.commit(1500);
        let (time_us, mut forked) = timed(|| sequence.fork(1));
        fork.push(time_us);
        let (time_us, grown) = timed(|| forked.grow(1));
        grown?;
        copy.push(time_us);
        let (time_us, image) = timed(|| {
            let (image, pages) = sequence.pin();
            bytes.resize(pages.bytes(), 0);
            pages.copy_to(0, &mut bytes);
            image
        });
        out.push(time_us);
        sequence.clear();
        let (time_us, done) = timed(|| {
            let mut pages = sequence.restore(&image)?;
            pages.copy_from(0, &bytes);
            sequence.adopt(image, pages);
            Ok::<(), Shortage>(())
        });
        done?;
        back.push(time_us);
    }
    println!("token of one of 16 sequences of 2,048 {:9.3} us", median(token));
    println!("fork of 1,500 tokens                  {:9.3} us", median(fork));
    println!("first token of a fork (one copy)      {:9.3} us", median(copy));
    println!(
        "1,500 tokens out ({} MB)              {:9.3} us",
        bytes.len() / 1_000_000,
        median(out)
    );
    println!("1,500 tokens back                     {:9.3} us", median(back));
    Ok(())
}
