//! Attention reads the pages: a changed byte of one changes what later tokens see, elsewhere nothing.
//!
//! With f32 activations: 8-bit codes would swallow the smallest changes.

use std::ops::ControlFlow;

use reef_engine::session::{EngineError, Rules, Session};
use reef_engine::{Event, config::pool_config};
use reef_kv::page::PageFormat;
use reef_kv::{BlockPool, Fidelity, Sequence, SequenceConfig};
use reef_model::runner::{Activations, BatchSequence, ModelRunner};

use super::support::drive::{endless, engine, generate, greedy, roomy_pool};
use super::support::random::Random;
use super::support::tiny::{Tiny, Weights, options};

/// Flips bits of one byte of the pool's arena.
fn flip(pool: &BlockPool, offset: usize, bits: u8) {
    assert!(offset < pool.arena().len());
    // SAFETY: in bounds by the assertion; no step is in flight and no slice of the arena is alive, and
    // this test's thread is the only one that uses the pool.
    unsafe { *pool.arena().base().add(offset) ^= bits };
}

/// Logits of one token after what `session` holds. Nothing is committed, so it can be asked again.
fn peek(runner: &mut ModelRunner, pool: &BlockPool, sequence: &mut Sequence) -> Vec<u32> {
    sequence.grow(1).unwrap();
    let first_position = sequence.next_position() as u32;
    let batch =
        [BatchSequence { tokens: &[3], first_position, view: sequence.view(), observe: false }];
    runner.forward(pool.arena(), &batch).unwrap();
    runner.logits(&[0]).iter().map(|logit| logit.to_bits()).collect()
}

fn fill(runner: &mut ModelRunner, pool: &BlockPool, ids: &[u32]) -> Sequence {
    let mut sequence = Sequence::new(pool, endless(Fidelity::Evict, usize::MAX));
    sequence.grow(ids.len()).unwrap();
    let batch =
        [BatchSequence { tokens: ids, first_position: 0, view: sequence.view(), observe: false }];
    runner.forward(pool.arena(), &batch).unwrap();
    sequence.commit(ids.len());
    sequence
}

#[test]
fn a_flipped_byte_of_k_or_v_is_seen_and_of_other_pages_is_not() {
    for architecture in ["llama", "gemma3"] {
        let tiny = Tiny { weights: Weights::Q8_0, ..Tiny::new(architecture) };
        let mut runner = tiny.build().runner(options(Activations::F32));
        let pool = roomy_pool(&runner, 32, 400);
        let ids = Random(4).tokens(70, tiny.vocabulary);
        let mut sequence = fill(&mut runner, &pool, &ids);
        let other = fill(&mut runner, &pool, &ids[..50]);
        let before = peek(&mut runner, &pool, &mut sequence);
        let shape = runner.spec().page_shape(32);
        for group in 0..sequence.view().groups.len() {
            // The second of the three blocks: sealed, and inside Gemma's window of 40.
            let page = sequence.view().groups[group].layers[0][1].byte_offset();
            for head in 0..shape.kv_heads {
                let layout = shape.head(PageFormat::F16, head);
                // The sign of one number: of channel 5 of the last token, and of a V.
                let k = layout.k + 2 * (5 * 32 + 31) + 1;
                let v = layout.v + 2 * (31 * shape.head_dim + 9) + 1;
                for offset in [k, v] {
                    flip(&pool, page + offset, 0x80);
                    let changed = peek(&mut runner, &pool, &mut sequence);
                    assert_ne!(
                        changed, before,
                        "{architecture}: byte {offset} of a page is not read"
                    );
                    flip(&pool, page + offset, 0x80);
                    assert_eq!(peek(&mut runner, &pool, &mut sequence), before);
                }
            }
            let foreign = other.view().groups[group].layers[0][1].byte_offset();
            let open = sequence.view().groups[group].layers[0][2].byte_offset();
            let unwritten = shape.head(PageFormat::F16, 0).v + 2 * 20 * shape.head_dim + 1;
            for byte in [foreign + 1, open + unwritten, pool.arena().len() - 1] {
                flip(&pool, byte, 0x80);
                assert_eq!(
                    peek(&mut runner, &pool, &mut sequence),
                    before,
                    "{architecture}: {byte}"
                );
            }
        }
    }
}

#[test]
fn every_part_of_an_int8_page_is_read() {
    let tiny = Tiny { weights: Weights::Q8_0, ..Tiny::new("llama") };
    let mut runner = tiny.build().runner(options(Activations::F32));
    let pool = roomy_pool(&runner, 32, 400);
    let rules = Rules { format_at_seal: PageFormat::Int8, ..Rules::default() };
    let ids = Random(4).tokens(70, tiny.vocabulary);
    let mut session = Session::new(&pool, &rules, endless(Fidelity::Evict, usize::MAX));
    session.advance(&mut runner, &ids).unwrap();
    let page = session.sequence().view().groups[0].layers[2][0];
    assert_eq!(page.format, PageFormat::Int8);
    let layout = runner.spec().page_shape(32).head(PageFormat::Int8, 1);
    // Each peek is of a fresh row over the same pages: the step is not committed.
    let peek = |runner: &mut ModelRunner| -> Vec<u32> {
        let mut view = session.sequence().view().clone();
        // Only the sealed blocks: the row itself would need a page of its own.
        view.groups[0].layers.iter_mut().for_each(|layer| layer.truncate(3));
        let batch =
            [BatchSequence { tokens: &[3], first_position: 69, view: &view, observe: false }];
        runner.forward(pool.arena(), &batch).unwrap();
        runner.logits(&[0]).iter().map(|logit| logit.to_bits()).collect()
    };
    let before = peek(&mut runner);
    let parts = [layout.k, layout.v, layout.k_scale, layout.k_min, layout.v_scale, layout.v_min];
    for (part, offset) in parts.into_iter().enumerate() {
        // Codes: their largest bit; scales and minima: a large bit of the mantissa.
        let (byte, bits) = if part < 2 { (0, 0x80) } else { (1, 0x02) };
        flip(&pool, page.byte_offset() + offset + byte, bits);
        assert_ne!(peek(&mut runner), before, "part {part} of an int8 page is not read");
        flip(&pool, page.byte_offset() + offset + byte, bits);
        assert_eq!(peek(&mut runner), before);
    }
}

