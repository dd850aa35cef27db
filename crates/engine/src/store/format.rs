//! What lies in a slot: 64 bytes that say whose part this is, then a part of a record.
//!
//! ```text
//! 0..32   BLAKE3 of all that follows in the slot
//! 32..40  magic
//! 40..48  epoch: random, drawn when the file was made
//! 48..56  record
//! 56..60  part: index of the slot in its record
//! 60..64  length of the part in bytes
//! 64..    the part
//! ```
//! Numbers are little-endian. The reader knows record, part and length beforehand, so a slot is good only
//! where all of them agree: not where the disk lost a write (the older record shows), read elsewhere, or
//! kept the bytes of a process that was killed (another epoch).

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::Range;

use super::SpillOpenError;

/// Bytes before the part in each slot.
pub(super) const HEADER_BYTES: usize = 64;

/// Bytes before the first slot of a file: they say what the file is.
pub(super) const FILE_HEADER_BYTES: u64 = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"reefslot");
const HASH: Range<usize> = 0..32;
const FIELDS: Range<usize> = 32..HEADER_BYTES;

/// How large a spill store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpillSize {
    /// Bytes of the whole file: never more.
    pub file_bytes: u64,
    /// Bytes of a slot, its header of 64 included: the piece in which records are written, read and
    /// checked, and all that is staged in memory. A multiple of 64 from 128 to 16 MiB.
    pub slot_bytes: usize,
}

impl SpillSize {
    /// Bytes of a slot where nobody says otherwise: a record of a few MiB wastes little, and a call of
    /// the system moves enough.
    pub const SLOT_BYTES: usize = 256 << 10;

    /// `file_bytes` bytes in slots of the usual size.
    pub fn new(file_bytes: u64) -> SpillSize {
        SpillSize { file_bytes, slot_bytes: SpillSize::SLOT_BYTES }
    }

    /// Number of slots.
    ///
    /// # Errors
    /// [`SpillOpenError::Size`] where there is none, where a slot's size is out of range, or where there
    /// are more than `u32` counts.
    pub(super) fn slots(self) -> Result<u32, SpillOpenError> {
        let SpillSize { file_bytes, slot_bytes } = self;
        let refused = |reason: String| Err(SpillOpenError::Size { file_bytes, reason });
        if !(128..=16 << 20).contains(&slot_bytes) || !slot_bytes.is_multiple_of(64) {
            return refused(format!(
                "slot_bytes {slot_bytes}: a multiple of 64 from 128 to 16777216"
            ));
        }
        let slots = file_bytes.saturating_sub(FILE_HEADER_BYTES) / slot_bytes as u64;
        match u32::try_from(slots) {
            Ok(0) => refused(format!("at least {}", FILE_HEADER_BYTES + slot_bytes as u64)),
            Ok(slots) => Ok(slots),
            Err(_) => refused(format!("at most {}", u64::from(u32::MAX) * slot_bytes as u64)),
        }
    }
}

/// How slots lie in a file, and how their content is sealed.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotFormat {
    slot_bytes: usize,
    epoch: u64,
}

impl SlotFormat {
    pub(super) fn new(slot_bytes: usize, epoch: u64) -> SlotFormat {
        SlotFormat { slot_bytes, epoch }
    }

    /// An epoch that no other file has.
    pub(super) fn random_epoch() -> u64 {
        // The standard library's hashers are keyed with random bytes of the system.
        RandomState::new().build_hasher().finish()
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes of a record that a slot holds.
    pub(super) fn part_bytes(&self) -> usize {
        self.slot_bytes - HEADER_BYTES
    }

    /// Byte of the file at which a slot begins.
    pub(super) fn offset(&self, slot: u32) -> u64 {
        FILE_HEADER_BYTES + u64::from(slot) * self.slot_bytes as u64
    }

    fn fields(&self, record: u64, part: usize, length: usize) -> [u8; FIELDS.end - FIELDS.start] {
        let mut fields = [0; FIELDS.end - FIELDS.start];
        fields[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        fields[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        fields[16..24].copy_from_slice(&record.to_le_bytes());
        fields[24..28].copy_from_slice(&(part as u32).to_le_bytes());
        fields[28..32].copy_from_slice(&(length as u32).to_le_bytes());
        fields
    }

    /// Writes the header of the slot in `slot`, whose part is in place behind it.
    pub(super) fn seal(&self, slot: &mut [u8], record: u64, part: usize) {
        let length = slot.len() - HEADER_BYTES;
        slot[FIELDS].copy_from_slice(&self.fields(record, part, length));
        let hash = blake3::hash(&slot[FIELDS.start..]);
        slot[HASH].copy_from_slice(hash.as_bytes());
    }

    /// The part in `slot`; `None` where the slot is not that part of that record, byte for byte.
    pub(super) fn open<'a>(&self, slot: &'a [u8], record: u64, part: usize) -> Option<&'a [u8]> {
        let length = slot.len() - HEADER_BYTES;
        let whole = slot[FIELDS] == self.fields(record, part, length)
            && slot[HASH] == *blake3::hash(&slot[FIELDS.start..]).as_bytes();
        #[cfg(feature = "mutants")]
        let whole = whole || crate::mutant::is_active(crate::mutant::Mutant::SkipChecksum);
        whole.then(|| &slot[HEADER_BYTES..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(format: SlotFormat, record: u64, part: usize, bytes: &[u8]) -> Vec<u8> {
        let mut slot = vec![0xaa; HEADER_BYTES];
        slot.extend_from_slice(bytes);
        format.seal(&mut slot, record, part);
        slot
    }

    #[test]
    fn a_slot_opens_only_as_what_it_was_sealed() {
        let format = SlotFormat::new(256, 7);
        let slot = sealed(format, 3, 1, b"pages");
        assert_eq!(format.open(&slot, 3, 1), Some(&b"pages"[..]));
        assert_eq!(format.open(&slot, 4, 1), None);
        assert_eq!(format.open(&slot, 3, 0), None);
        assert_eq!(format.open(&slot[..slot.len() - 1], 3, 1), None);
        assert_eq!(SlotFormat::new(256, 8).open(&slot, 3, 1), None, "another epoch");
        assert_eq!(format.open(&[0; 256], 3, 1), None, "zeros");
    }

    #[test]
    fn every_flipped_bit_shows() {
        let format = SlotFormat::new(256, 7);
        let slot = sealed(format, 3, 1, &[0x5a; 64]);
        for bit in 0..slot.len() * 8 {
            let mut damaged = slot.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(format.open(&damaged, 3, 1), None, "bit {bit}");
        }
    }

    #[test]
    fn epochs_differ_and_sizes_are_checked() {
        assert_ne!(SlotFormat::random_epoch(), SlotFormat::random_epoch());
        let slots = |file_bytes, slot_bytes| SpillSize { file_bytes, slot_bytes }.slots();
        assert_eq!(slots(4096 + 128, 128).unwrap(), 1);
        assert_eq!(slots(4096 + 3 * 128 - 1, 128).unwrap(), 2);
        for (file_bytes, slot_bytes) in [(0, 128), (4096 + 127, 128), (u64::MAX, 128), (1 << 20, 0)]
        {
            assert!(slots(file_bytes, slot_bytes).is_err(), "{file_bytes} in {slot_bytes}");
        }
        for slot_bytes in [64, 100, 200, 32 << 20] {
            let error = slots(1 << 30, slot_bytes).unwrap_err().to_string();
            assert!(error.contains(&format!("slot_bytes {slot_bytes}")), "{error}");
        }
    }
}
