//! f16 and fp8 rows into 8-bit and 4-bit codes.

use super::fp8;
use super::lanes::PageLanes;
use super::prefetch::{SOURCE_AHEAD, TARGET_AHEAD, prefetch};
use crate::page::fp8::Fp8;
use crate::page::reencode::{NotFinite, Run, Source};
use crate::simd::LANES;
use reef_kv::page::PartFormat;
use std::arch::x86_64::*;

// Closures would not do here: one that is not inlined lacks the CPU features, and then each intrinsic
// in it is a call.

/// Values to quantise, sixteen at a time.
///
/// # Safety
/// The methods need the tier of `S` and a part that holds values `index..index + 16`.
trait Values<S: PageLanes>: Copy {
    /// Values from number `index` as halves.
    /// # Safety
    /// See the trait.
    unsafe fn halves(self, index: usize) -> __m256i;
    /// Where value `index` is; it need not exist.
    fn place(self, index: usize) -> *const u8;
}

/// A part of f16 values.
#[derive(Clone, Copy)]
struct Halves(*const u8);

impl<S: PageLanes> Values<S> for Halves {
    #[inline(always)]
    unsafe fn halves(self, index: usize) -> __m256i {
        // SAFETY: the trait's contract.
        unsafe { _mm256_loadu_si256(self.0.add(2 * index).cast()) }
    }
    #[inline(always)]
    fn place(self, index: usize) -> *const u8 {
        self.0.wrapping_add(2 * index)
    }
}

/// A part of 8-bit floats, E4M3 or E5M2, and its scale.
#[derive(Clone, Copy)]
struct Floats8<const E4M3: bool>(*const u8, f32);

impl<S: PageLanes, const E4M3: bool> Values<S> for Floats8<E4M3> {
    #[inline(always)]
    unsafe fn halves(self, index: usize) -> __m256i {
        // SAFETY: the trait's contract.
        unsafe {
            let codes = _mm_loadu_si128(self.0.add(index).cast());
            S::narrow(S::mul(fp8::decode::<S, E4M3>(codes), S::splat(self.1)))
        }
    }
    #[inline(always)]
    fn place(self, index: usize) -> *const u8 {
        self.0.wrapping_add(index)
    }
}

/// # Safety
/// Needs the tier of `S`; the offsets of `run` lie inside `src` and `dst`.
#[inline(always)]
pub(super) unsafe fn quantize<S: PageLanes>(
    run: Run,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), NotFinite> {
    // SAFETY: the caller's contract.
    unsafe {
        match run.source {
            Source::Halves { at } => quantize_width::<S, _>(run, Halves(src.as_ptr().add(at)), dst),
            Source::Floats8 { at, format: Fp8::E4M3, scale } => {
                quantize_width::<S, _>(run, Floats8::<true>(src.as_ptr().add(at), scale), dst)
            }
            Source::Floats8 { at, format: Fp8::E5M2, scale } => {
                quantize_width::<S, _>(run, Floats8::<false>(src.as_ptr().add(at), scale), dst)
            }
        }
    }
}

/// # Safety
/// As of [`quantize`]; `values` are those of the source part.
#[inline(always)]
unsafe fn quantize_width<S: PageLanes, V: Values<S>>(
    run: Run,
    values: V,
    dst: &mut [u8],
) -> Result<(), NotFinite> {
    // SAFETY: the caller's contract.
    unsafe {
        match (run.width, run.target) {
            (32, PartFormat::U4) => quantize_rows::<S, V, 2, true>(run, values, dst),
            (32, _) => quantize_rows::<S, V, 2, false>(run, values, dst),
            (_, PartFormat::U4) => quantize_rows::<S, V, 1, true>(run, values, dst),
            _ => quantize_rows::<S, V, 1, false>(run, values, dst),
        }
    }
}

