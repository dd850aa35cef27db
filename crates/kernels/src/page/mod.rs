//! Writing tokens into pages, and re-encoding sealed pages into a smaller format.
//!
//! The layout is that of [`reef_kv::page`]: K channel-major inside key groups, V token-major. Int8 is
//! asymmetric, `value = min + scale * code`, with f16 scales and minima: K per channel over a key
//! group, V per token over 32 channels (KIVI, arXiv 2402.02750). 4-bit codes lie on that same grid,
//! seventeen steps apart; 8-bit floats have one scale a head and part. Nothing here allocates.

mod decode;
mod distinct;
pub mod fp8;
mod reencode;
pub(crate) mod scalar;
pub mod store;
#[cfg(target_arch = "x86_64")]
mod vector;

pub use decode::decode_page;
pub use distinct::key_distinctness;
pub use reencode::{NotFinite, reencode};

use crate::dispatch::Tier;
use reef_kv::page::{PageFormat, PageShape};

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
