//! The specification of attention in plain loops; also the path for CPUs without SIMD tiers.

use super::element::unit;
use super::mass::{Masses, add_pages};
use super::{AttentionShape, SPLIT_TOKENS, SequenceRows};
use crate::page::scalar::{half_at, nibble_at, single_at};
use crate::pool::BarrierPool;
use crate::rows::for_each_row;
use crate::scalar::{exp, reduce_add};
use crate::simd::LANES;
use half::f16;
use reef_kv::page::{HeadLayout, PageFormat, PageRef, PartFormat, Scaling, VALUE_GROUP};

/// Softmax over some tokens, not yet divided by the sum.
struct Part {
    /// Largest score; -inf before the first token.
    max: f32,
    /// Sum of the weights.
    sum: f32,
    /// Weighted sum of the values, `[head_dim]`.
    values: Vec<f32>,
}

impl Part {
    fn empty(head_dim: usize) -> Part {
        Part { max: f32::NEG_INFINITY, sum: 0.0, values: vec![0.0; head_dim] }
    }

    /// Appends the part that follows in token order.
    fn merge(&mut self, next: &Part) {
        if next.max == f32::NEG_INFINITY {
            return;
        }
        let max = self.max.max(next.max);
        let (mine, theirs) = (exp(self.max - max), exp(next.max - max));
        self.max = max;
        self.sum = next.sum.mul_add(theirs, self.sum * mine);
        for (value, other) in self.values.iter_mut().zip(&next.values) {
            *value = other.mul_add(theirs, *value * mine);
        }
    }
}

/// The part of one split while it grows: sums are kept lane-wise until the split ends.
struct Split {
    max: f32,
    /// Sum of the weights, by token modulo sixteen.
    lanes: [f32; LANES],
    /// Weighted sum of values or codes.
    values: Vec<f32>,
    /// Weighted sum of the V minima of each value group, by token modulo sixteen.
    minima: Vec<[f32; LANES]>,
}

impl Split {
    fn empty(head_dim: usize) -> Split {
        let groups = head_dim.div_ceil(VALUE_GROUP);
        Split {
            max: f32::NEG_INFINITY,
            lanes: [0.0; LANES],
            values: vec![0.0; head_dim],
            minima: vec![[0.0; LANES]; groups],
        }
    }

    fn close(self) -> Part {
        let mut values = self.values;
        for (channel, value) in values.iter_mut().enumerate() {
            *value += reduce_add(self.minima[channel / VALUE_GROUP]);
        }
        Part { max: self.max, sum: reduce_add(self.lanes), values }
    }

    /// Takes one key group into the split: `scores` become weights, invisible ones 0. Gives whether
    /// there is any weight.
    fn weigh(&mut self, scores: &mut [f32], (low, high): (usize, usize)) -> bool {
        let largest = scores[low..high].iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let max = self.max.max(largest);
        if max == f32::NEG_INFINITY {
            return false;
        }
        let rescale = exp(self.max - max);
        self.max = max;
        for value in &mut self.values {
            *value *= rescale;
        }
        for lane in self.minima.iter_mut().flatten().chain(&mut self.lanes) {
            *lane *= rescale;
        }
        for (token, score) in scores.iter_mut().enumerate() {
            *score = if (low..high).contains(&token) { exp(*score - max) } else { 0.0 };
            self.lanes[token % LANES] += *score;
        }
        true
    }
}

/// One key group of one page, for one KV head.
struct Group<'a> {
    page: &'a [u8],
    format: PageFormat,
    at: HeadLayout,
    index: usize,
    /// Tokens of the group.
    tokens: usize,
    head_dim: usize,
}

