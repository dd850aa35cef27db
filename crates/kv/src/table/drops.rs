//! Blocks that leave a sequence's tables: dropped, or out of their window.

use std::sync::Arc;

use super::{Sequence, count_falls};
use crate::ladder::Fidelity;

impl Sequence {
    /// Takes `count` blocks from entry `start` out of table and view; their guards give them back.
    /// Returns the bytes of their pages.
    pub(super) fn remove_blocks(&mut self, group: usize, start: usize, count: usize) -> usize {
        let Some(last) = self.tables[group][start..start + count].last() else { return 0 };
        let (low, high) = (self.tables[group][start].first, last.first);
        let shape = self.pool.config().groups[group].shape;
        let mut bytes = 0;
        for (index, layer) in
            Arc::make_mut(&mut self.view).groups[group].layers.iter_mut().enumerate()
        {
            let from = layer.partition_point(|page| (page.first as usize) < low);
            let to = layer.partition_point(|page| page.first as usize <= high);
            bytes += layer.drain(from..to).map(|page| shape.page_bytes(page.format)).sum::<usize>();
            self.scores.remove(group, index, from..to);
        }
        self.held_bytes -= bytes;
        for entry in self.tables[group].drain(start..start + count) {
            count_falls(&mut self.falls_gone, entry.falls);
        }
        bytes
    }

    /// Drops the sealed block at original position `first` from every full-attention layer that holds
    /// it; the prefix index forgets it. Returns the bytes of its pages; 0 where there is none, or it is
    /// shared, because then nothing would be gained.
    pub(crate) fn drop_block(&mut self, first: usize) -> usize {
        let mut bytes = 0;
        for group in 0..self.tables.len() {
            let Some(index) = self.droppable(group, first) else { continue };
            if !self.tables[group][index].guard.forget_name() {
                continue;
            }
            self.note_dropped(usize::from(self.tables[group][index].held_layers));
            bytes += self.remove_blocks(group, index, 1);
            self.number_runs(group);
        }
        bytes
    }

    /// Drops the page of one full-attention layer of the sealed block at original position `first`; its
    /// other layers stay. Returns the bytes of the page; 0 where there is none, or it is shared.
    pub(crate) fn drop_page(&mut self, group: usize, layer: usize, first: usize) -> usize {
        let (Some(index), Some(page)) =
            (self.droppable(group, first), self.page_index(group, layer, first))
        else {
            return 0;
        };
        let entry = &mut self.tables[group][index];
        if !entry.guard.give_back_layer(layer) {
            return 0;
        }
        entry.held_layers -= 1;
        if entry.held_layers == 0 {
            count_falls(&mut self.falls_gone, entry.falls);
            self.tables[group].remove(index);
        }
        let layers = &mut Arc::make_mut(&mut self.view).groups[group].layers;
        let format = layers[layer].remove(page).format;
        self.scores.remove(group, layer, page..page + 1);
        let bytes = self.pool.config().groups[group].shape.page_bytes(format);
        self.held_bytes -= bytes;
        self.note_dropped(1);
        self.number_runs(group);
        bytes
    }

    /// What is computed from now on lacks `pages` more pages.
    fn note_dropped(&mut self, pages: usize) {
        self.dropped_pages += pages;
        self.lacking_pages += pages;
        self.lossy = Fidelity::Evict;
    }

    /// Index of the entry at `first`, where a block there may be dropped at all.
    fn droppable(&self, group: usize, first: usize) -> Option<usize> {
        let full = self.pool.config().groups[group].window.is_none();
        if full && self.is_sealed(first) { self.entry_index(group, first) } else { None }
    }
}
