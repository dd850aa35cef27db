//! Page encoding in plain loops: the specification.

use super::{NotFinite, Run};
use half::f16;
use reef_kv::page::{PageFormat, PageShape};

/// The f16 at byte `at`, as f32.
pub(crate) fn half_at(page: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([page[at], page[at + 1]]).to_f32()
}

fn put_half(page: &mut [u8], at: usize, x: f16) {
    page[at..at + 2].copy_from_slice(&x.to_le_bytes());
}

/// Nearest f16, clamped to its range; NaN stays NaN.
fn to_half(x: f32) -> f16 {
    f16::from_f32(x.clamp(-65504.0, 65504.0))
}

pub(super) fn write_kv(shape: &PageShape, page: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
    let (dim, group) = (shape.head_dim, shape.key_group());
    for head in 0..shape.kv_heads {
        let at = shape.head(PageFormat::F16, head);
        for channel in 0..dim {
            let key = (slot / group * dim + channel) * group + slot % group;
            put_half(page, at.k + 2 * key, to_half(k[head * dim + channel]));
            put_half(page, at.v + 2 * (slot * dim + channel), to_half(v[head * dim + channel]));
        }
    }
}

/// The scale of a row whose values span `range`: nearest f16 of `range / 255`, one up where that
/// would push the top code past 255.5 (only subnormals round so coarsely).
pub(super) fn scale_of(range: f32) -> f16 {
    let nearest = f16::from_f32(range / 255.0);
    if 255.5 * nearest.to_f32() < range {
        return f16::from_bits(nearest.to_bits() + 1);
    }
    nearest
}

pub(super) fn quantize(run: Run, src: &[u8], dst: &mut [u8]) -> Result<(), NotFinite> {
    for row in 0..run.rows {
        let start = row * run.width;
        let values = |i: usize| half_at(src, run.halves + 2 * (start + i));
        if !(0..run.width).all(|i| values(i).is_finite()) {
            return Err(NotFinite);
        }
        let min = (0..run.width).map(values).fold(f32::INFINITY, f32::min);
        let max = (0..run.width).map(values).fold(f32::NEG_INFINITY, f32::max);
        let scale = scale_of(max - min);
        let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
        put_half(dst, run.scales + 2 * row, scale);
        // Adding zero turns -0 into 0: which of the two a minimum is depends on the order of lanes.
        put_half(dst, run.minima + 2 * row, f16::from_f32(min + 0.0));
        for i in 0..run.width {
            let code = ((values(i) - min) * inverse).min(255.0).round_ties_even();
            dst[run.codes + start + i] = code as u8;
        }
    }
    Ok(())
}