impl Group<'_> {
    /// Scores of all tokens; `query` is scaled already.
    fn scores(&self, query: &[f32]) -> Vec<f32> {
        let row = |channel| self.index * self.head_dim + channel;
        let mut folded = query.to_vec();
        let mut bias = [0f32; LANES];
        let format = self.format.keys();
        match format.scaling() {
            Scaling::None => {}
            Scaling::Whole => {
                let scale = unit(format) * single_at(self.page, self.at.k_scale);
                folded.iter_mut().for_each(|query| *query *= scale);
            }
            Scaling::Grouped => {
                for (channel, query) in folded.iter_mut().enumerate() {
                    let min = half_at(self.page, self.at.k_min + 2 * row(channel));
                    bias[channel % LANES] = query.mul_add(min, bias[channel % LANES]);
                    *query *= unit(format) * half_at(self.page, self.at.k_scale + 2 * row(channel));
                }
            }
        }
        // Even and odd channels.
        let mut sums = [vec![reduce_add(bias); self.tokens], vec![0.0; self.tokens]];
        for (channel, query) in folded.iter().enumerate() {
            for (token, sum) in sums[channel % 2].iter_mut().enumerate() {
                let key =
                    stored(format, &self.page[self.at.k..], row(channel) * self.tokens + token);
                *sum = query.mul_add(key, *sum);
            }
        }
        sums[0].iter().zip(&sums[1]).map(|(even, odd)| even + odd).collect()
    }

    /// Adds the values of the visible tokens, weighted.
    fn accumulate(&self, weights: &[f32], (low, high): (usize, usize), split: &mut Split) {
        let value_groups = self.head_dim.div_ceil(VALUE_GROUP);
        let first = self.index * self.tokens;
        let part = |token: usize, channel: usize, part: usize| {
            let row = (first + token) * value_groups + channel / VALUE_GROUP;
            half_at(self.page, part + 2 * row)
        };
        let format = self.format.values();
        let scale = |token: usize, channel: usize| match format.scaling() {
            Scaling::None => 1.0,
            Scaling::Whole => unit(format) * single_at(self.page, self.at.v_scale),
            Scaling::Grouped => unit(format) * part(token, channel, self.at.v_scale),
        };
        for (token, weight) in weights.iter().enumerate().take(high).skip(low) {
            for channel in 0..self.head_dim {
                let index = (first + token) * self.head_dim + channel;
                let value = stored(format, &self.page[self.at.v..], index);
                let weight = weight * scale(token, channel);
                split.values[channel] = weight.mul_add(value, split.values[channel]);
            }
        }
        if format.scaling() == Scaling::Grouped {
            for (group, lanes) in split.minima.iter_mut().enumerate() {
                for (token, weight) in weights.iter().enumerate() {
                    // A weight of 0 does not silence NaN.
                    let visible = (low..high).contains(&token);
                    let min = part(token, group * VALUE_GROUP, self.at.v_min);
                    let min = if visible { min } else { 0.0 };
                    lanes[token % LANES] = weight.mul_add(min, lanes[token % LANES]);
                }
            }
        }
    }
}

/// Number `index` of a part, in units of [`unit()`].
fn stored(format: PartFormat, part: &[u8], index: usize) -> f32 {
    match format {
        PartFormat::F16 => half_at(part, 2 * index),
        PartFormat::U8 => f32::from(part[index]),
        PartFormat::U4 => f32::from(nibble_at(part, 0, index)),
        PartFormat::E4M3 => {
            let code = u16::from(part[index]);
            f16::from_bits((code & 0x80) << 8 | (code & 0x7f) << 7).to_f32()
        }
        PartFormat::E5M2 => f16::from_bits(u16::from(part[index]) << 8).to_f32(),
    }
}

/// The weights of one key group: their sum, and the maximum they are relative to.
#[derive(Clone, Copy, Default)]
struct GroupSum {
    sum: f32,
    max: f32,
}

impl GroupSum {
    fn new(weights: &[f32], max: f32) -> GroupSum {
        let mut lanes = [0f32; LANES];
        for (token, weight) in weights.iter().enumerate() {
            lanes[token % LANES] += weight;
        }
        GroupSum { sum: reduce_add(lanes), max }
    }

