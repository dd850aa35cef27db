//! Processes that are killed, and processes that may not write so much.
#![cfg(unix)]

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;

/// Tells a child of these tests where its file is to be.
const PATH: &str = "REEF_TEST_SPILL_PATH";
const SIZE: SpillSize = SpillSize { file_bytes: 8 << 20, slot_bytes: 64 << 10 };

/// This test program, to run one test that is otherwise ignored.
fn child(test: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = format!("store::tests::process::{test}");
    command.args(["--exact", &name, "--ignored", "--nocapture"]).env(PATH, path);
    command
}

#[test]
#[ignore = "runs in a process that is killed; by itself it does nothing"]
fn stores_until_it_is_killed() {
    let Some(path) = std::env::var_os(PATH) else { return };
    let pool = pool_of(16 << 20);
    let mut store = SpillFile::open(path.as_ref(), SIZE).unwrap();
    let mut stored = 0;
    for record in 0.. {
        let bytes = 400 * BLOCK_BYTES;
        while !store.can_store(bytes) {
            for done in store.poll() {
                let SpillDone::Stored { record, .. } = done else { panic!("{done:?}") };
                store.discard(record);
                stored += 1;
                println!("\nstored {stored}");
            }
        }
        store.store(record, filled(&pool, record, 400).pin().1).unwrap();
    }
}

/// Kills it once it has stored a few records and is writing others.
fn kill_in_mid_write(mut child: Child) {
    let output = BufReader::new(child.stdout.take().unwrap());
    let stored = output.lines().map_while(Result::ok).filter(|line| line.starts_with("stored"));
    assert_eq!(stored.take(20).count(), 20, "the child has ended");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_process_leaves_nothing_that_is_believed_and_no_space_that_is_lost() {
    let (scratch, pool) = (Scratch::new(), pool_of(16 << 20));
    let path = scratch.path("spill");
    let mut command = child("stores_until_it_is_killed", &path);
    kill_in_mid_write(command.stdout(Stdio::piped()).spawn().unwrap());
    let left = std::fs::read(&path).unwrap();
    assert_eq!(left.len() as u64, SIZE.file_bytes);
    let is_slot = |slot: &[u8]| slot[32..40] == *b"reefslot";
    let slots = |file: &[u8]| file[4096..].chunks(64 << 10).filter(|slot| is_slot(slot)).count();
    assert!(slots(&left) > 20, "it has written {} slots", slots(&left));

    let store = Box::new(SpillFile::open(&path, SIZE).unwrap());
    let mut subject = Subject { name: "after", store, clock: None, scratch: None };
    assert_eq!(subject.store.usage().records, 0);
    assert_eq!(slots(&std::fs::read(&path).unwrap()), 0, "what it wrote is gone");
    let (image, _) = filled(&pool, 0, 400).pin();
    let pages = sequence_in(&pool, 0).restore(&image).unwrap();
    assert_eq!(subject.store.load(0, pages).unwrap_err(), SpillError::Unknown(0));
    // All of the space is there again.
    let blocks = subject.store.usage().capacity_bytes / BLOCK_BYTES;
    let mut sequence = filled(&pool, 1, blocks);
    let image = subject.put(1, &mut sequence).unwrap();
    subject.get(1, image, &mut sequence).unwrap();
    assert_eq!(content(&sequence), canary(1, blocks * BLOCK_BYTES));
}

#[test]
#[ignore = "runs in a process that may write small files only; by itself it does nothing"]
fn opens_what_it_may_not_write() {
    let Some(path) = std::env::var_os(PATH) else { return };
    let error = SpillFile::open(path.as_ref(), SIZE).err().expect("a file beyond the limit");
    assert!(matches!(error, SpillOpenError::NoSpace { .. }), "{error}");
    assert!(!Path::new(&path).exists());
    println!("\nrefused: {error}");
}

#[test]
fn a_limit_of_the_system_is_an_error_at_start() {
    let scratch = Scratch::new();
    let path = scratch.path("spill");
    // A shell sets the limit: 1 MiB in units of 512 bytes, with the signal ignored that would kill.
    let test = child("opens_what_it_may_not_write", &path);
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; ulimit -f 2048; exec \"$0\" \"$@\""]);
    shell.arg0("sh").arg(test.get_program()).args(test.get_args()).env(PATH, &path);
    let output = shell.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("\nrefused: ") && said.contains("choose a smaller size"), "{said}");
}
