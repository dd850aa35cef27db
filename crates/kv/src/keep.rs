//! Spans of tokens that the client has marked: what must not be dropped, such as its instructions.

use std::ops::Range;

/// Most separate spans a sequence may mark.
pub const MAXIMUM_SPANS: usize = 64;

/// A span that cannot be marked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeepError {
    /// The span holds no token.
    #[error("keep {0:?}: the span is empty; its end must lie past its start")]
    Empty(Range<usize>),
    /// The sequence will never hold the span.
    #[error("keep {span:?}: the sequence holds at most {max_tokens} tokens; end the span there")]
    PastEnd {
        /// The span.
        span: Range<usize>,
        /// The sequence's `max_tokens`.
        max_tokens: usize,
    },
    /// More separate spans than [`MAXIMUM_SPANS`].
    #[error("keep {0:?}: at most {MAXIMUM_SPANS} separate spans can be kept; join some")]
    TooMany(Range<usize>),
}

/// Marked spans in token order; none touches another.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptSpans {
    spans: Vec<Range<usize>>,
}

impl KeptSpans {
    /// Marks `span`, joined with those it overlaps or touches.
    pub(crate) fn add(&mut self, span: Range<usize>) -> Result<(), KeepError> {
        if span.is_empty() {
            return Err(KeepError::Empty(span));
        }
        let start = self.spans.partition_point(|known| known.end < span.start);
        let end = self.spans.partition_point(|known| known.start <= span.end);
        if start == end && self.spans.len() == MAXIMUM_SPANS {
            return Err(KeepError::TooMany(span));
        }
        let joined = self.spans[start..end]
            .iter()
            .fold(span, |joined, known| joined.start.min(known.start)..joined.end.max(known.end));
        self.spans.splice(start..end, [joined]);
        Ok(())
    }

    /// Whether a marked token lies in `range`.
    pub(crate) fn meets(&self, range: Range<usize>) -> bool {
        let index = self.spans.partition_point(|span| span.end <= range.start);
        self.spans.get(index).is_some_and(|span| span.start < range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_sorted_joined_and_bounded() {
        let mut kept = KeptSpans::default();
        for span in [40..50, 10..20, 20..25, 30..31, 24..35] {
            kept.add(span).unwrap();
        }
        assert_eq!(kept.spans, [10..35, 40..50]);
        kept.add(0..100).unwrap();
        assert_eq!((kept.spans.len(), &kept.spans[0]), (1, &(0..100)));
        for index in 1..MAXIMUM_SPANS {
            kept.add(200 * index..200 * index + 1).unwrap();
        }
        let error = kept.add(99_000..99_001).unwrap_err();
        assert!(error.to_string().contains("at most 64"), "{error}");
        kept.add(150..250).unwrap();
        assert!(matches!(kept.add(7..7), Err(KeepError::Empty(_))));
        #[expect(clippy::reversed_empty_ranges, reason = "it must be refused")]
        let reversed = kept.add(9..7);
        assert!(matches!(reversed, Err(KeepError::Empty(_))));
    }

    /// Against a set of tokens.
    #[test]
    fn a_range_meets_a_span_where_they_share_a_token() {
        let mut kept = KeptSpans::default();
        kept.add(5..9).unwrap();
        kept.add(20..21).unwrap();
        let marked = |token: usize| (5..9).contains(&token) || token == 20;
        for start in 0..30 {
            for end in start + 1..30 {
                assert_eq!(kept.meets(start..end), (start..end).any(marked), "{start}..{end}");
            }
        }
    }
}
