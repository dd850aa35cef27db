//! A way in for attention that no page holds: reference algorithms in measurements.

use reef_kernels::attention::AttentionShape;

/// New tokens of one sequence in one layer, keys and queries already rotated to their positions.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceRows<'a> {
    /// KV group.
    pub group: usize,
    /// Layer, counted in its group.
    pub layer: usize,
    /// Geometry.
    pub shape: &'a AttentionShape,
    /// Position of the first row; 0 begins a new sequence.
    pub first_position: usize,
    /// Queries, `[rows][heads * head_dim]`.
    pub queries: &'a [f32],
    /// Keys and values, rows `stride` apart that begin with `[kv_heads * head_dim]` keys, then as many
    /// values.
    pub keys_values: &'a [f32],
    /// Elements from one row of `keys_values` to the next.
    pub stride: usize,
}

impl ReferenceRows<'_> {
    /// Keys and values of row `row`, `[kv_heads * head_dim]` each.
    pub fn key_value(&self, row: usize) -> (&[f32], &[f32]) {
        let width = self.shape.kv_heads * self.shape.head_dim;
        self.keys_values[row * self.stride..][..2 * width].split_at(width)
    }
}

/// Attention by a reference algorithm, in place of that over pages.
pub trait ReferenceAttention: Send {
    /// Writes the attention of `rows`, `[rows][heads * head_dim]`, to `out`.
    fn attend(&mut self, rows: &ReferenceRows<'_>, out: &mut [f32]);
}