/// Rows of `VECTORS * 16` values, sixteen rows at a time: their extremes, then all scales at once,
/// then the codes. The extremes of the next rows come before the codes of these, so that there is
/// something to do while divisions last.
///
/// # Safety
/// As of [`quantize_width`]; `run.width` is `VECTORS * 16`.
#[inline(always)]
unsafe fn quantize_rows<S: PageLanes, V: Values<S>, const VECTORS: usize, const NIBBLES: bool>(
    run: Run,
    values: V,
    dst: &mut [u8],
) -> Result<(), NotFinite> {
    let (mut least, mut most) = (ORDER_OF_ZERO, ORDER_OF_ZERO);
    // SAFETY: the caller's contract: all rows lie inside the source and target parts.
    unsafe {
        let mut next = row_extremes::<S, V, VECTORS>(&run, values, 0);
        for first in (0..run.rows).step_by(LANES) {
            for row in 0..LANES {
                least = least.min(next.low[row]);
                most = most.max(next.high[row]);
            }
            let grid = grid::<S>(&next);
            next = row_extremes::<S, V, VECTORS>(&run, values, first + LANES);
            let codes = dst.as_mut_ptr().add(run.codes);
            let rows = LANES.min(run.rows - first);
            for row in 0..rows {
                let (min, inverse) = (S::splat(grid.minima[row]), S::splat(grid.inverse[row]));
                let at = run.first + (first + row) * run.stride;
                let mut vectors = [_mm256_setzero_si256(); VECTORS];
                for (i, vector) in vectors.iter_mut().enumerate() {
                    let value = S::widen(values.halves(at + i * LANES));
                    *vector = S::words(S::integers(S::mul(S::sub(value, min), inverse)));
                }
                let place = codes.wrapping_add(if NIBBLES { at / 2 } else { at });
                prefetch(place.wrapping_add(TARGET_AHEAD));
                if NIBBLES {
                    store_nibbles::<S, VECTORS>(codes, at, vectors);
                } else {
                    store_bytes::<S, VECTORS>(place, vectors);
                }
            }
            grid.store(&run, first, rows, dst);
        }
    }
    if least >= ORDER_OF_LEAST && most <= ORDER_OF_MOST { Ok(()) } else { Err(NotFinite) }
}

/// Least and greatest values of sixteen rows, in the order of [`ORDER_OF_ZERO`].
struct Extremes {
    low: [u16; LANES],
    high: [u16; LANES],
}

/// Extremes of up to sixteen rows from number `first`; rows that are not there are all zeros.
///
/// # Safety
/// As of [`quantize_rows`].
#[inline(always)]
unsafe fn row_extremes<S: PageLanes, V: Values<S>, const VECTORS: usize>(
    run: &Run,
    values: V,
    first: usize,
) -> Extremes {
    let mut rows = Extremes { low: [ORDER_OF_ZERO; LANES], high: [ORDER_OF_ZERO; LANES] };
    for row in 0..LANES.min(run.rows.saturating_sub(first)) {
        let at = run.first + (first + row) * run.stride;
        prefetch(values.place(at).wrapping_add(SOURCE_AHEAD));
        // SAFETY: the caller's contract.
        (rows.low[row], rows.high[row]) = unsafe { extremes::<S, V, VECTORS>(values, at) };
    }
    rows
}

/// Halves as integers in the order of their values: negative ones turned around, below the others.
/// -0 comes before 0, NaN and infinity outside `ORDER_OF_LEAST..=ORDER_OF_MOST`.
const ORDER_OF_ZERO: u16 = 0x8000;
/// Of -65504, `0xfbff`.
const ORDER_OF_LEAST: u16 = 0xfbff ^ 0xffff;
/// Of 65504, `0x7bff`.
const ORDER_OF_MOST: u16 = 0x7bff ^ 0x8000;

/// Least and greatest of the row from value `at`, as integers in the order of values.
///
/// # Safety
/// As of [`quantize_rows`].
#[inline(always)]
unsafe fn extremes<S: PageLanes, V: Values<S>, const VECTORS: usize>(
    values: V,
    at: usize,
) -> (u16, u16) {
    // SAFETY: the caller's contract.
    unsafe {
        let (mut low, mut high) = (_mm256_set1_epi16(-1), _mm256_setzero_si256());
        for i in 0..VECTORS {
            let halves = values.halves(at + i * LANES);
            let negative = _mm256_srai_epi16::<15>(halves);
            let flips = _mm256_or_si256(negative, _mm256_set1_epi16(i16::MIN));
            let ordered = _mm256_xor_si256(halves, flips);
            low = _mm256_min_epu16(low, ordered);
            high = _mm256_max_epu16(high, ordered);
        }
        let low = _mm_min_epu16(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
        let high = _mm_max_epu16(_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high));
        // There is a horizontal minimum; the maximum is that of the complement.
        let not_high = _mm_xor_si128(high, _mm_set1_epi8(-1));
        let low = _mm_cvtsi128_si32(_mm_minpos_epu16(low)) as u16;
        (low, !(_mm_cvtsi128_si32(_mm_minpos_epu16(not_high)) as u16))
    }
}

