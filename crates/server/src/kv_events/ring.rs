//! The batches sent last, for subscribers that have missed some.

use std::collections::VecDeque;

use bytes::Bytes;

/// Batches kept at most; what vLLM keeps.
const MOST_BATCHES: usize = 10_000;
/// Bytes of payloads kept at most.
const MOST_BYTES: usize = 16 << 20;

/// A bounded run of batches without a gap.
#[derive(Debug, Default)]
pub struct Ring {
    batches: VecDeque<Bytes>,
    bytes: usize,
    /// Number of the next batch.
    next: u64,
}

impl Ring {
    /// Number of the batch that is pushed next.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Keeps a batch; the oldest ones go where there are too many.
    pub fn push(&mut self, payload: Bytes) {
        self.next += 1;
        self.bytes += payload.len();
        self.batches.push_back(payload);
        while self.batches.len() > MOST_BATCHES || self.bytes > MOST_BYTES {
            let Some(oldest) = self.batches.pop_front() else { return };
            self.bytes -= oldest.len();
        }
    }

    /// The batches from number `start` on, with their numbers; `None` where the first of them is not kept.
    pub fn since(&self, start: u64) -> Option<Vec<(u64, Bytes)>> {
        let oldest = self.next - self.batches.len() as u64;
        let skipped = usize::try_from(start.checked_sub(oldest)?).ok()?;
        let kept = self.batches.iter().cloned().enumerate().skip(skipped);
        Some(kept.map(|(index, payload)| (oldest + index as u64, payload)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(ring: &Ring, start: u64) -> Option<Vec<u64>> {
        Some(ring.since(start)?.into_iter().map(|(number, _)| number).collect())
    }

    #[test]
    fn what_is_kept_is_found_by_its_number() {
        let mut ring = Ring::default();
        assert_eq!(numbers(&ring, 0), Some(vec![]));
        for byte in 0..5 {
            assert_eq!(ring.next(), u64::from(byte));
            ring.push(vec![byte].into());
        }
        assert_eq!(numbers(&ring, 3), Some(vec![3, 4]));
        assert_eq!(ring.since(3).unwrap()[0].1[..], [3]);
        assert_eq!(numbers(&ring, 5), Some(vec![]));
        assert_eq!(numbers(&ring, u64::MAX), Some(vec![]));
    }

    #[test]
    fn it_stays_within_its_bounds_and_knows_what_it_has_lost() {
        let mut ring = Ring::default();
        for _ in 0..MOST_BATCHES as u64 + 3 {
            ring.push(Bytes::from_static(b"x"));
        }
        assert_eq!((ring.batches.len(), ring.bytes), (MOST_BATCHES, MOST_BATCHES));
        assert_eq!(numbers(&ring, 2), None);
        assert_eq!(numbers(&ring, 3).unwrap().len(), MOST_BATCHES);
        ring.push(vec![0; MOST_BYTES - 2].into());
        assert!(ring.bytes <= MOST_BYTES);
        assert_eq!(numbers(&ring, ring.next() - 3).unwrap().len(), 3);
        assert_eq!(numbers(&ring, ring.next() - 4), None);
        // One that is larger than everything that may be kept is not kept either.
        ring.push(vec![0; MOST_BYTES + 1].into());
        assert_eq!((ring.batches.len(), ring.bytes), (0, 0));
        assert_eq!(numbers(&ring, ring.next() - 1), None);
        assert_eq!(numbers(&ring, ring.next()), Some(vec![]));
    }
}
