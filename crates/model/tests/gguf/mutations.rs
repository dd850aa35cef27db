//! Random damage, and the fuzzer's corpus: an answer every time, never a panic.

use std::path::Path;

use crate::builder::Builder;
use proptest::prelude::*;
use reef_model::gguf::{Gguf, Value};

/// Opens the file and, if it is accepted, reads all of it.
fn open_and_read(bytes: &[u8]) {
    let file = match Gguf::from_bytes(bytes) {
        Ok(file) => file,
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains(char::is_control) && line.len() < 1200, "{line:?}");
            return;
        }
    };
    for (key, value) in file.metadata() {
        let _ = (file.u64(key), file.f32(key), file.bool(key), file.str(key));
        let _ = (file.i32_array(key), file.f32_array(key), file.u32_per_layer(key, 2));
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
        }
    }
    for tensor in file.tensors() {
        assert_eq!(tensor.tensor_type.bytes_of(tensor.elements()), Some(tensor.data.len()));
        assert_eq!(file.tensor(tensor.name).unwrap().offset, tensor.offset);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4096) })]

    #[test]
    fn changed_bytes(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        keep in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = Builder::valid().bytes();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(keep) = keep {
            bytes.truncate(keep.index(bytes.len()));
        }
        open_and_read(&bytes);
    }

    #[test]
    fn changed_numbers(
        at in any::<prop::sample::Index>(),
        value in prop_oneof![
            any::<u64>(),
            0u64..64,
            Just(u64::MAX),
            Just(1 << 63),
            Just(u64::from(u32::MAX)),
            Just(i64::MAX as u64),
        ],
        wide in any::<bool>(),
    ) {
        let mut bytes = Builder::valid().bytes();
        let width = if wide { 8 } else { 4 };
        let at = at.index(bytes.len() - width);
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        open_and_read(&bytes);
    }
}

#[test]
fn the_corpus_of_the_fuzzer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/gguf");
    let entries = std::fs::read_dir(&folder).expect("fuzz/corpus/gguf is part of the repository");
    let mut accepted = 0;
    let mut count = 0;
    for entry in entries {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        open_and_read(&bytes);
        accepted += usize::from(Gguf::from_bytes(bytes).is_ok());
        count += 1;
    }
    assert!(count >= 100, "only {count} files in {}", folder.display());
    assert!(
        accepted >= 10,
        "only {accepted} of {count} files are valid: the corpus lost its depth"
    );
}
