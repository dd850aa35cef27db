//! Paged attention: against softmax in f64, and bit for bit across tiers, batches and threads.

use proptest::prelude::*;
use reef_kernels::attention::{AttentionScratch, AttentionShape, SequenceRows, paged_attention};
use reef_kernels::dispatch::Tier;
use reef_kernels::page::{decode_page, reencode, write_kv};
use reef_kernels::pool::BarrierPool;
use reef_kv::page::{PAGE_ALIGN, PageFormat, PageRef};

/// Deterministic numbers in -1..1.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        })
        .collect()
}

/// One sequence in an arena whose every byte outside live tokens is NaN.
struct World {
    shape: AttentionShape,
    arena: Vec<u8>,
    pages: Vec<PageRef>,
    /// Tokens at positions `0..length`.
    length: usize,
    runs: usize,
    /// `[runs][length][heads * head_dim]`: a query for every position.
    queries: Vec<f32>,
}

impl World {
    /// `formats(block)`: `None` drops the block. Blocks that are not full stay f16.
    fn new(
        shape: AttentionShape,
        length: usize,
        runs: usize,
        seed: u64,
        formats: impl Fn(usize) -> Option<PageFormat>,
    ) -> World {
        let page_shape = shape.page();
        let channels = shape.kv_heads * shape.head_dim;
        let mut world = World {
            shape,
            arena: Vec::new(),
            pages: Vec::new(),
            length,
            runs,
            queries: noise(seed ^ 77, runs * length * shape.heads * shape.head_dim)
                .iter()
                .map(|x| x * 4.0)
                .collect(),
        };
        for first in (0..length).step_by(shape.block_size) {
            let tokens = shape.block_size.min(length - first);
            let Some(mut format) = formats(first / shape.block_size) else { continue };
            let mut page = vec![0xff; page_shape.page_bytes(PageFormat::F16)];
            for slot in 0..tokens {
                let kv = noise(seed + (first + slot) as u64 * 7919, 2 * channels);
                let (k, v) = kv.split_at(channels);
                write_kv(Tier::Scalar, &page_shape, &mut page, slot, k, v);
            }
            if tokens < shape.block_size {
                format = PageFormat::F16;
            }
            if format == PageFormat::Int8 {
                let mut small = vec![0xff; page_shape.page_bytes(format)];
                reencode(Tier::Scalar, &page_shape, PageFormat::F16, format, &page, &mut small)
                    .unwrap();
                page = small;
            }
            // A freed page between any two live ones.
            world.arena.resize(world.arena.len() + 3 * PAGE_ALIGN, 0xff);
            world.pages.push(PageRef {
                offset: (world.arena.len() / PAGE_ALIGN) as u32,
                first: first as u32,
                format,
                run: (first / shape.block_size * runs / length.div_ceil(shape.block_size)) as u8,
            });
            world.arena.extend(page);
        }
        world
    }

    /// The queries of rows `first..first + rows`, `[runs][rows][heads * head_dim]`.
    fn queries(&self, first: usize, rows: usize) -> Vec<f32> {
        let row = self.shape.heads * self.shape.head_dim;
        let of_run = |run: usize| (run * self.length + first) * row;
        (0..self.runs)
            .flat_map(|run| &self.queries[of_run(run)..of_run(run) + rows * row])
            .copied()
            .collect()
    }

    fn attend(&self, tier: Tier, threads: usize, first: usize, rows: usize) -> Vec<f32> {
        let queries = self.queries(first, rows);
        let sequence = SequenceRows {
            pages: &self.pages,
            first_position: first as u32,
            rows,
            queries: &queries,
        };
        attend(tier, threads, &self.shape, &[sequence], &self.arena)
    }

