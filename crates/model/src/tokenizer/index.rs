//! A hash table of row numbers: keys stay where they are stored, a row costs 4 to 8 bytes here.

use std::hash::{BuildHasher, Hash, RandomState};

/// Marks a free slot; never a row number.
const FREE: u32 = u32::MAX;

/// Finds a row of a table (a token of the vocabulary, a merge) by its key.
///
/// The rows are the caller's: the index keeps only their numbers, so that no text is stored twice.
/// Hashing is keyed at random, since a model file may be built to collide.
#[derive(Clone, Debug)]
pub(super) struct RowIndex {
    /// Open addressing with linear probing; a power of two of slots, at most half of them used.
    slots: Vec<u32>,
    hasher: RandomState,
}

impl RowIndex {
    /// An index for at most `rows` rows.
    pub(super) fn with_capacity(rows: usize) -> RowIndex {
        let slots = vec![FREE; (rows * 2).next_power_of_two().max(2)];
        RowIndex { slots, hasher: RandomState::new() }
    }

    /// Puts `row` under `key`; `is_key(other)` tells whether row `other` has the same key. Returns the
    /// row that was there before, which `row` replaces if `replace`.
    pub(super) fn insert<K: Hash + ?Sized>(
        &mut self,
        key: &K,
        row: u32,
        replace: bool,
        is_key: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let slot = self.slot(key, is_key);
        let before = self.slots[slot];
        if before == FREE || replace {
            self.slots[slot] = row;
        }
        (before != FREE).then_some(before)
    }

    /// The row under `key`; `is_key(row)` tells whether `row` has that key.
    pub(super) fn find<K: Hash + ?Sized>(
        &self,
        key: &K,
        is_key: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let row = self.slots[self.slot(key, is_key)];
        (row != FREE).then_some(row)
    }

    /// The slot that holds `key`, or the free one where it belongs.
    fn slot<K: Hash + ?Sized>(&self, key: &K, is_key: impl Fn(u32) -> bool) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(key) as usize & mask;
        // Ends: at least half of the slots are free.
        while self.slots[slot] != FREE && !is_key(self.slots[slot]) {
            slot = (slot + 1) & mask;
        }
        slot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_or_the_last_of_equal_keys_stays() {
        let rows = ["a", "b", "a", "c"];
        for (replace, expected) in [(false, 0), (true, 2)] {
            let mut index = RowIndex::with_capacity(rows.len());
            for (row, key) in rows.iter().enumerate() {
                index.insert(*key, row as u32, replace, |other| rows[other as usize] == *key);
            }
            assert_eq!(index.find("a", |row| rows[row as usize] == "a"), Some(expected));
            assert_eq!(index.find("c", |row| rows[row as usize] == "c"), Some(3));
            assert_eq!(index.find("d", |row| rows[row as usize] == "d"), None);
        }
    }

    #[test]
    fn an_index_of_nothing_finds_nothing() {
        assert_eq!(RowIndex::with_capacity(0).find("a", |_| true), None);
    }
}
