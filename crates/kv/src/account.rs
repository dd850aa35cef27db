//! Where the bytes of the budget are.

use std::ops::{Index, IndexMut};

use crate::page::PageFormat;

/// One value per page format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByFormat<T> {
    /// For [`PageFormat::F16`].
    pub f16: T,
    /// For [`PageFormat::Int8`].
    pub int8: T,
}

impl<T> ByFormat<T> {
    /// Asks `value` for each format.
    pub fn from_fn(mut value: impl FnMut(PageFormat) -> T) -> ByFormat<T> {
        ByFormat { f16: value(PageFormat::F16), int8: value(PageFormat::Int8) }
    }
}

impl<T> Index<PageFormat> for ByFormat<T> {
    type Output = T;
    fn index(&self, format: PageFormat) -> &T {
        match format {
            PageFormat::F16 => &self.f16,
            PageFormat::Int8 => &self.int8,
        }
    }
}

impl<T> IndexMut<PageFormat> for ByFormat<T> {
    fn index_mut(&mut self, format: PageFormat) -> &mut T {
        match format {
            PageFormat::F16 => &mut self.f16,
            PageFormat::Int8 => &mut self.int8,
        }
    }
}

/// Every byte of a pool's budget: `used + fenced + free + reserved + fragmentation + table = budget`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accounts {
    /// What the pool may use in all, tables included.
    pub budget_bytes: usize,
    /// Pages held by blocks, by format.
    pub used: ByFormat<usize>,
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
        self.used.f16 + self.used.int8
    }
}
