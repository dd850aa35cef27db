//! One forward pass over a batch: the verbs that architectures are written in, and their buffers.

use super::masses::Masses;
use super::parts::{FeedForward, Norm, Projection};
use crate::linear::Linear;
use crate::reference_attention::{ReferenceAttention, ReferenceRows};
use crate::rope::Rope;
use crate::runner::{BatchSequence, Compute, KeyRotation};
use reef_kernels::attention::{self, AttentionScratch, AttentionShape, SequenceRows};
use reef_kernels::dispatch::Tier;
use reef_kernels::matmul::QuantizedRows;
use reef_kernels::ops;
use reef_kernels::page::store::{NewTokens, store_tokens};
use reef_kernels::pool::BarrierPool;
use reef_kernels::rows::{for_each_light_row, for_each_row, for_each_row_pair};
use reef_kv::arena::Arena;

/// Shapes that the verbs need, fixed per model.
#[derive(Clone, Debug)]
pub struct PassShape {
    /// Width of the residual stream.
    pub width: usize,
    /// Width of the feed-forward hidden layer.
    pub hidden: usize,
    /// Attention geometry per KV group.
    pub groups: Vec<GroupShape>,
    /// Epsilon of RMS norms.
    pub norm_epsilon: f32,
}

/// Attention geometry of one KV group.
#[derive(Clone, Debug)]
pub struct GroupShape {
    /// Layers of the group.
    pub layers: usize,
    /// Heads, window and scale.
    pub attention: AttentionShape,
    /// Rope of these layers.
    pub rope: Rope,
    /// What follows the rope.
    pub key_rotation: KeyRotation,
}

impl GroupShape {
    /// Turns the query or key heads of a row by the angles of a position.
    fn rotate(&self, tier: Tier, heads: &mut [f32], angles: &[f32]) {
        let (cos, sin) = angles.split_at(self.rope.dim / 2);
        let head_dim = self.attention.head_dim;
        for head in heads.chunks_exact_mut(head_dim) {
            ops::rope(tier, self.rope.style, head, cos, sin);
        }
        if self.key_rotation == KeyRotation::Hadamard {
            ops::hadamard(tier, heads, head_dim);
        }
    }
}

/// Buffers of a pass, kept between passes; they grow to the largest batch seen.
#[derive(Default)]
pub struct Buffers {
    /// Residual stream, `[rows][width]`.
    pub x: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    queries: Vec<f32>,
    attended: Vec<f32>,
    hidden: Vec<f32>,
    gated: Vec<f32>,
    delta: Vec<f32>,
    codes: QuantizedRows,
    /// Per KV group: angles of every (sequence, run, row), `[..][rope dim]`.
    angles: Vec<Vec<f32>>,
    scratch: AttentionScratch,
    /// Attention masses of the sequences that were to be observed.
    pub masses: Masses,
}

/// One forward pass over a batch.
pub struct Pass<'a> {
    pub(super) compute: &'a Compute,
    pub(super) shape: &'a PassShape,
    batch: &'a [BatchSequence<'a>],
    arena: &'a Arena,
    pub(super) buffers: &'a mut Buffers,
    reference: Option<&'a mut dyn ReferenceAttention>,
    rows: usize,
}

