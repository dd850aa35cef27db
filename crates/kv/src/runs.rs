//! Runs of kept pages: how far the query is rotated back for each (kv-memory point 14).
//!
//! RoPE scores depend on position differences only. Where blocks were dropped, the pages before the gap
//! are to appear so much nearer: the *query* is rotated to an earlier position for them, keys keep the
//! rotation they were written with, and nothing drifts however often blocks are dropped.

use crate::page::{GroupView, PageRef};

/// Most runs of kept pages in one layer: `PageRef::run` has 8 bits.
pub(crate) const MAXIMUM_RUNS: usize = 256;

/// A view without shifts: positions are original.
pub(crate) fn original(layers: usize) -> GroupView {
    GroupView { layers: vec![Vec::new(); layers], runs: vec![vec![0]; layers], shifts: vec![0] }
}

/// Numbers the runs of every layer and works out by how many tokens each is shifted: those dropped
/// after it. Kept tokens then stand at consecutive positions, the newest where it was. Allocates only
/// where there are more runs than ever before.
pub(crate) fn number(view: &mut GroupView, block_size: usize) {
    let GroupView { layers, runs, shifts } = view;
    shifts.clear();
    for (pages, runs) in layers.iter_mut().zip(runs.iter_mut()) {
        shifts_of(pages, runs, block_size as u32);
        shifts.extend_from_slice(runs);
    }
    // Largest first, so that the newest run's, 0, is the last.
    shifts.sort_unstable_by(|a, b| b.cmp(a));
    shifts.dedup();
    for shift in runs.iter_mut().flatten() {
        *shift = shifts.partition_point(|known| known > shift) as u32;
    }
}

/// Numbers the runs of one layer's pages, and writes the shift of each to `shifts`.
fn shifts_of(pages: &mut [PageRef], shifts: &mut Vec<u32>, block_size: u32) {
    shifts.clear();
    let mut dropped = 0;
    let mut end = pages.first().map_or(0, |page| page.first);
    for page in pages {
        if page.first > end {
            // Of the run that ends here: for now, the tokens dropped before it.
            shifts.push(dropped);
            dropped += page.first - end;
        }
        // Plans never open more runs than this.
        page.run = shifts.len().min(MAXIMUM_RUNS - 1) as u8;
        end = page.first + block_size;
    }
    shifts.push(dropped);
    shifts.iter_mut().for_each(|before| *before = dropped - *before);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PageFormat;

    fn pages(firsts: &[u32]) -> Vec<PageRef> {
        let page = |&first: &u32| PageRef { offset: 0, first, format: PageFormat::F16, run: 0 };
        firsts.iter().map(page).collect()
    }

    #[test]
    fn layers_share_the_shifts_they_have_in_common() {
        let layers = [&[0, 48, 64, 112][..], &[0, 16, 80, 112], &[96, 112], &[]];
        let mut view = original(layers.len());
        view.layers = layers.map(pages).to_vec();
        number(&mut view, 16);
        assert_eq!(view.shifts, [64, 32, 16, 0]);
        assert_eq!(view.runs, [vec![0, 1, 3], vec![0, 2, 3], vec![3], vec![3]]);
        let runs: Vec<u8> = view.layers.iter().flatten().map(|page| page.run).collect();
        assert_eq!(runs, [0, 1, 1, 2, 0, 0, 1, 2, 0, 0]);
    }
}
