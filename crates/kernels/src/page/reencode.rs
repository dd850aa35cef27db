//! Sealed pages into a smaller format: K and V of each head, a part at a time.

use super::fp8::Fp8;
use super::scalar;
#[cfg(target_arch = "x86_64")]
use super::vector;
use crate::dispatch::Tier;
use reef_kv::page::{
    HeadLayout, PAGE_ALIGN, PageFormat, PageShape, PartFormat, Scaling, VALUE_GROUP,
};

/// A page holds a NaN or an infinity and cannot be quantised: it stays in the format it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFinite;

impl std::fmt::Display for NotFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("page: holds NaN or infinity, which has no 8-bit code; keep the block in f16")
    }
}

impl std::error::Error for NotFinite {}

/// Re-encodes a sealed page (every slot written) from one format into a less precise one.
///
/// `src`: the bytes of a page in format `from`; `dst`: those of a page in format `to`, all of which
/// are written (gaps between parts with zeros), so that equal content is equal bytes.
///
/// - f16 → 8 bits, a row at a time ([`PartFormat::U8`]): `scale = (max - min) / 255` rounded to f16
///   (up, where the nearest subnormal is so small that the top code would pass 255), `min` exact, codes
///   nearest even of `(value - min) / scale`. `max = min` gives scale 0 and codes 0.
/// - 8 → 4 bits: `(15 * code + 135) >> 8 = round(code / 17)`, scale and minimum kept. f16 → 4 bits is
///   f16 → 8 → 4 bits by definition, so that each way down the ladder ends in the same bytes.
/// - f16 → fp8, a part at a time: `scale = absmax / largest` in f32 (largest: 448 or 57,344), codes
///   nearest even of `value * (largest / absmax)`, saturating ([`Fp8`]).
/// - fp8 → 8 or 4 bits: as f16, from the decoded values rounded to f16.
///
/// Error of a decoded value: half a step. With `scale` as stored in the page that is `scale / 2` for
/// int8; `8.5 * scale` for 4 bits, whose codes are seventeen steps apart; `max(|value| / 16, scale /
/// 1024)` for E4M3 and `max(|value| / 8, scale / 131072)` for E5M2 (half of the last mantissa bit, half
/// of the smallest subnormal). Rounding in f32 adds 2e-4 of that and `2^-23` of the row's largest
/// magnitude at most. The stored scale of int8 and int4 is within `2^-11` of `(max - min) / 255`, or
/// within `2^-24` absolute where it is subnormal.
///
/// # Errors
/// [`NotFinite`] if any value that must be quantised is NaN or infinite; `dst` is then garbage and the
/// caller keeps `src`.
///
/// # Panics
/// If a page is too short for its format, or if `from` can neither stay nor become `to`
/// ([`PageFormat::can_become`]).
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
        from.can_become(to),
        "reencode: {} to {} would need bits that are gone",
        from.name(),
        to.name()
    );
    for head in 0..shape.kv_heads {
        let (source, target) = (shape.head(from, head), shape.head(to, head));
        clear_gaps(shape, to, &target, dst);
        let (source, target) = (parts(shape, from, &source), parts(shape, to, &target));
        reencode_part(tier, &source[0], &target[0], src, dst, std::iter::once(key_rows(shape)))?;
        reencode_part(tier, &source[1], &target[1], src, dst, value_rows(shape))?;
    }
    Ok(())
}

/// K or V of one head in a page: byte offsets and counts.
struct Part {
    format: PartFormat,
    codes: usize,
    /// Values of the part, a multiple of 256.
    values: usize,
    scales: usize,
    minima: usize,
    /// Bytes of the scales, and of the minima, where they are grouped.
    scale_bytes: usize,
}

/// K and V of the head laid out as `at`.
fn parts(shape: &PageShape, format: PageFormat, at: &HeadLayout) -> [Part; 2] {
    let values = shape.block_size * shape.head_dim;
    let keys = Part {
        format: format.keys(),
        codes: at.k,
        values,
        scales: at.k_scale,
        minima: at.k_min,
        scale_bytes: 2 * shape.key_groups() * shape.head_dim,
    };
    let values = Part {
        format: format.values(),
        codes: at.v,
        values,
        scales: at.v_scale,
        minima: at.v_min,
        scale_bytes: 2 * shape.block_size * shape.value_groups(),
    };
    [keys, values]
}

impl Part {
    fn code_range(&self) -> std::ops::Range<usize> {
        self.codes..self.codes + self.values * self.format.bits() / 8
    }
}

/// Zeros between the parts of a head: after scales only, for codes fill whole cache lines.
fn clear_gaps(shape: &PageShape, format: PageFormat, at: &HeadLayout, page: &mut [u8]) {
    if format.keys().scaling() == Scaling::Whole {
        page[at.v_scale + size_of::<f32>()..at.end].fill(0);
        return;
    }
    for part in parts(shape, format, at) {
        for array in [part.scales, part.minima] {
            let end = array + part.scale_bytes;
            page[end..end.next_multiple_of(PAGE_ALIGN)].fill(0);
        }
    }
}

/// Rows of a part, one stride from each other; a row has one scale and one minimum.
#[derive(Clone, Copy)]
struct Rows {
    /// Index in the part of the first row's first value.
    first: usize,
    /// Values of a row: 16 or 32.
    width: usize,
    /// Values from one row to the next.
    stride: usize,
    rows: usize,
    /// Number of the first row's scale.
    first_scale: usize,
    /// From one row's scale to the next's.
    scale_stride: usize,
}

/// The channels of the key groups.
fn key_rows(shape: &PageShape) -> Rows {
    let width = shape.key_group();
    let rows = shape.key_groups() * shape.head_dim;
    Rows { first: 0, width, stride: width, rows, first_scale: 0, scale_stride: 1 }
}