/// `Engine::generate` (what `run` uses) goes through the same pages: one byte that makes a value NaN
/// after prefill ends the run at the next token.
#[test]
fn generation_reads_the_pages_of_the_pool() {
    const BUDGET: usize = 4 << 20;
    let tiny = Tiny { weights: Weights::Q8_0, ..Tiny::new("llama") };
    let model = tiny.build();
    let prompt = Random(4).tokens(70, tiny.vocabulary);
    let request = greedy(&prompt, 20, Fidelity::Exact);
    let runner = model.runner(options(Activations::F32));
    let spec = runner.spec().clone();
    let mut engine = engine(runner, BUDGET);
    let expected = generate(&mut engine, &request).token_ids;
    // Where the first block of a sequence alone in such a pool lies.
    let twin = BlockPool::new(pool_config(&spec, 32, BUDGET)).unwrap();
    let mut sequence = Sequence::new(&twin, endless(Fidelity::Exact, 4096));
    sequence.grow(70).unwrap();
    let page = sequence.view().groups[0].layers[0][0].byte_offset();
    let value = page + spec.page_shape(32).head(PageFormat::F16, 0).v;
    let pool = engine.pool().clone();
    let (mut steps, mut told) = (0, Vec::new());
    let broken = engine.generate(&request, &mut |event| {
        match event {
            Event::Token(token) => told.push(token.id),
            Event::Step { .. } => {
                steps += 1;
                if steps == 1 {
                    // SAFETY: between steps, on the thread that runs them; the byte is in the arena.
                    unsafe { *pool.arena().base().add(value + 1) = 0x7e };
                }
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    let broken = broken.unwrap_err();
    assert!(matches!(broken, EngineError::NotFinite { tokens: 71 }), "{broken}");
    // The first token was computed before the fault.
    assert_eq!(told, expected[..1]);
    assert_eq!(generate(&mut engine, &request).token_ids, expected, "the page was given back");
}

/// Fills every byte that the pool hands out.
fn fill_arena(pool: &BlockPool, byte: u8) {
    for offset in 0..pool.arena().len() {
        // SAFETY: in bounds; nothing holds a page yet, and this test's thread is the only one.
        unsafe { *pool.arena().base().add(offset) = byte };
    }
}

/// Case 37: pages go from one format to another and back while a small pool is used up over and over;
/// whatever the arena held before (zeros, bytes that are NaN in f16 and in FP8) changes no bit.
#[test]
fn what_a_page_held_before_is_never_seen() {
    // Windows take little: a budget that full attention would find small is roomy for them.
    for (architecture, budget_tokens) in [("llama", 350), ("gemma3", 200)] {
        let model = Tiny::new(architecture).build();
        let ids = Random(54).tokens(700, 101);
        for format_at_seal in PageFormat::ALL {
            let mut expected: Option<Vec<f32>> = None;
            for byte in [0x00, 0x7e, 0x7f, 0xff] {
                let mut runner = model.plain_runner();
                let rules = Rules { format_at_seal, ..Rules::default() };
                let budget_bytes = roomy_pool(&runner, 32, 64).bytes_for_tokens(
                    budget_tokens,
                    PageFormat::F16,
                    32,
                );
                let pool = BlockPool::new(pool_config(runner.spec(), 32, budget_bytes)).unwrap();
                fill_arena(&pool, byte);
                let config =
                    SequenceConfig { max_tokens: Some(700), ..endless(Fidelity::Evict, 4096) };
                let mut session = Session::new(&pool, &rules, config);
                let logits = logits_of(&mut session, &mut runner, &ids);
                assert!(
                    logits.iter().all(|logit| logit.is_finite()),
                    "{format_at_seal:?} {byte:x}"
                );
                if format_at_seal == PageFormat::F16 {
                    let kv = session.sequence().usage();
                    let lossy = kv.tokens_by_format.iter().filter(|(_, tokens)| **tokens > 0.0);
                    assert!(lossy.count() > 1, "{kv:?}");
                }
                let expected = expected.get_or_insert_with(|| logits.clone());
                assert!(logits == *expected, "{architecture} {format_at_seal:?} {byte:x}");
            }
        }
    }
}

/// Logits of `ids`, computed a block at a time.
fn logits_of(session: &mut Session<'_>, runner: &mut ModelRunner, ids: &[u32]) -> Vec<f32> {
    let mut logits = Vec::new();
    for tokens in ids.chunks(32) {
        session.advance(runner, tokens).unwrap();
        let rows: Vec<usize> = (0..tokens.len()).collect();
        logits.extend_from_slice(runner.logits(&rows));
    }
    logits
}
