//! A disk in memory that fails by script, for the simulation and for tests.

use std::io::{self, ErrorKind};

use super::transfer::SlotIo;

/// What a disk does wrong in one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// A write finds no space.
    NoSpace,
    /// An I/O error.
    Broken,
    /// Only half is moved; the rest can be had by asking again.
    Partial,
    /// Nothing is moved, as at the end of a file.
    Nothing,
    /// The bit of this number, counted over the operation's bytes and wrapping around, is inverted on the
    /// way.
    Flip(u64),
    /// A write is said to be done and is not; a read is not hindered.
    Lost,
    /// A read finds the bytes of another place: those of the first slot; a write goes where it should.
    Misplaced,
    /// The file is cut off where the operation begins, before it is done.
    Cut,
    /// The whole file is zeros, before the operation is done.
    Wiped,
    /// It takes so many microseconds longer.
    Slow(u64),
}

/// One read or write of a slot or of what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Its number, from 0.
    pub number: u64,
    /// Whether it is a write.
    pub write: bool,
    /// First byte of the file.
    pub offset: u64,
    /// Bytes.
    pub bytes: usize,
}

/// Says of each operation what goes wrong with it.
pub type FaultScript = Box<dyn FnMut(Operation) -> Option<Fault> + Send>;

/// A disk in memory.
pub(super) struct SimulatedDisk {
    bytes: Vec<u8>,
    /// Bytes it can hold.
    limit: u64,
    operations: u64,
    script: FaultScript,
    slow_us: u64,
}

impl SimulatedDisk {
    /// A disk of `limit` bytes, empty at first.
    pub(super) fn new(limit: u64, script: FaultScript) -> SimulatedDisk {
        SimulatedDisk { bytes: Vec::new(), limit, operations: 0, script, slow_us: 0 }
    }

    /// Microseconds that faults have cost since the last call.
    pub(super) fn take_slow_us(&mut self) -> u64 {
        std::mem::take(&mut self.slow_us)
    }

    fn fault(&mut self, write: bool, offset: u64, bytes: usize) -> Option<Fault> {
        let number = self.operations;
        self.operations += 1;
        let fault = (self.script)(Operation { number, write, offset, bytes });
        match fault {
            Some(Fault::Cut) => self.bytes.truncate(offset as usize),
            Some(Fault::Wiped) => self.bytes.fill(0),
            Some(Fault::Slow(us)) => self.slow_us = self.slow_us.saturating_add(us),
            _ => {}
        }
        fault
    }
}

/// How much of `bytes` is moved at all, or the error.
fn extent(fault: Option<Fault>, bytes: usize) -> io::Result<usize> {
    match fault {
        Some(Fault::Broken) => Err(io::Error::other("input/output error")),
        Some(Fault::Partial) => Ok(bytes.div_ceil(2)),
        Some(Fault::Nothing) => Ok(0),
        _ => Ok(bytes),
    }
}

fn flip(fault: Option<Fault>, bytes: &mut [u8]) {
    if let (Some(Fault::Flip(bit)), false) = (fault, bytes.is_empty()) {
        let bit = (bit % (bytes.len() as u64 * 8)) as usize;
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

impl SlotIo for SimulatedDisk {
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let fault = self.fault(false, offset, bytes.len());
        let asked = extent(fault, bytes.len())?;
        let offset = match fault {
            Some(Fault::Misplaced) => super::format::FILE_HEADER_BYTES,
            _ => offset,
        };
        let rest = self.bytes.get(offset as usize..).unwrap_or_default();
        let read = asked.min(rest.len());
        bytes[..read].copy_from_slice(&rest[..read]);
        flip(fault, &mut bytes[..read]);
        Ok(read)
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        let fault = self.fault(true, offset, bytes.len());
        let written = extent(fault, bytes.len())?;
        let end = offset + written as u64;
        if fault == Some(Fault::NoSpace) || end > self.limit {
            return Err(io::Error::new(ErrorKind::StorageFull, "no space left on device"));
        }
        if fault == Some(Fault::Lost) {
            return Ok(written);
        }
        if self.bytes.len() < end as usize {
            self.bytes.resize(end as usize, 0);
        }
        let place = &mut self.bytes[offset as usize..end as usize];
        place.copy_from_slice(&bytes[..written]);
        flip(fault, place);
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a write and then a read of `abcd` at byte 8 give where each goes wrong.
    fn written_and_read(write: Option<Fault>, read: Option<Fault>) -> (io::Result<usize>, Vec<u8>) {
        let script = move |operation: Operation| if operation.write { write } else { read };
        let mut disk = SimulatedDisk::new(100, Box::new(script));
        let written = disk.write_at(8, b"abcd");
        let mut bytes = [0xff; 4];
        let got = disk.read_at(8, &mut bytes).unwrap_or(0);
        (written, bytes[..got].to_vec())
    }

    #[test]
    fn each_fault_does_what_it_says() {
        let write = |fault| written_and_read(Some(fault), None);
        let read = |fault| written_and_read(None, Some(fault)).1;
        assert_eq!(written_and_read(None, None).1, b"abcd");
        assert_eq!(write(Fault::NoSpace).0.unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!(write(Fault::Broken).0.unwrap_err().kind(), ErrorKind::Other);
        assert_eq!(
            (write(Fault::Partial).0.unwrap(), write(Fault::Partial).1),
            (2, b"ab".to_vec())
        );
        assert_eq!((write(Fault::Nothing).0.unwrap(), write(Fault::Nothing).1), (0, vec![]));
        assert_eq!(
            (write(Fault::Flip(32)).0.unwrap(), write(Fault::Flip(32)).1),
            (4, b"`bcd".to_vec())
        );
        assert_eq!((write(Fault::Lost).0.unwrap(), write(Fault::Lost).1), (4, vec![]));
        assert_eq!((read(Fault::Broken), read(Fault::Nothing)), (vec![], vec![]));
        assert_eq!(
            (read(Fault::Partial), read(Fault::Flip(9))),
            (b"ab".to_vec(), b"a`cd".to_vec())
        );
        assert_eq!((read(Fault::Cut), read(Fault::Wiped)), (vec![], vec![0; 4]));
        assert_eq!(read(Fault::Misplaced), b"", "the first slot lies further on");
    }

    #[test]
    fn it_holds_no_more_than_its_limit_and_counts_time() {
        let script = |operation: Operation| Some(Fault::Slow(operation.number + 1));
        let mut disk = SimulatedDisk::new(10, Box::new(script));
        assert_eq!(disk.write_at(6, b"abcd").unwrap(), 4);
        assert_eq!(disk.write_at(7, b"abcd").unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!((disk.take_slow_us(), disk.take_slow_us()), (3, 0));
    }
}
