//! H2O as its paper has it (arXiv 2306.14048, algorithm 1): per head and per token, in plain f32. What
//! the block-wise, per-layer policy `h2o` is measured against.
//!
//! Half of the budget are the heavy hitters, half the most recent tokens. A token's score is the sum of
//! the attention probabilities that all queries since paid to it; when a head is over its budget, the
//! token with the lowest score that is not recent goes, for good. Where several query heads share a KV
//! head, their probabilities are added: a cache cannot drop a key for one of them alone.

use reef_model::reference_attention::{ReferenceAttention, ReferenceRows};

/// What one KV head of one layer holds.
#[derive(Clone, Debug, Default)]
struct Head {
    positions: Vec<usize>,
    scores: Vec<f32>,
    /// `[tokens][head_dim]`.
    keys: Vec<f32>,
    /// `[tokens][head_dim]`.
    values: Vec<f32>,
}

/// The algorithm and what it holds.
#[derive(Debug)]
pub struct H2oReference {
    budget_tokens: usize,
    /// `[group][layer][kv head]`, grown as they appear.
    heads: Vec<Vec<Vec<Head>>>,
    probabilities: Vec<f32>,
}

impl H2oReference {
    /// Keeps at most `budget_tokens` tokens per head of full-attention layers. Layers with a window
    /// keep their window.
    pub fn new(budget_tokens: usize) -> H2oReference {
        H2oReference { budget_tokens, heads: Vec::new(), probabilities: Vec::new() }
    }

    fn heads_of(&mut self, rows: &ReferenceRows<'_>) -> Vec<Head> {
        let grown = |len: usize, index: usize| len.max(index + 1);
        let groups = grown(self.heads.len(), rows.group);
        self.heads.resize(groups, Vec::new());
        let layers = &mut self.heads[rows.group];
        layers.resize(grown(layers.len(), rows.layer), Vec::new());
        let mut heads = std::mem::take(&mut layers[rows.layer]);
        if rows.first_position == 0 || heads.len() != rows.shape.kv_heads {
            heads = vec![Head::default(); rows.shape.kv_heads];
        }
        heads
    }
}

impl ReferenceAttention for H2oReference {
    fn attend(&mut self, rows: &ReferenceRows<'_>, out: &mut [f32]) {
        let mut heads = self.heads_of(rows);
        let dim = rows.shape.head_dim;
        let width = rows.shape.heads * dim;
        let shared = rows.shape.group_heads();
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let position = rows.first_position + row;
            let (keys, values) = rows.key_value(row);
            let queries = &rows.queries[row * width..][..width];
            for (number, head) in heads.iter_mut().enumerate() {
                head.push(position, &keys[number * dim..][..dim], &values[number * dim..][..dim]);
                if let Some(window) = rows.shape.window {
                    head.leave_window(position, window, dim);
                }
                for query in number * shared..(number + 1) * shared {
                    let at = query * dim..(query + 1) * dim;
                    let (query, out) = (&queries[at.clone()], &mut out[at]);
                    head.attend(query, rows.shape.scale, &mut self.probabilities, out);
                }
                if rows.shape.window.is_none() && head.positions.len() > self.budget_tokens {
                    head.evict(position, self.budget_tokens / 2, dim);
                }
            }
        }
        self.heads[rows.group][rows.layer] = heads;
    }
}

impl Head {
    fn push(&mut self, position: usize, key: &[f32], value: &[f32]) {
        self.positions.push(position);
        self.scores.push(0.0);
        self.keys.extend_from_slice(key);
        self.values.extend_from_slice(value);
    }