impl<'a> Pass<'a> {
    /// Sizes the buffers for `batch` and computes the angles of its positions. `reference`, where given,
    /// attends in place of the pages.
    pub fn new(
        compute: &'a Compute,
        shape: &'a PassShape,
        batch: &'a [BatchSequence<'a>],
        arena: &'a Arena,
        buffers: &'a mut Buffers,
        reference: Option<&'a mut dyn ReferenceAttention>,
    ) -> Pass<'a> {
        let rows = batch.iter().map(|sequence| sequence.tokens.len()).sum();
        let attention = &shape.groups[0].attention;
        let heads_width = attention.heads * attention.head_dim;
        let kv_width = attention.kv_heads * attention.head_dim;
        grow(&mut buffers.x, rows * shape.width);
        grow(&mut buffers.normed, rows * shape.width);
        grow(&mut buffers.delta, rows * shape.width);
        grow(&mut buffers.qkv, rows * (heads_width + 2 * kv_width));
        grow(&mut buffers.attended, rows * heads_width);
        grow(&mut buffers.hidden, rows * 2 * shape.hidden);
        grow(&mut buffers.gated, rows * shape.hidden);
        buffers.masses.begin(batch.len(), shape.groups.iter().map(|group| group.layers));
        let mut pass = Pass { compute, shape, batch, arena, buffers, reference, rows };
        pass.prepare_angles();
        pass
    }

    fn prepare_angles(&mut self) {
        self.buffers.angles.resize_with(self.shape.groups.len(), Vec::new);
        let angles = self.buffers.angles.iter_mut();
        for (g, (group, angles)) in self.shape.groups.iter().zip(angles).enumerate() {
            let len = group.rope.angle_len();
            angles.clear();
            for sequence in self.batch {
                for shift in &sequence.view.groups[g].shifts {
                    for row in 0..sequence.tokens.len() as u32 {
                        let start = angles.len();
                        angles.resize(start + len, 0.0);
                        let position = sequence.first_position + row - shift;
                        group.rope.angles(position, &mut angles[start..]);
                    }
                }
            }
        }
    }

    /// x = embedding of the tokens, times `scale`.
    pub fn embed(&mut self, table: &Linear, scale: f32) {
        let width = self.shape.width;
        let tokens: Vec<u32> = self.batch.iter().flat_map(|s| s.tokens).copied().collect();
        let x = (&mut self.buffers.x[..], width);
        for_each_row(&self.compute.pool, self.rows, x, &|row, out| {
            table.row(tokens[row] as usize, out);
            if scale != 1.0 {
                out.iter_mut().for_each(|value| *value *= scale);
            }
        });
    }

    /// normed = RMS norm of x.
    pub fn norm(&mut self, norm: &Norm) {
        let (tier, width, epsilon) = (self.compute.tier, self.shape.width, self.shape.norm_epsilon);
        let x = &self.buffers.x;
        let out = (&mut self.buffers.normed[..], width);
        for_each_light_row(&self.compute.pool, self.rows, out, &|row, out| {
            ops::rms_norm(tier, &x[row * width..][..width], &norm.weight, epsilon, out);
        });
    }

    /// qkv = projections of normed, rows of `[q heads | k heads | v heads]`.
    pub fn project_qkv(&mut self, projection: &Projection) {
        let Buffers { normed, codes, qkv, .. } = &mut *self.buffers;
        projection.qkv.multiply(self.compute, &normed[..self.rows * self.shape.width], codes, qkv);
    }

    /// RMS norm of each query head and each key head (Qwen 3, Gemma 3).
    pub fn norm_heads(&mut self, query: &Norm, key: &Norm) {
        let attention = &self.shape.groups[0].attention;
        let (heads, kv_heads, dim) = (attention.heads, attention.kv_heads, attention.head_dim);
        let stride = (heads + 2 * kv_heads) * dim;
        let (tier, epsilon) = (self.compute.tier, self.shape.norm_epsilon);
        let qkv = (&mut self.buffers.qkv[..], stride);
        for_each_row(&self.compute.pool, self.rows, qkv, &|_, row| {
            for (index, head) in row.chunks_exact_mut(dim).take(heads + kv_heads).enumerate() {
                let norm = if index < heads { query } else { key };
                ops::rms_norm_in_place(tier, head, &norm.weight, epsilon);
            }
        });
    }

    /// Rotates Q and K, writes K and V into the pages, attends: attended = attention of layer `index`
    /// of KV group `group`. Attention always reads K and V back from pages. Keeps the masses of observed
    /// sequences, but not in window groups: what leaves a window is not for a policy to choose.
    pub fn attend(&mut self, group: usize, index: usize) {
        self.rotate_and_store(group, index);
        if self.reference.is_some() {
            return self.attend_by_reference(group, index);
        }
        let attention = &self.shape.groups[group].attention;
        let width = attention.heads * attention.head_dim;
        let Buffers { queries, attended, scratch, masses, .. } = &mut *self.buffers;
        let full = attention.window.is_none();
        let mut rest = &queries[..];
        let sequences: Vec<SequenceRows<'_>> = self
            .batch
            .iter()
            .map(|sequence| {
                let view = &sequence.view.groups[group];
                let rows = sequence.tokens.len();
                let (queries, tail) = rest.split_at(view.runs[index].len() * rows * width);
                rest = tail;
                SequenceRows {
                    pages: &view.layers[index],
                    first_position: sequence.first_position,
                    rows,
                    queries,
                    observe: sequence.observe && full,
                }
            })
            .collect();
        attention::paged_attention(
            self.compute.tier,
            &self.compute.pool,
            attention,
            &sequences,
            self.arena.bytes(),
            scratch,
            &mut attended[..self.rows * width],
        );
        for (place, _) in sequences.iter().enumerate().filter(|(_, rows)| rows.observe) {
            masses.keep(place, group, index, scratch.masses(place));
        }
    }

    /// Hands each sequence to the reference, with its queries at their original positions.
    fn attend_by_reference(&mut self, group: usize, layer: usize) {
        let shape = &self.shape.groups[group].attention;
        let (width, kv_width) = (shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim);
        let Buffers { queries, attended, qkv, .. } = &mut *self.buffers;
        let Some(reference) = &mut self.reference else { return };
        let (mut queries, mut first_row) = (&queries[..], 0);
        for sequence in self.batch {
            let rows = sequence.tokens.len();
            let runs = sequence.view.groups[group].runs[layer].len();
            let (of_sequence, rest) = queries.split_at(runs * rows * width);
            queries = rest;
            let rows_in = ReferenceRows {
                group,
                layer,
                shape,
                first_position: sequence.first_position as usize,
                // The last run's shift is 0.
                queries: &of_sequence[(runs - 1) * rows * width..],
                keys_values: &qkv[first_row * (width + kv_width) + width..],
                stride: width + kv_width,
            };
            reference.attend(&rows_in, &mut attended[first_row * width..][..rows * width]);
            first_row += rows;
        }
    }

    fn rotate_and_store(&mut self, group: usize, index: usize) {
        let shape = &self.shape.groups[group];
        let page_shape = shape.attention.page();
        let heads_width = shape.attention.heads * shape.attention.head_dim;
        let kv_width = shape.attention.kv_heads * shape.attention.head_dim;
        let stride = heads_width + 2 * kv_width;
        let runs = |s: &BatchSequence<'_>| s.view.groups[group].runs[index].len() * s.tokens.len();
        let runs_rows: usize = self.batch.iter().map(runs).sum();
        grow(&mut self.buffers.queries, runs_rows * heads_width);
        let Buffers { qkv, queries, angles, .. } = &mut *self.buffers;
        let (mut angles, mut queries, mut qkv) =
            (&angles[group][..], &mut queries[..], &mut qkv[..]);
        let (tier, pool) = (self.compute.tier, &self.compute.pool);
        let len = shape.rope.angle_len();
        for sequence in self.batch {
            let view = &sequence.view.groups[group];
            let (rows, shifts, runs) =
                (sequence.tokens.len(), view.shifts.len(), &view.runs[index]);
            let (sequence_angles, rest) = angles.split_at(shifts * rows * len);
            angles = rest;
            let (sequence_queries, rest) = queries.split_at_mut(runs.len() * rows * heads_width);
            queries = rest;
            let (sequence_qkv, rest) = qkv.split_at_mut(rows * stride);
            qkv = rest;
            rotate_queries(
                tier,
                pool,
                shape,
                (rows, runs),
                sequence_qkv,
                sequence_angles,
                sequence_queries,
            );
            let key_angles = &sequence_angles[(shifts - 1) * rows * len..];
            for_each_row(pool, rows, (&mut sequence_qkv[..], stride), &|row, values| {
                let angles = &key_angles[row * len..][..len];
                let keys = &mut values[heads_width..][..kv_width];
                shape.rotate(tier, keys, angles);
            });
            let tokens = NewTokens {
                first_position: sequence.first_position,
                rows,
                stride,
                keys: &sequence_qkv[heads_width..],
                values: &sequence_qkv[heads_width + kv_width..],
            };
            store_tokens(tier, pool, &page_shape, self.arena, &view.layers[index], &tokens);
        }
    }

    /// delta = output projection of attended.
    pub fn project_attended(&mut self, projection: &Projection) {
        let Buffers { attended, codes, delta, .. } = &mut *self.buffers;
        let len = self.rows * projection.output.columns();
        projection.output.multiply(self.compute, &attended[..len], codes, delta);
    }

    /// gated = activation(gate normed) * (up normed); delta = down gated.
    pub fn feed_forward(&mut self, layer: &FeedForward, activation: Activation) {
        let (rows, hidden) = (self.rows, self.shape.hidden);
        let Buffers { normed, codes, hidden: gate_and_up, gated, delta, .. } = &mut *self.buffers;
        layer.gate_up.multiply(
            self.compute,
            &normed[..rows * self.shape.width],
            codes,
            gate_and_up,
        );
        let tier = self.compute.tier;
        let (input, out) = ((&mut gate_and_up[..], 2 * hidden), (&mut gated[..], hidden));
        for_each_row_pair(&self.compute.pool, rows, input, out, &|_, input, out| {
            let (gate, up) = input.split_at(hidden);
            match activation {
                Activation::Silu => ops::silu_mul(tier, gate, up, out),
                Activation::GeluTanh => ops::gelu_tanh_mul(tier, gate, up, out),
            }
        });
        layer.down.multiply(self.compute, &gated[..rows * hidden], codes, delta);
    }

    /// delta = RMS norm of delta (Gemma's post-norms).
    pub fn norm_delta(&mut self, norm: &Norm) {
        let (tier, epsilon) = (self.compute.tier, self.shape.norm_epsilon);
        let delta = (&mut self.buffers.delta[..], self.shape.width);
        for_each_light_row(&self.compute.pool, self.rows, delta, &|_, row| {
            ops::rms_norm_in_place(tier, row, &norm.weight, epsilon);
        });
    }

    /// x += delta.
    pub fn add_delta(&mut self) {
        let width = self.shape.width;
        let (tier, delta) = (self.compute.tier, &self.buffers.delta);
        let x = (&mut self.buffers.x[..], width);
        for_each_light_row(&self.compute.pool, self.rows, x, &|row, x| {
            ops::add(tier, x, &delta[row * width..][..width]);
        });
    }
}

/// Non-linearity of the gated feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// Writes `queries[run][row]` = the row's query heads rotated by `angles[runs[run]][row]`.
fn rotate_queries(
    tier: Tier,
    pool: &BarrierPool,
    shape: &GroupShape,
    (rows, runs): (usize, &[u32]),
    qkv: &[f32],
    angles: &[f32],
    queries: &mut [f32],
) {
    let width = shape.attention.heads * shape.attention.head_dim;
    let stride = qkv.len() / rows;
    let (runs_rows, len) = (queries.len() / width, shape.rope.angle_len());
    for_each_row(pool, runs_rows, (queries, width), &|run_row, out| {
        let (run, row) = (run_row / rows, run_row % rows);
        out.copy_from_slice(&qkv[row * stride..][..width]);
        let angles = &angles[(runs[run] as usize * rows + row) * len..][..len];
        shape.rotate(tier, out, angles);
    });
}

fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}