/// Scales and minima of sixteen rows.
struct Grid {
    scale_halves: [u16; LANES],
    min_halves: [u16; LANES],
    minima: [f32; LANES],
    /// `1 / scale`, 0 for a scale of 0.
    inverse: [f32; LANES],
}

/// See [`crate::page::scalar::quantize`].
///
/// # Safety
/// Needs the tier of `S`.
#[inline(always)]
unsafe fn grid<S: PageLanes>(rows: &Extremes) -> Grid {
    let mut grid = Grid {
        scale_halves: [0; LANES],
        min_halves: [0; LANES],
        minima: [0.0; LANES],
        inverse: [0.0; LANES],
    };
    // SAFETY: all arrays hold sixteen elements.
    unsafe {
        let zero = S::splat(0.0);
        let min = S::widen(in_order(&rows.low));
        let range = S::sub(S::widen(in_order(&rows.high)), min);
        // Adding zero turns -0 into 0.
        let min = S::add(min, zero);
        let nearest_halves = S::narrow(S::div(range, S::splat(255.0)));
        let mut short = S::lt_mask(S::mul(S::widen(nearest_halves), S::splat(255.5)), range);
        _mm256_storeu_si256(grid.scale_halves.as_mut_ptr().cast(), nearest_halves);
        while short != 0 {
            let lane = short.trailing_zeros() as usize;
            // A page with NaN or Inf ends in an error; wrapping keeps its garbage from panicking.
            grid.scale_halves[lane] = grid.scale_halves[lane].wrapping_add(1);
            short &= short - 1;
        }
        let scale = S::load_f16(grid.scale_halves.as_ptr());
        let some = S::lt_mask(zero, scale);
        S::store_f16(grid.min_halves.as_mut_ptr(), min);
        S::store(grid.minima.as_mut_ptr(), min);
        S::store(grid.inverse.as_mut_ptr(), S::select(some, S::div(S::splat(1.0), scale), zero));
    }
    grid
}

/// The halves whose places in the order of values these are.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn in_order(order: &[u16; LANES]) -> __m256i {
    // SAFETY: the caller has AVX2; sixteen elements are read.
    unsafe {
        let order = _mm256_loadu_si256(order.as_ptr().cast());
        let positive = _mm256_srai_epi16::<15>(order);
        let negative = _mm256_xor_si256(positive, _mm256_set1_epi8(-1));
        _mm256_xor_si256(order, _mm256_or_si256(negative, _mm256_set1_epi16(i16::MIN)))
    }
}

impl Grid {
    /// Writes scales and minima of `rows` rows from number `first`.
    fn store(&self, run: &Run, first: usize, rows: usize, dst: &mut [u8]) {
        for (part, halves) in [(run.scales, &self.scale_halves), (run.minima, &self.min_halves)] {
            if run.scale_stride == 1 {
                let bytes = part + 2 * first..part + 2 * (first + rows);
                dst[bytes].copy_from_slice(bytemuck::cast_slice(&halves[..rows]));
                continue;
            }
            for (row, half) in halves[..rows].iter().enumerate() {
                let at = part + 2 * (first + row) * run.scale_stride;
                dst[at..at + 2].copy_from_slice(&half.to_le_bytes());
            }
        }
    }
}

