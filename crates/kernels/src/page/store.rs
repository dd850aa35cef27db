//! Writing the K and V of a sequence's new tokens into the pages of one layer.

use super::write_kv;
use crate::dispatch::Tier;
use crate::pool::BarrierPool;
use reef_kv::arena::Arena;
use reef_kv::page::{PageFormat, PageRef, PageShape};

/// K and V of tokens at consecutive positions, in rows of a wider matrix.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens<'a> {
    /// Original position of the first row.
    pub first_position: u32,
    /// Number of tokens.
    pub rows: usize,
    /// Floats from one row to the next.
    pub stride: usize,
    /// Row `i`'s keys, already rotated, start at `i * stride`; `kv_heads * head_dim` floats.
    pub keys: &'a [f32],
    /// The same for values.
    pub values: &'a [f32],
}

/// Writes `tokens` into the layer's `pages` (token order, all of one sequence). The pages that hold
/// these positions are f16 and belong to this sequence alone.
///
/// # Panics
/// If a position has no page, or its page is not f16.
pub fn store_tokens(
    tier: Tier,
    pool: &BarrierPool,
    shape: &PageShape,
    arena: &Arena,
    pages: &[PageRef],
    tokens: &NewTokens<'_>,
) {
    let end = tokens.first_position + tokens.rows as u32;
    let first = pages.partition_point(|page| page.first <= tokens.first_position).saturating_sub(1);
    let touched = &pages[first..];
    let covered: u32 =
        touched.iter().map(|page| overlap(page, shape, tokens.first_position, end)).sum();
    assert_eq!(covered as usize, tokens.rows, "positions without a page");
    let store =
        |index: usize, _thread: usize| store_page(tier, shape, arena, &touched[index], tokens);
    if touched.len() == 1 {
        store(0, 0);
    } else {
        pool.for_each(touched.len(), &store);
    }
}

/// Positions of `page` in `start..end`.
fn overlap(page: &PageRef, shape: &PageShape, start: u32, end: u32) -> u32 {
    let page_end = page.first + shape.block_size as u32;
    page_end.min(end).saturating_sub(page.first.max(start))
}

fn store_page(
    tier: Tier,
    shape: &PageShape,
    arena: &Arena,
    page: &PageRef,
    tokens: &NewTokens<'_>,
) {
    assert_eq!(page.format, PageFormat::F16, "tokens are written to f16 pages only");
    let bytes = shape.page_bytes(PageFormat::F16);
    assert!(page.byte_offset() + bytes <= arena.len(), "page outside the arena");
    // SAFETY: in bounds by the assertion; the page is this sequence's alone and in no other item of
    // this call (pages of a table are distinct), so no other reference to its bytes lives meanwhile.
    let data =
        unsafe { std::slice::from_raw_parts_mut(arena.base().add(page.byte_offset()), bytes) };
    let channels = shape.kv_heads * shape.head_dim;
    for slot in 0..shape.block_size {
        let row = (page.first + slot as u32).wrapping_sub(tokens.first_position) as usize;
        if row < tokens.rows {
            let start = row * tokens.stride;
            let (keys, values) = (&tokens.keys[start..], &tokens.values[start..]);
            write_kv(tier, shape, data, slot, &keys[..channels], &values[..channels]);
        }
    }
}