    /// `out` = softmax(scale * query . keys) values; the probabilities are added to the scores.
    fn attend(&mut self, query: &[f32], scale: f32, weights: &mut Vec<f32>, out: &mut [f32]) {
        let dim = query.len();
        weights.clear();
        weights.extend(self.keys.chunks_exact(dim).map(|key| scale * dot(query, key)));
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|weight| *weight = (*weight - largest).exp());
        let sum: f32 = weights.iter().sum();
        out.fill(0.0);
        let rows = weights.iter().zip(self.values.chunks_exact(dim)).zip(&mut self.scores);
        for ((weight, value), score) in rows {
            let probability = weight / sum;
            *score += probability;
            out.iter_mut().zip(value).for_each(|(out, value)| *out += probability * value);
        }
    }

    /// Drops the lowest score among all but the last `recent` positions before and at `position`.
    fn evict(&mut self, position: usize, recent: usize, dim: usize) {
        let old = |index: &usize| self.positions[*index] + recent <= position;
        let candidates = (0..self.positions.len()).filter(old);
        let lowest = candidates.min_by(|a, b| self.scores[*a].total_cmp(&self.scores[*b]));
        if let Some(lowest) = lowest {
            self.remove(lowest, dim);
        }
    }

    fn leave_window(&mut self, position: usize, window: usize, dim: usize) {
        while let Some(out) = self.positions.iter().position(|held| held + window <= position) {
            self.remove(out, dim);
        }
    }

    /// The last token takes the place of the one that goes: order means nothing here.
    fn remove(&mut self, index: usize, dim: usize) {
        self.positions.swap_remove(index);
        self.scores.swap_remove(index);
        let last = self.positions.len();
        for values in [&mut self.keys, &mut self.values] {
            values.copy_within(last * dim.., index * dim);
            values.truncate(last * dim);
        }
    }
}

/// Sixteen sums side by side, so that it runs in vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    for (a, b) in a.chunks_exact(16).zip(b.chunks_exact(16)) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use reef_kernels::attention::AttentionShape;

    const DIM: usize = 16;

    fn shape(window: Option<usize>) -> AttentionShape {
        AttentionShape { heads: 2, kv_heads: 1, head_dim: DIM, block_size: 32, scale: 1.0, window }
    }

    /// One token whose query looks for `wanted` and whose key is `key`; its value is its position.
    fn step(
        h2o: &mut H2oReference,
        shape: &AttentionShape,
        position: usize,
        key: f32,
        wanted: f32,
    ) -> f32 {
        let queries: Vec<f32> =
            (0..2 * DIM).map(|i| if i % DIM == 0 { wanted } else { 0.0 }).collect();
        let mut keys_values = vec![0.0; 2 * DIM];
        (keys_values[0], keys_values[DIM]) = (key, position as f32);
        let rows = ReferenceRows {
            group: 0,
            layer: 0,
            shape,
            first_position: position,
            queries: &queries,
            keys_values: &keys_values,
            stride: 2 * DIM,
        };
        let mut out = vec![0.0; 2 * DIM];
        h2o.attend(&rows, &mut out);
        out[0]
    }

    fn held(h2o: &H2oReference) -> Vec<usize> {
        let mut positions = h2o.heads[0][0][0].positions.clone();
        positions.sort_unstable();
        positions
    }

    #[test]
    fn the_heavy_hitter_and_the_recent_stay() {
        let mut h2o = H2oReference::new(4);
        let shape = shape(None);
        // Token 1 draws all attention: its key is 10 where the others' are 0.
        for position in 0..12 {
            let key = if position == 1 { 10.0 } else { 0.0 };
            let seen = step(&mut h2o, &shape, position, key, 1.0);
            if position > 1 {
                assert!((seen - 1.0).abs() < 0.02, "token 1's value is seen: {seen}");
            }
        }
        let kept = held(&h2o);
        assert_eq!(kept.len(), 4);
        assert!(kept.contains(&1) && kept.contains(&10) && kept.contains(&11), "{kept:?}");
    }

    #[test]
    fn a_new_sequence_begins_empty_and_windows_slide() {
        let mut h2o = H2oReference::new(64);
        let shape = shape(Some(3));
        for position in 0..8 {
            step(&mut h2o, &shape, position, 0.0, 0.0);
        }
        assert_eq!(held(&h2o), [5, 6, 7]);
        let alone = step(&mut h2o, &shape, 0, 0.0, 0.0);
        assert_eq!((held(&h2o), alone), (vec![0], 0.0));
    }

    #[test]
    fn equal_keys_are_averaged() {
        let mut h2o = H2oReference::new(64);
        let shape = shape(None);
        let seen: Vec<f32> =
            (0..4).map(|position| step(&mut h2o, &shape, position, 1.0, 2.0)).collect();
        assert_eq!(seen, [0.0, 0.5, 1.0, 1.5]);
    }
}