    /// The attention probability of the group.
    fn mass(&self, total: &Part, inverse: f32) -> f32 {
        if self.sum > 0.0 { self.sum * exp(self.max - total.max) * inverse } else { 0.0 }
    }
}

/// One row of one query head. `queries(run)`: the unscaled query of the head, `[head_dim]`. `masses`:
/// one per page, or none.
fn attend<'q>(
    shape: &AttentionShape,
    pages: &[PageRef],
    arena: &[u8],
    head: usize,
    position: u32,
    queries: impl Fn(u8) -> &'q [f32],
    out: &mut [f32],
    masses: &mut [f32],
) {
    let page_shape = shape.page();
    let tokens = page_shape.key_group();
    let groups = page_shape.key_groups();
    let mut total = Part::empty(shape.head_dim);
    let mut sums = vec![GroupSum::default(); pages.len() * groups];
    let mut rest = &mut sums[..];
    for pages in pages.chunk_by(|a, b| a.first / SPLIT_TOKENS == b.first / SPLIT_TOKENS) {
        let mut split = Split::empty(shape.head_dim);
        for page in pages {
            let (sums, others) = rest.split_at_mut(groups);
            rest = others;
            let query: Vec<f32> = queries(page.run).iter().map(|q| q * shape.scale).collect();
            for (index, sum) in sums.iter_mut().enumerate() {
                let first = page.first + (index * tokens) as u32;
                let visible = shape.visible(first, tokens, position);
                if visible.0 >= visible.1 {
                    continue;
                }
                let group = Group {
                    page: &arena[page.byte_offset()..],
                    format: page.format,
                    at: page_shape.head(page.format, head / shape.group_heads()),
                    index,
                    tokens,
                    head_dim: shape.head_dim,
                };
                let mut weights = group.scores(&query);
                if split.weigh(&mut weights, visible) {
                    *sum = GroupSum::new(&weights, split.max);
                    group.accumulate(&weights, visible, &mut split);
                }
            }
        }
        total.merge(&split.close());
    }
    let inverse = if total.sum > 0.0 { 1.0 / total.sum } else { 0.0 };
    for (out, value) in out.iter_mut().zip(&total.values) {
        *out = value * inverse;
    }
    if !masses.is_empty() {
        let of_groups: Vec<f32> = sums.iter().map(|sum| sum.mass(&total, inverse)).collect();
        add_pages(masses, &of_groups, groups);
    }
}

/// [`super::paged_attention`] on the scalar tier, one row of one head at a time.
pub(super) fn run(
    pool: &BarrierPool,
    shape: &AttentionShape,
    sequences: &[SequenceRows<'_>],
    arena: &[u8],
    masses: &mut Masses,
    out: &mut [f32],
) {
    let (heads, dim) = (shape.heads, shape.head_dim);
    let mut rest = out;
    for (index, sequence) in sequences.iter().enumerate() {
        let pages = if sequence.observe { sequence.pages.len() } else { 0 };
        let (mine, others) = rest.split_at_mut(sequence.rows * heads * dim);
        rest = others;
        // Output of a line, then its masses.
        let width = dim + pages;
        let mut lines = vec![0f32; sequence.rows * heads * width];
        for_each_row(pool, sequence.rows * heads, (&mut lines, width), &|line, both| {
            let (out, masses) = both.split_at_mut(dim);
            let position = sequence.first_position + (line / heads) as u32;
            let queries = |run: u8| {
                let start = (usize::from(run) * sequence.rows * heads + line) * dim;
                &sequence.queries[start..start + dim]
            };
            attend(shape, sequence.pages, arena, line % heads, position, queries, out, masses);
        });
        let first = masses.sequences[index].start;
        for (line, both) in lines.chunks_exact(width).enumerate() {
            mine[line * dim..(line + 1) * dim].copy_from_slice(&both[..dim]);
            let kv_head = line % heads / shape.group_heads();
            let row = first + (kv_head * sequence.rows + line / heads) * pages;
            add_pages(&mut masses.values[row..row + pages], &both[dim..], 1);
        }
    }
}
