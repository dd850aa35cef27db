//! Attention of a batch of query rows over pages of mixed formats.
//!
//! The arithmetic of one (row, head) is fixed by [`scalar`] alone: scores lane-wise over the tokens of
//! a key group (one FMA a channel, even and odd channels apart), online softmax per key group (Milakov and
//! Gimelshein, arXiv 1805.02867), values one FMA a token in token order. The context is cut at
//! multiples of [`SPLIT_TOKENS`] original positions; the parts `(max, sum, values)` are merged in
//! order. So a row's result has the same bits whatever the batch, the chunk of the prompt, its
//! neighbours, the number of threads and the tier.
//!
//! No format costs a decoding pass: K scales fold into the query once per key group, V scales into the
//! softmax weights, and the minima add up on the side.

mod element;
#[cfg(target_arch = "x86_64")]
mod kernel;
mod mass;
pub mod scalar;
mod schedule;
#[cfg(target_arch = "x86_64")]
mod task;

pub use schedule::AttentionScratch;

use crate::dispatch::Tier;
use crate::pool::BarrierPool;
use reef_kv::page::{PageRef, PageShape};

/// Tokens of one part of the context, by original position; a multiple of every block size.
pub const SPLIT_TOKENS: u32 = 256;

/// What the attention of one layer looks like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a head; a multiple of 16.
    pub head_dim: usize,
    /// Tokens of a block: 16, 32, 64 or 128.
    pub block_size: usize,
    /// Factor of every score, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Tokens a row sees, itself included; `None` sees all.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// Shape of the pages that are read.
    pub fn page(&self) -> PageShape {
        PageShape { kv_heads: self.kv_heads, head_dim: self.head_dim, block_size: self.block_size }
    }

    /// Query heads that read the same KV head.
    pub fn group_heads(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The tokens `low..high` of `tokens` tokens at positions `first..` that position `row` sees;
    /// `low >= high` where it sees none.
    fn visible(&self, first: u32, tokens: usize, row: u32) -> (usize, usize) {
        let high = (u64::from(row) + 1).saturating_sub(u64::from(first));
        let low = match self.window {
            Some(window) => high.saturating_sub(window as u64),
            None => 0,
        };
        // A row past the window of the whole run has `high` beyond it, so `low` is cut off `high`
        // before `high` is cut to the run.
        (low.min(tokens as u64) as usize, high.min(tokens as u64) as usize)
    }
}

/// One sequence of the batch in one layer.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRows<'a> {
    /// Its pages in token order; dropped blocks are absent.
    pub pages: &'a [PageRef],
    /// Original position of its first query row; row `i` is at `first_position + i`.
    pub first_position: u32,
    /// Query rows.
    pub rows: usize,
    /// `[runs][rows][heads * head_dim]`: the queries rotated for each run of `PageRef::run`.
    pub queries: &'a [f32],
    /// Whether [`AttentionScratch::masses`] shall say how much attention each page got.
    pub observe: bool,
}

/// Attention of every row of `sequences` over the pages in `arena`.
///
/// Row at position `p` sees token `t` of a page where `page.first + t <= p` and, with a window,
/// `page.first + t + window > p`. What it does not see never reaches its result, NaN included.
/// `out`: `[sum of rows][heads * head_dim]`, sequences in order; a row that sees nothing is 0.
///
/// Allocates only when `scratch` has never seen a batch or a context this large.
///
/// # Panics
/// If a slice has the wrong length, a page lies outside the arena, or a run has no queries.
pub fn paged_attention(
    tier: Tier,
    pool: &BarrierPool,
    shape: &AttentionShape,
    sequences: &[SequenceRows<'_>],
    arena: &[u8],
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    check(shape, sequences, arena, out);
    scratch.masses.lay_out(shape, sequences);
    match tier {
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 | Tier::Avx2 => {
            let kernels = if tier == Tier::Avx512 { &kernel::AVX512 } else { &kernel::AVX2 };
            task::run(kernels, pool, shape, sequences, arena, scratch, out);
        }
        _ => scalar::run(pool, shape, sequences, arena, &mut scratch.masses, out),
    }
    scratch.masses.add_heads(shape.kv_heads);
}

/// Everything the kernels rely on, since they read through raw pointers.
fn check(shape: &AttentionShape, sequences: &[SequenceRows<'_>], arena: &[u8], out: &[f32]) {
    let row = shape.heads * shape.head_dim;
    assert!(
        shape.kv_heads > 0 && shape.heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
        "attention: {} heads over {} KV heads",
        shape.heads,
        shape.kv_heads
    );
    assert!(
        shape.head_dim > 0 && shape.head_dim.is_multiple_of(16),
        "attention: head_dim {} is not a multiple of 16",
        shape.head_dim
    );
    assert!(
        [16, 32, 64, 128].contains(&shape.block_size),
        "attention: block_size {} is not 16, 32, 64 or 128",
        shape.block_size
    );
    let rows: usize = sequences.iter().map(|sequence| sequence.rows).sum();
    assert!(out.len() == rows * row, "attention: out holds {} floats for {rows} rows", out.len());
    let page = shape.page();
    for sequence in sequences {
        for reference in sequence.pages {
            let end = reference.byte_offset() + page.page_bytes(reference.format);
            assert!(end <= arena.len(), "attention: page ends at {end}, past the arena");
            let queries = (usize::from(reference.run) + 1) * sequence.rows * row;
            assert!(queries <= sequence.queries.len(), "attention: no queries for a page's run");
        }
    }
}