/// The value groups of the tokens, in one run; where the last group of a token is short (`head_dim` an
/// odd multiple of 16), a run for each group of channels.
fn value_rows(shape: &PageShape) -> impl Iterator<Item = Rows> {
    let (dim, groups, tokens) = (shape.head_dim, shape.value_groups(), shape.block_size);
    let whole = dim.is_multiple_of(VALUE_GROUP);
    (0..if whole { 1 } else { groups }).map(move |group| {
        let first = group * VALUE_GROUP;
        if whole {
            let (width, rows) = (VALUE_GROUP, tokens * groups);
            return Rows { first, width, stride: width, rows, first_scale: 0, scale_stride: 1 };
        }
        let width = VALUE_GROUP.min(dim - first);
        Rows { first, width, stride: dim, rows: tokens, first_scale: group, scale_stride: groups }
    })
}

fn reencode_part(
    tier: Tier,
    source: &Part,
    target: &Part,
    src: &[u8],
    dst: &mut [u8],
    rows: impl Iterator<Item = Rows>,
) -> Result<(), NotFinite> {
    if source.format == target.format {
        copy(tier, &src[source.code_range()], &mut dst[target.code_range()]);
        copy_scales(source, target, src, dst);
        return Ok(());
    }
    if source.format == PartFormat::U8 {
        shrink(tier, &src[source.code_range()], &mut dst[target.code_range()]);
        copy_scales(source, target, src, dst);
        return Ok(());
    }
    if let Some(format) = Fp8::of(target.format) {
        let codes = &mut dst[target.code_range()];
        let scale = to_floats8(tier, format, &src[source.code_range()], codes)?;
        dst[target.scales..target.scales + 4].copy_from_slice(&scale.to_le_bytes());
        return Ok(());
    }
    if target.format == PartFormat::U4 {
        // Two rows may share bytes, so codes are set by "or".
        dst[target.code_range()].fill(0);
    }
    for rows in rows {
        quantize(tier, source, target, rows, src, dst)?;
    }
    Ok(())
}

/// Scales and minima go from 8-bit to 4-bit codes as they are.
fn copy_scales(source: &Part, target: &Part, src: &[u8], dst: &mut [u8]) {
    for (from, to) in [(source.scales, target.scales), (source.minima, target.minima)] {
        dst[to..to + target.scale_bytes].copy_from_slice(&src[from..from + source.scale_bytes]);
    }
}

/// Where the values to quantise are: byte offset of the part, and how it is stored.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// f16.
    Halves { at: usize },
    /// 8-bit floats, `value = scale * code`.
    Floats8 { at: usize, format: Fp8, scale: f32 },
}

/// Rows to quantise into 8-bit or 4-bit codes.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub source: Source,
    /// Index in both parts of the first row's first value.
    pub first: usize,
    /// Values of a row: 16 or 32.
    pub width: usize,
    /// Values from one row to the next.
    pub stride: usize,
    pub rows: usize,
    /// U8 or U4.
    pub target: PartFormat,
    /// Byte offset of the target part.
    pub codes: usize,
    /// Byte offsets of the first row's scale and minimum, f16.
    pub scales: usize,
    pub minima: usize,
    /// Scales from one row's to the next's.
    pub scale_stride: usize,
}

fn quantize(
    tier: Tier,
    source: &Part,
    target: &Part,
    rows: Rows,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), NotFinite> {
    let run = Run {
        source: match Fp8::of(source.format) {
            None => Source::Halves { at: source.codes },
            Some(format) => {
                let scale = scalar::single_at(src, source.scales);
                Source::Floats8 { at: source.codes, format, scale }
            }
        },
        first: rows.first,
        width: rows.width,
        stride: rows.stride,
        rows: rows.rows,
        target: target.format,
        codes: target.codes,
        scales: target.scales + 2 * rows.first_scale,
        minima: target.minima + 2 * rows.first_scale,
        scale_stride: rows.scale_stride,
    };
    // The bounds every tier relies on.
    assert!(rows.first + (rows.rows - 1) * rows.stride + rows.width <= target.values);
    assert!(source.code_range().end <= src.len() && target.code_range().end <= dst.len());
    let last_scale = 2 * (rows.first_scale + (rows.rows - 1) * rows.scale_stride) + 2;
    assert!(target.scales.max(target.minima) + last_scale <= dst.len());
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

/// Codes as they are.
fn copy(tier: Tier, source: &[u8], target: &mut [u8]) {
    match tier {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the tier is one of this CPU's.
        Tier::Avx512 | Tier::Avx2 => unsafe { vector::copy(source, target) },
        _ => target.copy_from_slice(source),
    }
}

/// 8-bit codes to 4-bit codes.
fn shrink(tier: Tier, source: &[u8], target: &mut [u8]) {
    assert!(source.len() == 2 * target.len() && source.len().is_multiple_of(64));
    match tier {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the tier is one of this CPU's; the lengths are checked above.
        Tier::Avx512 | Tier::Avx2 => unsafe { vector::shrink(source, target) },
        _ => scalar::shrink(source, target),
    }
}

/// f16 values to 8-bit floats; returns their scale.
fn to_floats8(tier: Tier, format: Fp8, source: &[u8], target: &mut [u8]) -> Result<f32, NotFinite> {
    assert!(source.len() == 2 * target.len() && target.len().is_multiple_of(64));
    match tier {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the tier is one of this CPU's; the lengths are checked above.
        Tier::Avx512 => unsafe { vector::to_floats8_avx512(format, source, target) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the same.
        Tier::Avx2 => unsafe { vector::to_floats8_avx2(format, source, target) },
        _ => scalar::to_floats8(format, source, target),
    }
}
