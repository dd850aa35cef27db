//! Where the bytes of the budget are.

use std::ops::{Index, IndexMut};

use crate::page::PageFormat;

/// One value per page format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByFormat<T>([T; PageFormat::ALL.len()]);

impl<T> ByFormat<T> {
    /// Asks `value` for each format.
    pub fn from_fn(value: impl FnMut(PageFormat) -> T) -> ByFormat<T> {
        ByFormat(PageFormat::ALL.map(value))
    }

    /// Each format with its value, most precise first.
    pub fn iter(&self) -> impl Iterator<Item = (PageFormat, &T)> {
        PageFormat::ALL.into_iter().zip(&self.0)
    }
}

impl ByFormat<usize> {
    /// Sum over all formats.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}

impl<T> Index<PageFormat> for ByFormat<T> {
    type Output = T;
    fn index(&self, format: PageFormat) -> &T {
        &self.0[format as usize]
    }
}

impl<T> IndexMut<PageFormat> for ByFormat<T> {
    fn index_mut(&mut self, format: PageFormat) -> &mut T {
        &mut self.0[format as usize]
    }
}

/// Every byte of a pool's budget: `used + fenced + free + reserved + fragmentation + table = budget`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accounts {
    /// What the pool may use in all, tables included.
    pub budget_bytes: usize,
    /// Pages held by blocks, by format.
    pub used: ByFormat<usize>,
    /// The part of `used` that only the prefix index names: given back whenever it is asked for.
    pub cached_bytes: usize,
    /// Pages given back during a step that has not ended: nobody's, not yet reusable.
    pub fenced_bytes: usize,
    /// Bytes that pages can still take, in partly filled and in empty spans.
    pub free_bytes: usize,
    /// Empty spans kept for re-encoding (`span_bytes` each).
    pub reserved_bytes: usize,
    /// Bytes no page can take: the rest of each span that its page size does not divide, and the rest
    /// of the budget that spans do not divide.
    pub fragmentation_bytes: usize,
    /// Block tables and page owners, counted at their largest.
    pub table_bytes: usize,
    /// Most bytes ever held by blocks at once.
    pub peak_bytes: usize,
}

impl Accounts {
    /// Bytes of pages held by blocks, all formats.
    pub fn used_bytes(&self) -> usize {
        self.used.total()
    }

    /// Bytes of pages that sequences hold, all formats.
    pub fn held_bytes(&self) -> usize {
        self.used_bytes() - self.cached_bytes
    }
}