    /// Softmax in f64 over the decoded pages.
    fn naive(&self, position: usize) -> Vec<f64> {
        let (shape, page_shape) = (&self.shape, self.shape.page());
        let dim = shape.head_dim;
        let count = shape.kv_heads * shape.block_size * dim;
        let mut out = vec![0f64; shape.heads * dim];
        let (mut keys, mut values) = (vec![0f32; count], vec![0f32; count]);
        for head in 0..shape.heads {
            let mut tokens = Vec::new();
            for page in &self.pages {
                let bytes = &self.arena[page.byte_offset()..];
                decode_page(&page_shape, page.format, bytes, &mut keys, &mut values);
                let row = (usize::from(page.run) * self.length + position) * shape.heads + head;
                let query = &self.queries[row * dim..(row + 1) * dim];
                for slot in 0..shape.block_size {
                    let token = page.first as usize + slot;
                    let past = shape.window.is_some_and(|window| token + window <= position);
                    if token > position || past {
                        continue;
                    }
                    let at = (head / shape.group_heads() * shape.block_size + slot) * dim;
                    let key = &keys[at..at + dim];
                    let score: f64 =
                        query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let value = values[at..at + dim].to_vec();
                    tokens.push((score * f64::from(shape.scale), value));
                }
            }
            let max = tokens.iter().map(|t| t.0).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = tokens.iter().map(|t| (t.0 - max).exp()).sum();
            for (score, value) in &tokens {
                for (channel, value) in value.iter().enumerate() {
                    out[head * dim + channel] += (score - max).exp() / sum * f64::from(*value);
                }
            }
        }
        out
    }
}

