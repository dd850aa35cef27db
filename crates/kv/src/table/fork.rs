//! One sequence becomes two that share what they have in common; and giving back what is not needed.

use std::sync::Arc;

use super::{Entry, Sequence, empty_view};
use crate::ladder::Fidelity;
use crate::scores::Scores;

impl Sequence {
    /// A sequence of its own that begins with the same accepted tokens: it shares every block, the open one
    /// too, which whoever grows first copies. Positions, scores, marks, ledger (as of `request`), usage and
    /// fidelity are copied. To be called between steps.
    pub fn fork(&self, request: u64) -> Sequence {
        let mut forked = Sequence {
            pool: self.pool.clone(),
            config: super::SequenceConfig { request, ..self.config },
            next_position: self.next_position,
            grown_end: self.grown_end,
            tables: self.share_tables(),
            view: self.view.clone(),
            relative: self.relative,
            scores: self.scores.clone(),
            kept_spans: self.kept_spans.clone(),
            falls_gone: self.falls_gone,
            dropped_pages: self.dropped_pages,
            lacking_pages: self.lacking_pages,
            lossy: self.lossy,
            attended: self.attended,
            held_bytes: self.held_bytes,
            peak_bytes: self.peak_bytes,
            ledger: self.ledger.of_request(request),
        };
        forked.trim();
        forked
    }

    /// Another guard of every block, under one lock.
    fn share_tables(&self) -> Vec<Vec<Entry>> {
        let mut state = self.pool.shared.state();
        let mut share = |entry: &Entry| {
            state.blocks[entry.guard.index() as usize].owners += 1;
            Entry { guard: entry.guard.counted(), ..*entry }
        };
        self.tables.iter().map(|table| table.iter().map(&mut share).collect()).collect()
    }

    /// Gives back the blocks beyond the accepted tokens, such as those of rejected drafts. Positions that
    /// turned relative stay so.
    pub fn trim(&mut self) {
        self.grown_end = self.next_position;
        for group in 0..self.tables.len() {
            let table = &self.tables[group];
            let start = table.partition_point(|entry| entry.first < self.next_position);
            let count = table.len() - start;
            self.remove_blocks(group, start, count);
            if count > 0 {
                self.number_runs(group);
            }
        }
    }

    /// Gives everything back: the next token is at position 0 again, of full fidelity. Configuration, marks,
    /// ledger and peak stay. For what is to be computed again, or read back.
    pub fn clear(&mut self) {
        for group in 0..self.tables.len() {
            self.remove_blocks(group, 0, self.tables[group].len());
        }
        self.view = Arc::new(empty_view(&self.pool));
        self.scores = Scores::new(self.pool.config().groups.iter().map(|group| group.layers));
        self.next_position = 0;
        self.grown_end = 0;
        self.relative = false;
        self.lacking_pages = 0;
        self.lossy = Fidelity::Exact;
        self.attended = Fidelity::Exact;
    }
}