/// Stores 8-bit codes; one of 256, half a step too high, becomes 255.
///
/// # Safety
/// Needs the tier of `S`; `place` has room for the codes.
#[inline(always)]
unsafe fn store_bytes<S: PageLanes, const VECTORS: usize>(
    place: *mut u8,
    words: [__m256i; VECTORS],
) {
    let mut bytes = [0u128; VECTORS];
    // SAFETY: the caller's contract.
    unsafe {
        for (bytes, words) in bytes.iter_mut().zip(words) {
            _mm_storeu_si128(std::ptr::from_mut(bytes).cast(), S::bytes(words));
        }
        place.cast::<[u128; VECTORS]>().write_unaligned(bytes);
    }
}

/// Stores 8-bit codes as 4-bit codes of a part that starts zeroed; `at`: index of the first code. As
/// of [`store_bytes`], 256 counts as 255.
///
/// # Safety
/// Needs the tier of `S`; `part` has room for the codes.
#[inline(always)]
unsafe fn store_nibbles<S: PageLanes, const VECTORS: usize>(
    part: *mut u8,
    at: usize,
    words: [__m256i; VECTORS],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let (fifteen, rounding) = (_mm256_set1_epi16(15), _mm256_set1_epi16(135));
        // The code of `crate::page::scalar::shrunk` in bits 8..12.
        let mut shrunk = words;
        for codes in &mut shrunk {
            *codes = _mm256_add_epi16(_mm256_mullo_epi16(*codes, fifteen), rounding);
        }
        let high_bits = _mm256_set1_epi16(0xf0);
        let vector = at / LANES;
        if VECTORS == 2 && vector.is_multiple_of(2) {
            let low = _mm256_srli_epi16::<8>(shrunk[0]);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(shrunk[1]), high_bits);
            let pairs = S::bytes(_mm256_or_si256(low, high));
            _mm_storeu_si128(part.add(vector / 2 * LANES).cast(), pairs);
            return;
        }
        for (i, codes) in shrunk.into_iter().enumerate() {
            let vector = vector + i;
            let codes = if vector.is_multiple_of(2) {
                _mm256_srli_epi16::<8>(codes)
            } else {
                _mm256_and_si256(_mm256_srli_epi16::<4>(codes), high_bits)
            };
            let place = part.add(vector / 2 * LANES).cast::<__m128i>();
            _mm_storeu_si128(place, _mm_or_si128(_mm_loadu_si128(place), S::bytes(codes)));
        }
    }
}

/// [`crate::page::scalar::shrunk`] of 32 codes.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn shrunk(codes: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        // 15 * code + 135 fits sixteen bits: even bytes, then odd ones, whose result stays where it is.
        let low_bytes = _mm256_set1_epi16(0xff);
        let (fifteen, rounding) = (_mm256_set1_epi16(15), _mm256_set1_epi16(135));
        let even = _mm256_mullo_epi16(_mm256_and_si256(codes, low_bytes), fifteen);
        let even = _mm256_srli_epi16::<8>(_mm256_add_epi16(even, rounding));
        let odd = _mm256_mullo_epi16(_mm256_srli_epi16::<8>(codes), fifteen);
        let odd = _mm256_add_epi16(odd, rounding);
        _mm256_or_si256(even, _mm256_andnot_si256(low_bytes, odd))
    }
}

/// # Safety
/// Needs AVX2; `source` is twice as long as `target` and a multiple of 64.
#[inline(always)]
pub(super) unsafe fn shrink(source: &[u8], target: &mut [u8]) {
    for (codes, pairs) in source.chunks_exact(64).zip(target.chunks_exact_mut(32)) {
        prefetch(codes.as_ptr().wrapping_add(SOURCE_AHEAD));
        prefetch(pairs.as_ptr().wrapping_add(TARGET_AHEAD));
        // SAFETY: the caller has AVX2; 64 bytes are read and 32 written.
        unsafe {
            let first = shrunk(_mm256_loadu_si256(codes.as_ptr().cast()));
            let second = shrunk(_mm256_loadu_si256(codes.as_ptr().add(32).cast()));
            // Vectors 0 and 2 are the low nibbles, 1 and 3 the high ones.
            let low = _mm256_permute2x128_si256::<0x20>(first, second);
            let high = _mm256_permute2x128_si256::<0x31>(first, second);
            let both = _mm256_or_si256(low, _mm256_slli_epi16::<4>(high));
            _mm256_storeu_si256(pairs.as_mut_ptr().cast(), both);
        }
    }
}
