//! Reading whole pages back: the oracle.

use super::fp8::Fp8;
use super::scalar::{half_at, nibble_at, single_at};
use reef_kv::page::{PageFormat, PageShape, PartFormat, VALUE_GROUP};

/// Decodes a whole page to f32: the oracle of tests and of offline tools, not a fast path.
///
/// `keys`, `values`: `[kv_heads][block_size][head_dim]`. Codes decode as [`PartFormat`] says, each in
/// one rounding to f32 (int8 and int4: a fused multiply-add; fp8: one multiplication).
pub fn decode_page(
    shape: &PageShape,
    format: PageFormat,
    page: &[u8],
    keys: &mut [f32],
    values: &mut [f32],
) {
    let (group, dim) = (shape.key_group(), shape.head_dim);
    for head in 0..shape.kv_heads {
        let at = shape.head(format, head);
        let key_part =
            Part { format: format.keys(), at: at.k, scales: at.k_scale, minima: at.k_min };
        let value_part =
            Part { format: format.values(), at: at.v, scales: at.v_scale, minima: at.v_min };
        for token in 0..shape.block_size {
            for channel in 0..dim {
                let out = (head * shape.block_size + token) * dim + channel;
                let key_row = token / group * dim + channel;
                keys[out] = key_part.value(page, key_row * group + token % group, key_row);
                let value_row = token * shape.value_groups() + channel / VALUE_GROUP;
                values[out] = value_part.value(page, token * dim + channel, value_row);
            }
        }
    }
}

/// K or V of a head: byte offsets of its codes, scales and minima.
#[derive(Clone, Copy)]
struct Part {
    format: PartFormat,
    at: usize,
    scales: usize,
    minima: usize,
}

impl Part {
    /// Value number `index`, whose scale and minimum are number `row`.
    fn value(self, page: &[u8], index: usize, row: usize) -> f32 {
        let on_grid = |code: u8| {
            let (scale, min) = (half_at(page, self.scales + 2 * row), self.minima + 2 * row);
            f32::from(code).mul_add(scale, half_at(page, min))
        };
        match self.format {
            PartFormat::F16 => half_at(page, self.at + 2 * index),
            PartFormat::U8 => on_grid(page[self.at + index]),
            PartFormat::U4 => on_grid(17 * nibble_at(page, self.at, index)),
            PartFormat::E4M3 => {
                single_at(page, self.scales) * Fp8::E4M3.decode(page[self.at + index])
            }
            PartFormat::E5M2 => {
                single_at(page, self.scales) * Fp8::E5M2.decode(page[self.at + index])
            }
        }
    }
}
