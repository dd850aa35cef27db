//! Writing tokens into pages, and re-encoding sealed pages into a smaller format.
//!
//! The layout is that of [`reef_kv::page`]: K channel-major inside key groups, V token-major. Int8 is
//! asymmetric, `value = min + scale * code`, with f16 scales and minima: K per channel over a key
//! group, V per token over 32 channels (KIVI, arXiv 2402.02750).

pub(crate) mod scalar;
pub mod store;
#[cfg(target_arch = "x86_64")]
mod vector;

use crate::dispatch::Tier;
use reef_kv::page::{PageFormat, PageShape, VALUE_GROUP};

/// A page holds a NaN or an infinity and cannot be quantised: it stays in the format it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFinite;

impl std::fmt::Display for NotFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("page: holds NaN or infinity, which has no 8-bit code; keep the block in f16")
    }
}

impl std::error::Error for NotFinite {}

/// Writes the K and V of one token into slot `slot` of an f16 page.
///
/// `page`: the bytes of an f16 page of `shape`. `k`, `v`: `[kv_heads * head_dim]`, K already rotated.
/// Values round to nearest even and are clamped to ±65504, the range of f16; NaN stays NaN.
pub fn write_kv(tier: Tier, shape: &PageShape, page: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
    let channels = shape.kv_heads * shape.head_dim;
    assert!(page.len() >= shape.page_bytes(PageFormat::F16), "write_kv: page too short");
    assert!(slot < shape.block_size, "write_kv: slot {slot} outside the block");
    assert!(k.len() == channels && v.len() == channels, "write_kv: k, v need {channels} channels");
    assert!(shape.head_dim.is_multiple_of(16), "write_kv: head_dim not a multiple of 16");
    match tier {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the tier is one of this CPU's; lengths are checked above.
        Tier::Avx512 => unsafe { vector::write_kv_avx512(shape, page, slot, k, v) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the same.
        Tier::Avx2 => unsafe { vector::write_kv_avx2(shape, page, slot, k, v) },
        _ => scalar::write_kv(shape, page, slot, k, v),
    }
}

/// Re-encodes a sealed page (every slot written) from one format into a less precise one.
///
/// `src`: the bytes of a page in format `from`; `dst`: those of a page in format `to`, all of which
/// are written but alignment gaps. f16 → int8: `scale = (max - min) / 255` rounded to f16 (up, where
/// the nearest subnormal is so small that the top code would pass 255), `min` exact, codes nearest
/// even of `(value - min) / scale`. `max = min` gives scale 0 and codes 0.
///
/// # Errors
/// [`NotFinite`] if any value is NaN or infinite; `dst` is then garbage and the caller keeps `src`.
pub fn reencode(
    tier: Tier,
    shape: &PageShape,
    from: PageFormat,
    to: PageFormat,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), NotFinite> {
    assert!(src.len() >= shape.page_bytes(from), "reencode: source page too short");
    assert!(dst.len() >= shape.page_bytes(to), "reencode: destination page too short");
    assert!(
        shape.head_dim.is_multiple_of(16) && shape.block_size.is_multiple_of(16),
        "reencode: head_dim or block_size not a multiple of 16"
    );
    if from == to {
        let bytes = shape.page_bytes(from);
        dst[..bytes].copy_from_slice(&src[..bytes]);
        return Ok(());
    }
    assert!(
        from == PageFormat::F16 && to == PageFormat::Int8,
        "reencode: {} to {} would need bits that are gone",
        from.name(),
        to.name()
    );
    for_each_run(shape, |run| quantize_run(tier, run, src, dst))
}

/// Rows of equal length that lie one after the other: each row gets one scale and one minimum.
#[derive(Clone, Copy)]
struct Run {
    /// Values of a row: 16 or 32.
    width: usize,
    /// Rows of the run.
    rows: usize,
    /// Byte offset of the f16 values in the source page.
    halves: usize,
    /// Byte offset of the codes in the int8 page.
    codes: usize,
    /// Byte offset of the scales in the int8 page.
    scales: usize,
    /// Byte offset of the minima in the int8 page.
    minima: usize,
}

/// K rows are the channels of a key group; V rows the value groups of a token. Where `head_dim` is an
/// odd multiple of 16 the last V row of a token is short, and each token makes two runs.
fn for_each_run(
    shape: &PageShape,
    mut quantize: impl FnMut(Run) -> Result<(), NotFinite>,
) -> Result<(), NotFinite> {
    for head in 0..shape.kv_heads {
        let from = shape.head(PageFormat::F16, head);
        let to = shape.head(PageFormat::Int8, head);
        quantize(Run {
            width: shape.key_group(),
            rows: shape.key_groups() * shape.head_dim,
            halves: from.k,
            codes: to.k,
            scales: to.k_scale,
            minima: to.k_min,
        })?;
        let groups = shape.value_groups();
        let full = Run {
            width: VALUE_GROUP,
            rows: shape.block_size * groups,
            halves: from.v,
            codes: to.v,
            scales: to.v_scale,
            minima: to.v_min,
        };
        if shape.head_dim.is_multiple_of(VALUE_GROUP) {
            quantize(full)?;
            continue;
        }
        for token in 0..shape.block_size {
            let at = |first: usize| Run {
                halves: from.v + 2 * (token * shape.head_dim + first * VALUE_GROUP),
                codes: to.v + token * shape.head_dim + first * VALUE_GROUP,
                scales: to.v_scale + 2 * (token * groups + first),
                minima: to.v_min + 2 * (token * groups + first),
                ..full
            };
            quantize(Run { rows: groups - 1, ..at(0) })?;
            quantize(Run { rows: 1, width: VALUE_GROUP / 2, ..at(groups - 1) })?;
        }
    }
    Ok(())
}

fn quantize_run(tier: Tier, run: Run, src: &[u8], dst: &mut [u8]) -> Result<(), NotFinite> {
    let count = run.rows * run.width;
    // The bounds every tier relies on.
    assert!(run.halves + 2 * count <= src.len() && run.codes + count <= dst.len());
    assert!(run.scales + 2 * run.rows <= dst.len() && run.minima + 2 * run.rows <= dst.len());
    match tier {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the tier is one of this CPU's; the bounds are checked above.
        Tier::Avx512 => unsafe { vector::quantize_avx512(run, src, dst) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the same.
        Tier::Avx2 => unsafe { vector::quantize_avx2(run, src, dst) },
        _ => scalar::quantize(run, src, dst),
    }
}

/// Decodes a whole page to f32: the oracle of tests and of offline tools, not a fast path.
///
/// `keys`, `values`: `[kv_heads][block_size][head_dim]`.
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
        for token in 0..shape.block_size {
            for channel in 0..dim {
                let out = (head * shape.block_size + token) * dim + channel;
                let key_row = token / group * dim + channel;
                let key = key_row * group + token % group;
                keys[out] = value(format, page, at.k, key, (at.k_scale, at.k_min), key_row);
                let value_row = token * shape.value_groups() + channel / VALUE_GROUP;
                let index = token * dim + channel;
                values[out] = value(format, page, at.v, index, (at.v_scale, at.v_min), value_row);
            }
        }
    }
}

/// Value `index` of the part at byte `part`, whose row has scale and minimum number `row`.
fn value(
    format: PageFormat,
    page: &[u8],
    part: usize,
    index: usize,
    (scales, minima): (usize, usize),
    row: usize,
) -> f32 {
    match format {
        PageFormat::F16 => scalar::half_at(page, part + 2 * index),
        _ => {
            let scale = scalar::half_at(page, scales + 2 * row);
            let min = scalar::half_at(page, minima + 2 * row);
            f32::from(page[part + index]).mul_add(scale, min)
        }
    }
}
