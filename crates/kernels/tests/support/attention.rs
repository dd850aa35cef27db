//! Sequences in an arena of random pages of any format, and attention over them in f64: a second
//! reading of the page layout, straight from its description.
#![allow(dead_code)] // each test binary uses a part

use half::f16;
use proptest::prelude::*;
use reef_kernels::attention::{AttentionScratch, AttentionShape, SequenceRows, paged_attention};
use reef_kernels::dispatch::Tier;
use reef_kernels::page::write_kv;
use reef_kernels::pool::BarrierPool;
use reef_kv::page::{PAGE_ALIGN, PageFormat, PageRef, PageShape, PartFormat, Scaling};

pub const SMOLLM2: AttentionShape = AttentionShape {
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    block_size: 32,
    scale: 0.125,
    window: None,
};

pub fn shapes() -> impl Strategy<Value = AttentionShape> {
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

/// One format for all blocks, or any for each.
pub fn format_of(choice: u64, block: usize) -> PageFormat {
    let count = PageFormat::ALL.len();
    match PageFormat::ALL.get(choice as usize) {
        Some(format) => *format,
        None => PageFormat::ALL[(choice >> (block % 50)) as usize % count],
    }
}

/// Deterministic numbers in -1..1.
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
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
pub struct World {
    pub shape: AttentionShape,
    pub arena: Vec<u8>,
    pub pages: Vec<PageRef>,
    /// Tokens at positions `0..length`.
    pub length: usize,
    pub runs: usize,
    /// `[runs][length][heads * head_dim]`: a query for every position.
    pub queries: Vec<f32>,
}

impl World {
    /// `formats(block)`: `None` drops the block. Blocks that are not full stay f16.
    pub fn new(
        shape: AttentionShape,
        length: usize,
        runs: usize,
        seed: u64,
        formats: impl Fn(usize) -> Option<PageFormat>,
    ) -> World {
        let page_shape = shape.page();
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
            if tokens < shape.block_size {
                format = PageFormat::F16;
            }
            let page = random_page(&page_shape, format, tokens, seed + first as u64 * 7919);
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
    pub fn queries(&self, first: usize, rows: usize) -> Vec<f32> {
        let row = self.shape.heads * self.shape.head_dim;
        let of_run = |run: usize| (run * self.length + first) * row;
        (0..self.runs)
            .flat_map(|run| &self.queries[of_run(run)..of_run(run) + rows * row])
            .copied()
            .collect()
    }

    pub fn attend(&self, tier: Tier, threads: usize, first: usize, rows: usize) -> Vec<f32> {
        self.attend_and_observe(tier, threads, (first, rows), false).0
    }

    /// Output and masses.
    pub fn attend_and_observe(
        &self,
        tier: Tier,
        threads: usize,
        (first, rows): (usize, usize),
        observe: bool,
    ) -> (Vec<f32>, Vec<f32>) {
        let queries = self.queries(first, rows);
        let sequence = SequenceRows {
            pages: &self.pages,
            first_position: first as u32,
            rows,
            queries: &queries,
            observe,
        };
        let (out, mut masses) = attend(tier, threads, &self.shape, &[sequence], &self.arena);
        (out, masses.remove(0))
    }

    /// Softmax in f64 over the decoded pages.
    pub fn naive(&self, position: usize) -> Naive {
        let (shape, page_shape) = (&self.shape, self.shape.page());
        let dim = shape.head_dim;
        let mut out = vec![0f64; shape.heads * dim];
        let mut masses = vec![0f64; self.pages.len()];
        for head in 0..shape.heads {
            let mut tokens = Vec::new();
            for (index, page) in self.pages.iter().enumerate() {
                let bytes = &self.arena[page.byte_offset()..];
                let kv_head = head / shape.group_heads();
                let number = |part, slot, channel| {
                    number(&page_shape, page.format, bytes, kv_head, part, slot, channel)
                };
                let row = (usize::from(page.run) * self.length + position) * shape.heads + head;
                let query = &self.queries[row * dim..(row + 1) * dim];
                for slot in 0..shape.block_size {
                    let token = page.first as usize + slot;
                    let past = shape.window.is_some_and(|window| token + window <= position);
                    if token > position || past {
                        continue;
                    }
                    let score: f64 = (0..dim)
                        .map(|channel| f64::from(query[channel]) * number(Part::Key, slot, channel))
                        .sum();
                    let value: Vec<f64> =
                        (0..dim).map(|channel| number(Part::Value, slot, channel)).collect();
                    tokens.push((score * f64::from(shape.scale), value, index));
                }
            }
            let max = tokens.iter().map(|t| t.0).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = tokens.iter().map(|t| (t.0 - max).exp()).sum();
            for (score, value, page) in &tokens {
                masses[*page] += (score - max).exp() / sum;
                for (channel, value) in value.iter().enumerate() {
                    out[head * dim + channel] += (score - max).exp() / sum * value;
                }
            }
        }
        Naive { out, masses }
    }
}

/// What softmax in f64 says of one row.
pub struct Naive {
    /// `[heads * head_dim]`.
    pub out: Vec<f64>,
    /// Probability per page, over all heads.
    pub masses: Vec<f64>,
}

/// Output of a batch, and the masses of each sequence.
pub fn attend(
    tier: Tier,
    threads: usize,
    shape: &AttentionShape,
    sequences: &[SequenceRows<'_>],
    arena: &[u8],
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let pool = BarrierPool::new(threads);
    let rows: usize = sequences.iter().map(|s| s.rows).sum();
    let mut scratch = AttentionScratch::new(&[*shape], 1, 64, threads);
    let mut out = vec![f32::NAN; rows * shape.heads * shape.head_dim];
    paged_attention(tier, &pool, shape, sequences, arena, &mut scratch, &mut out);
    let masses = (0..sequences.len()).map(|index| scratch.masses(index).to_vec()).collect();
    (out, masses)
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// K or V.
#[derive(Clone, Copy, PartialEq)]
pub enum Part {
    Key,
    Value,
}

/// A page with `tokens` random tokens, NaN everywhere else (lossy pages are full).
pub fn random_page(shape: &PageShape, format: PageFormat, tokens: usize, seed: u64) -> Vec<u8> {
    let channels = shape.kv_heads * shape.head_dim;
    let mut page = vec![0xff; shape.page_bytes(format)];
    if format == PageFormat::F16 {
        for slot in 0..tokens {
            let kv = noise(seed + slot as u64 * 7919, 2 * channels);
            let (k, v) = kv.split_at(channels);
            write_kv(Tier::Scalar, shape, &mut page, slot, k, v);
        }
        return page;
    }
    for head in 0..shape.kv_heads {
        let at = shape.head(format, head);
        let seed = seed ^ (head as u64) << 40;
        let count = shape.block_size * shape.head_dim;
        put_codes(&mut page[at.k..], format.keys(), count, seed ^ 1);
        put_codes(&mut page[at.v..], format.values(), count, seed ^ 2);
        let key_rows = shape.key_groups() * shape.head_dim;
        let value_rows = shape.block_size * shape.value_groups();
        if format.keys().scaling() == Scaling::Whole {
            let unit = |part| if part == PartFormat::E4M3 { 448.0 } else { 57344.0f32 };
            for (part, place) in [(format.keys(), at.k_scale), (format.values(), at.v_scale)] {
                let scale = (1.2 + noise(seed + place as u64, 1)[0]) / unit(part);
                page[place..place + 4].copy_from_slice(&scale.to_le_bytes());
            }
            continue;
        }
        for (rows, scales, minima) in
            [(key_rows, at.k_scale, at.k_min), (value_rows, at.v_scale, at.v_min)]
        {
            let (scale, min) = (noise(seed ^ 3, rows), noise(seed ^ 4, rows));
            for row in 0..rows {
                let put = |page: &mut [u8], place: usize, x: f32| {
                    let place = place + 2 * row;
                    page[place..place + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
                };
                put(&mut page, scales, (1.1 + scale[row]) / 255.0);
                put(&mut page, minima, min[row] - 0.5);
            }
        }
    }
    page
}

/// Random codes, none of them NaN or infinite.
fn put_codes(part: &mut [u8], format: PartFormat, count: usize, seed: u64) {
    let bytes = count * format.bits() / 8;
    for (byte, x) in part[..bytes].iter_mut().zip(noise(seed, bytes)) {
        *byte = ((x + 1.0) * 128.0) as u8;
        match format {
            PartFormat::E4M3 if *byte & 0x7f == 0x7f => *byte ^= 1,
            PartFormat::E5M2 if *byte & 0x7c == 0x7c => *byte ^= 4,
            _ => {}
        }
    }
}

/// One number of a page.
fn number(
    shape: &PageShape,
    format: PageFormat,
    page: &[u8],
    head: usize,
    part: Part,
    token: usize,
    channel: usize,
) -> f64 {
    let at = shape.head(format, head);
    let half = |at: usize| f16::from_le_bytes([page[at], page[at + 1]]).to_f64();
    let single = |at: usize| {
        f64::from(f32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]]))
    };
    let group = shape.key_group();
    let key_row = token / group * shape.head_dim + channel;
    let value_row = token * shape.value_groups() + channel / 32;
    let (coding, start, index, scales, minima, row) = match part {
        Part::Key => {
            let index = key_row * group + token % group;
            (format.keys(), at.k, index, at.k_scale, at.k_min, key_row)
        }
        Part::Value => {
            let index = token * shape.head_dim + channel;
            (format.values(), at.v, index, at.v_scale, at.v_min, value_row)
        }
    };
    let (vector, lane) = (index / 16, index % 16);
    let nibble =
        page[start..].get(vector / 2 * 16 + lane).map_or(0, |byte| byte >> (vector % 2 * 4) & 15);
    match coding {
        PartFormat::F16 => half(start + 2 * index),
        PartFormat::U8 => {
            half(minima + 2 * row) + half(scales + 2 * row) * f64::from(page[start + index])
        }
        PartFormat::U4 => {
            half(minima + 2 * row) + 17.0 * half(scales + 2 * row) * f64::from(nibble)
        }
        PartFormat::E4M3 => single(scales) * small_float(page[start + index], 4),
        PartFormat::E5M2 => single(scales) * small_float(page[start + index], 5),
    }
}

/// An 8-bit float with `exponent_bits` bits of exponent, from its definition.
fn small_float(code: u8, exponent_bits: i32) -> f64 {
    let mantissa_bits = 7 - exponent_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
    let fraction =
        f64::from(i32::from(code) & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let magnitude = if exponent == 0 {
        fraction * f64::from(1 - bias).exp2()
    } else {
        (1.0 + fraction) * f64::from(exponent - bias).exp2()
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}