fn attend(
    tier: Tier,
    threads: usize,
    shape: &AttentionShape,
    sequences: &[SequenceRows<'_>],
    arena: &[u8],
) -> Vec<f32> {
    let pool = BarrierPool::new(threads);
    let rows: usize = sequences.iter().map(|s| s.rows).sum();
    let mut scratch = AttentionScratch::new(&[*shape], 1, 64, threads);
    let mut out = vec![f32::NAN; rows * shape.heads * shape.head_dim];
    paged_attention(tier, &pool, shape, sequences, arena, &mut scratch, &mut out);
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn shapes() -> impl Strategy<Value = AttentionShape> {
    let ratios = proptest::sample::select(vec![1usize, 2, 3, 4, 5, 7, 8]);
    let dims = proptest::sample::select(vec![16usize, 32, 48, 64, 80, 96, 128, 256]);
    let blocks = proptest::sample::select(vec![16usize, 32, 64, 128]);
    let windows = prop_oneof![Just(None), (1usize..400).prop_map(Some)];
    (1usize..3, ratios, dims, blocks, windows).prop_map(
        |(kv_heads, ratio, head_dim, block_size, window)| AttentionShape {
            heads: kv_heads * ratio,
            kv_heads,
            head_dim,
            block_size,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window,
        },
    )
}

fn format_of(choice: u64, block: usize) -> PageFormat {
    match choice {
        0 => PageFormat::F16,
        1 => PageFormat::Int8,
        _ => PageFormat::ALL[(choice >> (block % 60)) as usize & 1],
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_tier_and_batch_gives_the_bits_of_the_specification(
        shape in shapes(),
        length in 1usize..600,
        runs in 1usize..4,
        rows in 1usize..41,
        choice in prop_oneof![Just(0u64), Just(1), any::<u64>()],
        drop in 0usize..6,
        seed: u64,
    ) {
        let world = World::new(shape, length, runs, seed >> 1, |block| {
            let last = length.div_ceil(shape.block_size) - 1;
            (drop == 0 || block == 0 || block == last || block % 7 != drop)
                .then(|| format_of(choice, block))
        });
        let rows = rows.min(length);
        let first = length - rows;
        let expected = world.attend(Tier::Scalar, 1, first, rows);
        prop_assert!(expected.iter().all(|x| x.is_finite()));
        let row = shape.heads * shape.head_dim;
        for tier in Tier::available() {
            for threads in [1, 3] {
                let together = world.attend(tier, threads, first, rows);
                prop_assert!(bits(&together) == bits(&expected), "{} prefill", tier.name());
                for index in [0, rows / 2, rows - 1] {
                    let alone = world.attend(tier, threads, first + index, 1);
                    let same = &expected[index * row..(index + 1) * row];
                    prop_assert!(bits(&alone) == bits(same), "{} decode", tier.name());
                }
            }
        }
        let naive = world.naive(length - 1);
        let largest = naive.iter().fold(0f64, |m, x| m.max(x.abs()));
        for (x, y) in expected[(rows - 1) * row..].iter().zip(&naive) {
            prop_assert!((f64::from(*x) - y).abs() <= 1e-5 * largest, "{x} is not {y}");
        }
    }
}

const SMOLLM2: AttentionShape = AttentionShape {
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    block_size: 32,
    scale: 0.125,
    window: None,
};

#[test]
fn neighbours_in_the_batch_change_nothing() {
    let mixed = |block: usize| Some(PageFormat::ALL[block % 2]);
    let a = World::new(SMOLLM2, 700, 1, 3, mixed);
    let mut b = World::new(SMOLLM2, 90, 1, 4, mixed);
    let mut arena = a.arena.clone();
    for page in &mut b.pages {
        page.offset += (arena.len() / PAGE_ALIGN) as u32;
    }
    arena.extend(&b.arena);
    let (a_queries, b_queries, c_queries) =
        (a.queries(699, 1), b.queries(0, 90), a.queries(300, 70));
    let of = |world: &World| world.pages.clone();
    let (a_pages, b_pages) = (of(&a), of(&b));
    let sequence = |pages, first_position, rows, queries| SequenceRows {
        pages,
        first_position,
        rows,
        queries,
    };
    let batch = [
        sequence(&a_pages, 699, 1, &a_queries),
        sequence(&b_pages, 0, 90, &b_queries),
        sequence(&[], 0, 0, &[]),
        sequence(&a_pages, 300, 70, &c_queries),
    ];
    for tier in Tier::available() {
        let together = attend(tier, 2, &SMOLLM2, &batch, &arena);
        let mut apart = Vec::new();
        for one in batch {
            apart.extend(attend(tier, 1, &SMOLLM2, &[one], &arena));
        }
        assert!(bits(&together) == bits(&apart), "{}", tier.name());
    }
}

#[test]
fn a_token_a_row_must_not_see_cannot_reach_it() {
    // Token 40 is infinite: rows before it, in the same tile and the same key group, stay clean.
    for tier in Tier::available() {
        let mut world = World::new(SMOLLM2, 64, 1, 9, |_| Some(PageFormat::F16));
        let clean = world.attend(tier, 2, 30, 10);
        let page = world.pages[1].byte_offset();
        let bad = vec![f32::INFINITY; 3 * 64];
        write_kv(tier, &SMOLLM2.page(), &mut world.arena[page..], 8, &bad, &bad);
        let end = page + SMOLLM2.page().page_bytes(PageFormat::F16);
        let nan = SMOLLM2.page().head(PageFormat::F16, 1).v + 8 * 64 * 2;
        world.arena[page..end][nan..nan + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
        let tile = world.attend(tier, 2, 30, 34);
        assert!(bits(&tile[..10 * 9 * 64]) == bits(&clean), "{}", tier.name());
        assert!(tile[33 * 9 * 64..].iter().any(|x| x.is_nan()));
    }
}

#[test]
fn one_flipped_byte_of_a_page_is_seen() {
    for format in PageFormat::ALL {
        let mut world = World::new(SMOLLM2, 96, 1, 9, |_| Some(format));
        let before = world.attend(Tier::detect(), 1, 95, 1);
        let at = world.pages[1].byte_offset() + SMOLLM2.page().head(format, 2).v + 100;
        world.arena[at] ^= 0x08;
        assert!(bits(&world.attend(Tier::detect(), 1, 95, 1)) != bits(&before));
    }
}

#[test]
fn a_row_that_sees_nothing_is_zero() {
    let shape = AttentionShape { window: Some(8), ..SMOLLM2 };
    let world = World::new(shape, 64, 1, 9, |block| (block == 0).then_some(PageFormat::F16));
    for tier in Tier::available() {
        assert!(world.attend(tier, 2, 60, 2).iter().all(|x| *x == 0.0));
    }
}
