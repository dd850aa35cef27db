//! The real file: full disks, files that are damaged, cut, deleted or replaced under the store.

use std::fs::OpenOptions;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use super::*;

const SIZE: SpillSize = SpillSize { file_bytes: 4096 + 16 * 2560, slot_bytes: 2560 };

fn open(path: &Path) -> Subject {
    let store = Box::new(SpillFile::open(path, SIZE).unwrap());
    Subject { name: "file", store, clock: None, scratch: None }
}

/// Inverts a bit of the file.
fn flip(path: &Path, byte: u64) {
    let mut file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut read = [0];
    file.seek(SeekFrom::Start(byte)).unwrap();
    file.read_exact(&mut read).unwrap();
    file.seek(SeekFrom::Start(byte)).unwrap();
    file.write_all(&[read[0] ^ 0x10]).unwrap();
}

#[test]
fn a_flipped_byte_of_the_file_costs_its_record() {
    let (scratch, pool) = (Scratch::new(), pool_of(1 << 20));
    let path = scratch.path("spill");
    let mut subject = open(&path);
    // In the header of part 0, in the content of part 1, behind the content of part 2.
    for (round, byte) in [4096 + 50, 4096 + 2560 + 900, 4096 + 3 * 2560 - 1].into_iter().enumerate()
    {
        let ids = [10, 11].map(|id| id + 2 * round as u64);
        let mut sequences = ids.map(|id| filled(&pool, id, 2));
        // Slots 0 to 2 and 3 to 5, each time; the last one of a record is not full.
        let mut images = Vec::new();
        for (id, sequence) in ids.into_iter().zip(&mut sequences) {
            images.push(subject.put(id, sequence).unwrap());
        }
        flip(&path, byte);
        let [mut first, mut second] = sequences;
        let outcome = subject.get(ids[0], images.remove(0), &mut first);
        match round {
            2 => assert_eq!(outcome, Ok(()), "nothing lies there"),
            part => assert_eq!(outcome, Err(SpillError::Damaged { record: ids[0], part })),
        }
        subject.get(ids[1], images.remove(0), &mut second).unwrap();
        assert_eq!(content(&second), canary(ids[1], 2 * BLOCK_BYTES));
    }
    assert_eq!(subject.store.usage().used_bytes, 0);
    assert_pool_is_empty(&pool);
}

#[test]
fn a_truncated_file_costs_what_was_in_it_once() {
    let (scratch, pool) = (Scratch::new(), pool_of(1 << 20));
    let path = scratch.path("spill");
    let mut subject = open(&path);
    let mut sequences = [0, 1].map(|id| filled(&pool, id, 2));
    let mut images = Vec::new();
    for (id, sequence) in (0..).zip(&mut sequences) {
        images.push(subject.put(id, sequence).unwrap());
    }
    // Record 0 has slots 0 to 2.
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(4096 + 4 * 2560).unwrap();
    let [mut first, mut second] = sequences;
    let error = subject.get(1, images.remove(1), &mut second).unwrap_err();
    assert!(error.to_string().contains("the file ends there"), "{error}");
    subject.get(0, images.remove(0), &mut first).unwrap();
    assert_eq!(content(&first), canary(0, 2 * BLOCK_BYTES));
    // It goes on with what there is.
    for id in 2..8 {
        let mut sequence = filled(&pool, id, 4);
        let image = subject.put(id, &mut sequence).unwrap();
        subject.get(id, image, &mut sequence).unwrap();
        assert_eq!(content(&sequence), canary(id, 4 * BLOCK_BYTES));
    }
    drop((first, second));
    assert_pool_is_empty(&pool);
}

#[cfg(unix)]
#[test]
fn a_deleted_file_lives_as_long_as_the_store() {
    let (scratch, pool) = (Scratch::new(), pool_of(1 << 20));
    let path = scratch.path("spill");
    let mut subject = open(&path);
    let mut first = filled(&pool, 0, 2);
    let image = subject.put(0, &mut first).unwrap();
    std::fs::remove_file(&path).unwrap();
    // Another store takes the path.
    let mut other = open(&path);
    let mut foreign = filled(&pool, 7, 2);
    let foreign_image = other.put(0, &mut foreign).unwrap();
    subject.get(0, image, &mut first).unwrap();
    assert_eq!(content(&first), canary(0, 2 * BLOCK_BYTES));
    drop(subject);
    assert!(path.exists(), "the other's file");
    other.get(0, foreign_image, &mut foreign).unwrap();
    assert_eq!(content(&foreign), canary(7, 2 * BLOCK_BYTES));
    drop(other);
    assert!(!path.exists());
}

#[test]
fn a_file_overwritten_by_an_older_one_is_never_believed() {
    let (scratch, pool) = (Scratch::new(), pool_of(1 << 20));
    let path = scratch.path("spill");
    let mut subject = open(&path);
    subject.put(0, &mut filled(&pool, 5, 2)).unwrap();
    let older = std::fs::read(&path).unwrap();
    drop(subject);
    let mut subject = open(&path);
    let mut sequence = filled(&pool, 6, 2);
    // The same record number, length and slots.
    let image = subject.put(0, &mut sequence).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().write_all(&older).unwrap();
    let error = subject.get(0, image, &mut sequence).unwrap_err();
    assert_eq!(error, SpillError::Damaged { record: 0, part: 0 });
}

/// Linux has a file that is always full, and a file system that says so before it takes anything.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_fails_records_and_then_closes_the_store() {
    let pool = pool_of(1 << 20);
    let full = super::super::slot_file::open_unchecked("/dev/full".as_ref()).unwrap();
    let store = SpillFile::over(Box::new(full), SIZE, "/dev/full".as_ref()).unwrap();
    let (name, store) = ("full", Box::new(store));
    let mut subject = Subject { name, store, clock: None, scratch: None };
    for record in 0..FAILURES_TO_CLOSE as u64 {
        let error = subject.put(record, &mut filled(&pool, record, 2)).unwrap_err();
        assert!(error.to_string().contains("No space left on device"), "{error}");
        assert_eq!(subject.store.usage().used_bytes, 0);
        assert_pool_is_empty(&pool);
    }
    let closed = subject.put(99, &mut filled(&pool, 99, 2)).unwrap_err();
    assert!(matches!(closed, SpillError::Closed { .. }), "{closed}");
}
