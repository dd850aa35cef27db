//! The one region of memory that holds every page; the only `unsafe` of this crate.
//!
//! The arena knows nothing of pages: the pool hands out disjoint byte ranges of it, kernels read and
//! write them through [`Arena::base`].

use std::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};

use crate::page::PAGE_ALIGN;

/// Bytes written over freed pages in debug builds: f16 NaN, so that a read of a freed or not yet
/// written token shows up as NaN logits instead of as plausible text.
const POISON: [u8; 2] = 0x7e00_u16.to_le_bytes();

/// The smallest page of any system, in bytes.
const SYSTEM_PAGE: usize = 4096;

/// An anonymous mapping, page-aligned (so also 64-byte aligned), zeroed by the system.
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    _map: MmapMut,
}

// SAFETY: `base` points into `_map`, which this value owns; nothing about it is bound to a thread.
unsafe impl Send for Arena {}
// SAFETY: the safe methods only read; whoever writes through `base` promises disjoint ranges.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `bytes` bytes (at least one). With `prefault` the system commits them now instead of at
    /// first touch.
    ///
    /// # Errors
    /// What the system says when the mapping is refused.
    pub fn new(bytes: usize, prefault: bool) -> std::io::Result<Arena> {
        let mut map = MmapOptions::new().len(bytes.max(1)).map_anon()?;
        // Pages lie scattered: with 4 KiB system pages, misses of the address cache cost attention up to
        // a fifth. A system that refuses is only slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        if prefault {
            // After the advice: pages committed with the mapping itself would all be small ones.
            map.iter_mut().step_by(SYSTEM_PAGE).for_each(|byte| *byte = 0);
        }
        let base = NonNull::from(&mut map[0]);
        debug_assert_eq!(base.as_ptr() as usize % PAGE_ALIGN, 0);
        Ok(Arena { base, bytes, _map: map })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the arena has no byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Every byte of the arena, for kernels that read pages (`PageRef::byte_offset` indexes it). No one
    /// may write through [`Arena::base`] while the slice lives.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `base` is valid for `bytes` bytes while `self` lives; writers through `base` promise
        // that no such slice overlaps their writes in time.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }

    /// First byte of the arena, for kernels that write disjoint pages from several threads.
    ///
    /// A writer promises: it writes only pages of the open blocks of the sequences in its step, no two
    /// threads write overlapping ranges, and no slice of [`Arena::bytes`] is alive meanwhile.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// `len` bytes from byte `offset`, shared.
    ///
    /// # Safety
    /// No one writes the range while the slice lives.
    pub(crate) unsafe fn slice(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset + len <= self.bytes);
        // SAFETY: in bounds by the assertion; not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }

    /// `len` bytes from byte `offset`, exclusive.
    ///
    /// # Safety
    /// No one else reads or writes the range while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "ranges of the arena are handed out by the pool")]
    pub(crate) unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= self.bytes);
        // SAFETY: in bounds by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(offset), len) }
    }

    /// Fills a free range with [`POISON`] in debug builds; does nothing in release builds.
    ///
    /// # Safety
    /// As for [`Arena::slice_mut`].
    pub(crate) unsafe fn poison(&self, offset: usize, len: usize) {
        if cfg!(debug_assertions) {
            // SAFETY: the caller's promise.
            let range = unsafe { self.slice_mut(offset, len) };
            range.chunks_exact_mut(2).for_each(|pair| pair.copy_from_slice(&POISON));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_zeroed_and_poisons_in_debug_builds() {
        let arena = Arena::new(8192, true).unwrap();
        assert_eq!(arena.base() as usize % PAGE_ALIGN, 0);
        assert!(arena.bytes().iter().all(|&byte| byte == 0));
        // SAFETY: no other slice of this arena is alive.
        unsafe { arena.poison(64, 128) };
        let expected: &[u8] = if cfg!(debug_assertions) { &POISON } else { &[0, 0] };
        assert!(arena.bytes()[64..192].chunks(2).all(|pair| pair == expected));
        assert_eq!(arena.bytes()[192], 0);
    }
}
