//! New tokens into f16 pages.

use crate::simd::{LANES, Simd};
use reef_kv::page::{PageFormat, PageShape};

/// Largest finite f16.
const HALF_MAX: f32 = 65504.0;

/// # Safety
/// Needs the tier of `S`; `page`, `slot`, `k`, `v` as [`crate::page::write_kv`] checks.
#[inline(always)]
pub(super) unsafe fn write_kv<S: Simd>(
    shape: &PageShape,
    page: &mut [u8],
    slot: usize,
    k: &[f32],
    v: &[f32],
) {
    let (dim, group) = (shape.head_dim, shape.key_group());
    let first_key = slot / group * dim * group + slot % group;
    for head in 0..shape.kv_heads {
        let at = shape.head(PageFormat::F16, head);
        // SAFETY: the layout keeps every offset inside the page, whose length the caller checked.
        unsafe {
            let keys = page.as_mut_ptr().add(at.k).cast::<u16>().add(first_key);
            let values = page.as_mut_ptr().add(at.v).cast::<u16>().add(slot * dim);
            for channel in (0..dim).step_by(LANES) {
                let mut halves = [0u16; LANES];
                let input = head * dim + channel;
                S::store_f16(halves.as_mut_ptr(), clamped::<S>(k.as_ptr().add(input)));
                for (lane, half) in halves.iter().enumerate() {
                    keys.add((channel + lane) * group).write_unaligned(*half);
                }
                S::store_f16(values.add(channel), clamped::<S>(v.as_ptr().add(input)));
            }
        }
    }
}

/// # Safety
/// Needs the tier of `S`; `x` valid for sixteen reads.
#[inline(always)]
unsafe fn clamped<S: Simd>(x: *const f32) -> S::F {
    // The order of the arguments lets a NaN through: a comparison with NaN picks the second.
    // SAFETY: the caller's contract.
    unsafe { S::max(S::splat(-HALF_MAX), S::min(S::splat(HALF_MAX), S::load(x))) }
}
