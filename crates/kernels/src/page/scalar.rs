//! Page encoding in plain loops: the specification.

use super::NotFinite;
use super::distinct::KeyGroups;
use super::fp8::Fp8;
use super::reencode::{Run, Source};
use crate::scalar::reduce_add;
use crate::simd::LANES;
use half::f16;
use reef_kv::page::{PageFormat, PageShape, PartFormat};

/// The f16 at byte `at`, as f32.
pub(crate) fn half_at(page: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([page[at], page[at + 1]]).to_f32()
}

fn put_half(page: &mut [u8], at: usize, x: f16) {
    page[at..at + 2].copy_from_slice(&x.to_le_bytes());
}

/// The f32 at byte `at`.
pub(crate) fn single_at(page: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]])
}

/// Byte (from the start of the part) and shift of 4-bit code `index`: sixteen codes are a vector, and
/// vectors `2i` and `2i + 1` share sixteen bytes, the first in the low nibbles.
fn nibble_place(index: usize) -> (usize, u32) {
    (index / 32 * 16 + index % 16, if index % 32 < 16 { 0 } else { 4 })
}

/// 4-bit code `index` of the part at byte `part`.
pub(crate) fn nibble_at(page: &[u8], part: usize, index: usize) -> u8 {
    let (byte, shift) = nibble_place(index);
    page[part + byte] >> shift & 15
}

/// Sets 4-bit code `index`, which is 0.
fn put_nibble(page: &mut [u8], part: usize, index: usize, code: u8) {
    let (byte, shift) = nibble_place(index);
    page[part + byte] |= code << shift;
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

/// `round(code / 17)` of an 8-bit code: the same value on the grid seventeen times as coarse, with no
/// tie ever, for 17 is odd (PM-KVQ's shrinking, decision 0007).
pub(super) fn shrunk(code: u8) -> u8 {
    ((15 * u16::from(code) + 135) >> 8) as u8
}

/// Value `index` of the source part. Values of 8-bit floats are rounded to f16, so that what follows
/// is what an f16 page of the decoded values would give.
fn source_value(source: Source, page: &[u8], index: usize) -> f32 {
    match source {
        Source::Halves { at } => half_at(page, at + 2 * index),
        Source::Floats8 { at, format, scale } => {
            f16::from_f32(format.decode(page[at + index]) * scale).to_f32()
        }
    }
}

/// 4-bit parts of `dst` are zeroed before.
pub(super) fn quantize(run: Run, src: &[u8], dst: &mut [u8]) -> Result<(), NotFinite> {
    for row in 0..run.rows {
        let first = run.first + row * run.stride;
        let values = |i: usize| source_value(run.source, src, first + i);
        if !(0..run.width).all(|i| values(i).is_finite()) {
            return Err(NotFinite);
        }
        let min = (0..run.width).map(values).fold(f32::INFINITY, f32::min);
        let max = (0..run.width).map(values).fold(f32::NEG_INFINITY, f32::max);
        // Adding zero turns -0 into 0: which zero is least or greatest depends on the order of lanes.
        let (scale, min) = (scale_of(max - min + 0.0), min + 0.0);
        let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
        put_half(dst, run.scales + 2 * row * run.scale_stride, scale);
        put_half(dst, run.minima + 2 * row * run.scale_stride, f16::from_f32(min));
        for i in 0..run.width {
            let code = ((values(i) - min) * inverse).min(255.0).round_ties_even() as u8;
            match run.target {
                PartFormat::U4 => put_nibble(dst, run.codes, first + i, shrunk(code)),
                _ => dst[run.codes + first + i] = code,
            }
        }
    }
    Ok(())
}

/// 8-bit codes to 4-bit codes; `source` is twice as long as `target` and a multiple of 32.
pub(super) fn shrink(source: &[u8], target: &mut [u8]) {
    for (codes, pairs) in source.chunks_exact(32).zip(target.chunks_exact_mut(16)) {
        let (low, high) = codes.split_at(16);
        for ((pair, low), high) in pairs.iter_mut().zip(low).zip(high) {
            *pair = shrunk(*low) | shrunk(*high) << 4;
        }
    }
}

/// f16 values to 8-bit floats of `value / scale`; returns the scale, `absmax / largest`.
pub(super) fn to_floats8(format: Fp8, source: &[u8], target: &mut [u8]) -> Result<f32, NotFinite> {
    let value = |i: usize| half_at(source, 2 * i);
    if !(0..target.len()).all(|i| value(i).is_finite()) {
        return Err(NotFinite);
    }
    let (scale, inverse) =
        float8_scale(format, (0..target.len()).map(value).map(f32::abs).fold(0.0, f32::max));
    for (i, code) in target.iter_mut().enumerate() {
        *code = format.encode(value(i) * inverse);
    }
    Ok(scale)
}

/// Scale of a part whose largest magnitude is `absmax`, and what to multiply its values with.
pub(super) fn float8_scale(format: Fp8, absmax: f32) -> (f32, f32) {
    if absmax == 0.0 {
        return (0.0, 0.0);
    }
    (absmax / format.largest(), format.largest() / absmax)
}

/// `1 / |key|` of every token of a head's keys; see [`super::key_distinctness`].
pub(super) fn inverse_norms(keys: KeyGroups<'_>, inverse: &mut [f32]) {
    for (token, inverse) in inverse.iter_mut().enumerate() {
        let squares = (0..keys.head_dim).fold(0.0, |sum: f32, channel| {
            let key = half_at(keys.bytes, 2 * keys.index(token, channel));
            key.mul_add(key, sum)
        });
        *inverse = inverse_norm(squares);
    }
}

/// `1 / sqrt(squares)`, 0 for a key of zeros, which has no direction.
pub(super) fn inverse_norm(squares: f32) -> f32 {
    if squares == 0.0 { 0.0 } else { 1.0 / squares.sqrt() }
}

/// Sum of `key * inverse` over all tokens, for sixteen channels from `first`; the token is the lane.
pub(super) fn unit_sums(keys: KeyGroups<'_>, first: usize, inverse: &[f32]) -> [f32; LANES] {
    std::array::from_fn(|channel| {
        let mut lanes = [0f32; LANES];
        for (token, inverse) in inverse.iter().enumerate() {
            let key = half_at(keys.bytes, 2 * keys.index(token, first + channel));
            lanes[token % LANES] = key.mul_add(*inverse, lanes[token % LANES]);
        }
        reduce_add(lanes)
    })
}
