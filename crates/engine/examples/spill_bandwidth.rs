//! How fast whole sequences go to the spill store and come back, beside plain writes and reads of a file
//! and the checksum alone. All take turns, so that whatever else the machine does hits all alike. Medians, and
//! the fastest tenth: on a machine with other work that is what an undisturbed transfer reaches.
//! What was just written is read back from the system's cache, in both ways.
//!
//! `cargo run --release -p reef-engine --example spill_bandwidth -- [FOLDER [BLOCKS [ROUNDS [SLOT_KIB]]]]`

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use reef_engine::store::{Spill, SpillDone, SpillFile, SpillSize};
use reef_kv::page::PageShape;
use reef_kv::{BlockPool, Fidelity, GroupConfig, Ladder, PoolConfig, Sequence, SequenceConfig};

/// A piece of a plain write or read, in bytes.
const PIECE: usize = 1 << 20;

/// Sequences of SmolLM2-135M: 30 layers of three heads of 64, 720 KiB a block of 32 tokens.
fn sequence(blocks: usize) -> Result<Sequence, Box<dyn Error>> {
    let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };
    let pool = BlockPool::new(PoolConfig {
        groups: vec![GroupConfig { layers: 30, shape, window: None, pinned: vec![] }],
        budget_bytes: (blocks + 8) * (800 << 10) + (4 << 20),
        prefault: true,
        ladder: Ladder::default(),
    })?;
    let config = SequenceConfig {
        request: 0,
        contract: Fidelity::Exact,
        priority: 0,
        trained_context: 1 << 20,
        max_tokens: None,
    };
    let mut sequence = Sequence::new(&pool, config);
    sequence.grow(blocks * 32)?;
    sequence.commit(blocks * 32);
    let (image, _) = sequence.pin();
    sequence.clear();
    let mut pages = sequence.restore(&image)?;
    let mut noise = vec![0; pages.bytes()];
    blake3::Hasher::new().finalize_xof().fill(&mut noise);
    pages.copy_from(0, &noise);
    sequence.adopt(image, pages);
    Ok(sequence)
}

/// Gigabytes a second of each way, one entry a round.
#[derive(Default)]
struct Rates {
    store: Vec<f64>,
    load: Vec<f64>,
    write: Vec<f64>,
    read: Vec<f64>,
    hash: Vec<f64>,
}

fn rate(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / begun.elapsed().as_secs_f64() / 1e9
}

fn next(store: &mut SpillFile, wakes: &Receiver<()>) -> Result<SpillDone, Box<dyn Error>> {
    wakes.recv()?;
    match store.poll().pop() {
        Some(SpillDone::Failed { error, .. }) => Err(error.into()),
        Some(done) => Ok(done),
        None => Err("woken for nothing".into()),
    }
}

/// There and back by the store, in the time that its caller waits.
fn round_trip(
    store: &mut SpillFile,
    wakes: &Receiver<()>,
    record: u64,
    sequence: &mut Sequence,
    rates: &mut Rates,
) -> Result<(), Box<dyn Error>> {
    let (image, pinned) = sequence.pin();
    let begun = Instant::now();
    store.store(record, pinned)?;
    next(store, wakes)?;
    rates.store.push(rate(image.bytes(), begun));
    sequence.clear();
    let pages = sequence.restore(&image)?;
    let begun = Instant::now();
    store.load(record, pages)?;
    let SpillDone::Loaded { pages, .. } = next(store, wakes)? else {
        return Err("not loaded".into());
    };
    rates.load.push(rate(image.bytes(), begun));
    sequence.adopt(image, pages);
    Ok(())
}

/// There and back by plain calls, and the checksum alone.
fn plainly(file: &mut File, bytes: &mut [u8], rates: &mut Rates) -> Result<(), Box<dyn Error>> {
    let begun = Instant::now();
    file.seek(SeekFrom::Start(0))?;
    for piece in bytes.chunks(PIECE) {
        file.write_all(piece)?;
    }
    rates.write.push(rate(bytes.len(), begun));
    let begun = Instant::now();
    file.seek(SeekFrom::Start(0))?;
    for piece in bytes.chunks_mut(PIECE) {
        file.read_exact(piece)?;
    }
    rates.read.push(rate(bytes.len(), begun));
    let begun = Instant::now();
    for piece in bytes.chunks(SpillSize::SLOT_BYTES) {
        black_box(blake3::hash(piece));
    }
    rates.hash.push(rate(bytes.len(), begun));
    Ok(())
}

/// (Median, fastest tenth).
fn typical(mut rates: Vec<f64>) -> (f64, f64) {
    rates.sort_by(f64::total_cmp);
    (rates[rates.len() / 2], rates[rates.len() - 1 - rates.len() / 10])
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse::<usize>());
    let (blocks, rounds, slot_kib) = (number(28)?, number(31)?.max(1), number(256)?);
    let mut sequence = sequence(blocks)?;
    let bytes = sequence.pin().1.bytes();
    let size = SpillSize { file_bytes: 2 * bytes as u64 + (1 << 20), slot_bytes: slot_kib << 10 };
    let name = |kind: &str| folder.join(format!("reef-{kind}-{}", std::process::id()));
    let mut store = SpillFile::open(&name("spill"), size)?;
    let (wake, wakes) = channel();
    store.set_waker(Arc::new(move || {
        // The other end lives as long as the store.
        let _ = wake.send(());
    }));
    let plain_path = name("plain");
    let mut options = OpenOptions::new();
    let mut plain = options.read(true).write(true).create_new(true).open(&plain_path)?;
    let mut rates = Rates::default();
    let mut buffer = vec![7; bytes];
    for record in 0..rounds as u64 {
        round_trip(&mut store, &wakes, record, &mut sequence, &mut rates)?;
        plainly(&mut plain, &mut buffer, &mut rates)?;
    }
    drop(plain);
    std::fs::remove_file(&plain_path)?;
    println!("{:.1} MB a record, slots of {slot_kib} KiB, {rounds} rounds", bytes as f64 / 1e6);
    println!("{:>12} {:>8} {:>16}", "GB/s", "median", "fastest tenth");
    let Rates { store, load, write, read, hash } = rates;
    let names = ["store", "load", "plain write", "plain read", "BLAKE3 alone"];
    for (name, rates) in names.into_iter().zip([store, load, write, read, hash]) {
        let (median, fastest) = typical(rates);
        println!("{name:>12} {median:>8.2} {fastest:>16.2}");
    }
    Ok(())
}
