//! A tensor that was repacked leaves the resident set; a file cut short is refused before it is read.

use std::path::{Path, PathBuf};

use crate::builder::Builder;
use reef_model::gguf::Gguf;

/// Writes a file for one test and returns its path.
fn written(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Resident KiB of this process's mapping of `path`.
#[cfg(target_os = "linux")]
fn resident_kib(path: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let name = path.canonicalize().unwrap().to_string_lossy().into_owned();
    let from = maps.find(&name).expect("the file is mapped");
    let line = maps[from..].lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn advice_frees_the_pages_of_one_tensor() {
    const MIB: usize = 1 << 20;
    let floats = (4 * MIB / 4) as u64;
    let file = Builder::new()
        .tensor("first", &[floats], 0, 0)
        .tensor("second", &[floats], 0, 4 * MIB as u64)
        .data(8 * MIB);
    let path = written("residency.gguf", &file.bytes());
    let gguf = Gguf::open(&path).unwrap();
    let sum = |name: &str| -> u64 {
        gguf.tensor(name).unwrap().data.iter().map(|&byte| u64::from(byte)).sum()
    };
    let before = (sum("first"), sum("second"));
    assert!(resident_kib(&path) >= 8 * 1024);
    gguf.advise_dont_need(&gguf.tensor("first").unwrap());
    // Less than the second tensor may be left: a huge page at the border goes as a whole.
    let after = resident_kib(&path);
    assert!(after < 5 * 1024, "{after} KiB resident");
    assert_eq!((sum("first"), sum("second")), before);
}

#[test]
fn a_mapped_file_is_checked_like_bytes() {
    let bytes = Builder::valid().bytes();
    let path = written("whole.gguf", &bytes);
    assert_eq!(Gguf::open(&path).unwrap().tensors().len(), 3);
    let path = written("cut.gguf", &bytes[..bytes.len() - 1]);
    let line = Gguf::open(&path).unwrap_err().to_string();
    assert!(line.contains("cut.gguf: byte ") && line.contains("ends after the file"), "{line}");
    let path = written("empty.gguf", &[]);
    let line = Gguf::open(&path).unwrap_err().to_string();
    assert!(line.contains("empty.gguf: byte 0, magic: needs 4 bytes"), "{line}");
}
