//! How the spans are cut now, for whoever looks at them from outside.

use super::Spans;

impl Spans {
    /// The page size that a span serves; `None` while it is empty.
    pub(crate) fn class_in_use(&self, span: u32) -> Option<usize> {
        let span = self.spans[span as usize];
        (span.used > 0).then_some(span.class as usize)
    }

    /// Spans that serve `class`.
    pub(crate) fn spans_in_use(&self, class: usize) -> usize {
        self.classes[class].spans
    }
}
