//! Each kind of damage gives its own error, which names the byte and the field in one line.

use crate::builder::{ARRAY, BOOL, Builder, I64, STRING, TensorLine, U8, U16, U32, array, string};
use reef_model::gguf::Gguf;

/// Opens `bytes`, which must fail, and returns the message.
fn message(bytes: Vec<u8>) -> String {
    let line = Gguf::from_bytes(bytes).expect_err("a damaged file was accepted").to_string();
    assert!(!line.contains(char::is_control), "{line:?}");
    line
}

#[track_caller]
fn refused(file: &Builder, expected: &str) {
    let line = message(file.bytes());
    assert!(line.contains(expected), "{line}\n  lacks: {expected}");
}

fn one_key(value_type: u32, value: impl AsRef<[u8]>) -> Builder {
    Builder::new().key("k", value_type, value)
}

#[test]
fn not_a_gguf_file() {
    let mut file = Builder::new();
    file.magic = *b"ggj\n";
    refused(&file, "byte 0, magic: found \"ggj\\n\", not \"GGUF\"");
    assert_eq!(
        message(Vec::new()),
        "byte 0, magic: needs 4 bytes but the file has 0 left; it is truncated"
    );
}

#[test]
fn versions() {
    let mut file = Builder::new();
    for (version, expected) in [
        (1, "byte 4, version: 1; Reef reads versions 2 and 3"),
        (4, "byte 4, version: 4; Reef reads"),
        (0, "byte 4, version: 0; Reef reads"),
        (3u32.swap_bytes(), "byte 4, version: this file is big-endian"),
        (2u32.swap_bytes(), "this file is big-endian"),
    ] {
        file.version = version;
        refused(&file, expected);
    }
}

#[test]
fn every_truncation_is_refused() {
    let bytes = Builder::valid().bytes();
    let whole = Gguf::from_bytes(bytes.clone()).unwrap();
    let end = whole.tensors().map(|tensor| tensor.offset + tensor.data.len()).max().unwrap();
    assert_eq!(end, bytes.len());
    for length in 0..bytes.len() {
        let line = message(bytes[..length].to_vec());
        let known = ["truncated", "are possible here"].iter().any(|word| line.contains(word));
        assert!(known && line.starts_with("byte "), "cut to {length}: {line}");
    }
}

#[test]
fn counts_beyond_the_file() {
    let mut file = Builder::valid();
    file.tensor_count = Some(u64::MAX);
    refused(
        &file,
        "byte 8, tensor count: 18446744073709551615 is more than the 34 that are possible",
    );
    file.tensor_count = None;
    file.key_count = Some(1 << 40);
    refused(&file, "byte 16, metadata key count: 1099511627776 is more than the 63");
    file.key_count = Some(17);
    refused(&file, "byte ");
}

#[test]
fn counts_beyond_any_model() {
    // A file long enough for the counts; the caps hold all the same.
    let file = Builder { key_count: Some(65_537), ..Builder::new().data(1 << 20) };
    refused(&file, "metadata key count: 65537 is more than the 65536");
    let file = Builder { tensor_count: Some(1_048_577), ..Builder::new().data(27 << 20) };
    refused(&file, "tensor count: 1048577 is more than the 1048576");
}

#[test]
fn keys() {
    refused(&Builder::new().key("", U8, [0]), "byte 24, metadata key 0: empty");
    refused(
        &Builder::new().key([b'a', 0xff], U8, [0]),
        "byte 32, metadata key 0: not UTF-8 at its byte 1",
    );
    refused(
        &Builder::new().key("a".repeat(65_536), U8, [0]),
        "length of metadata key 0: 65536 is more than the 65535",
    );
    refused(&one_key(U8, [0]).key("k", U8, [0]), "byte 46, key k: given a second time");
    refused(&one_key(13, [0]), "byte 33, type of key k: 13 is not a GGUF value type");
}

#[test]
fn values() {
    refused(&one_key(BOOL, [2]), "byte 37, key k: a bool of value 2");
    refused(&one_key(STRING, string([0xc3])), "byte 45, value of key k: not UTF-8 at its byte 0");
    let huge = ((1u64 << 30) + 1).to_le_bytes();
    refused(
        &one_key(STRING, huge),
        "byte 37, length of value of key k: 1073741825 is more than the 1073741824",
    );
    refused(
        &one_key(STRING, 9u64.to_le_bytes()),
        "byte 45, value of key k: needs 9 bytes but the file has 0",
    );
    refused(&one_key(I64, [0; 3]), "byte 37, value of key k: needs 8 bytes but the file has 3");
}

#[test]
fn arrays() {
    refused(&one_key(ARRAY, array(ARRAY, 0, &[])), "byte 37, key k: an array of arrays");
    refused(&one_key(ARRAY, array(99, 0, &[])), "byte 37, type of key k: 99 is not");
    refused(
        &one_key(ARRAY, array(U32, u64::MAX, &[0; 9])),
        "byte 41, length of array k: 18446744073709551615 is more than the 2 that",
    );
    refused(&one_key(ARRAY, array(STRING, 2, &[0; 15])), "length of array k: 2 is more than the 1");
    refused(
        &one_key(ARRAY, array(STRING, 1, &string([0xff]))),
        "byte 57, value of key k: not UTF-8",
    );
    refused(&one_key(ARRAY, array(BOOL, 2, &[1, 7])), "byte 50, key k: a bool of value 7");
}

#[test]
fn alignments() {
    for wrong in [0u32, 1, 4, 24, 33, 1 << 21, u32::MAX] {
        let file = Builder::new().key("general.alignment", U32, wrong.to_le_bytes());
        refused(&file, &format!("byte 53, general.alignment: {wrong}; must be a power of two"));
    }
    let file = Builder::new().key("general.alignment", U16, 32u16.to_le_bytes());
    refused(&file, "byte 53, general.alignment: a value of type u16; must be");
}

#[test]
fn splits() {
    let part = |count: u16| Builder::new().key("split.count", U16, count.to_le_bytes());
    refused(&part(3), "byte 47, split.count: one of 3 parts; join them");
    assert!(Gguf::from_bytes(part(1).bytes()).is_ok());
    refused(
        &Builder::new().key("split.count", STRING, string("2")),
        "split.count: has type string",
    );
}

#[test]
fn tensor_descriptions() {
    let one = |dims: &[u64], type_id| Builder::new().tensor("t", dims, type_id, 0).data(64);
    refused(&one(&[1; 5], 0), "byte 33, tensor t: 5 dimensions; at most 4");
    refused(&one(&[2, 0], 0), "byte 45, tensor t: dimension 1 is 0");
    refused(&one(&[4], 4), "byte 45, tensor t: type id 4 is unknown");
    refused(&one(&[4], 1000), "tensor t: type id 1000 is unknown");
    refused(
        &one(&[33], 2),
        "byte 24, tensor t: rows of 33 elements are not whole Q4_0 blocks of 32",
    );
    refused(&one(&[16, 2], 2), "tensor t: rows of 16 elements are not whole Q4_0 blocks of 32");
    refused(&one(&[u64::MAX, 2], 0), "tensor t: its size overflows");
    refused(&one(&[1 << 32, 1 << 32], 0), "tensor t: its size overflows");
    refused(&one(&[u64::MAX], 0), "tensor t: its size overflows");
    refused(&Builder::new().tensor("", &[4], 0, 0).data(64), "byte 24, name of tensor 0: empty");
    refused(
        &Builder::new().tensor([0xff], &[4], 0, 0).data(64),
        "byte 32, name of tensor 0: not UTF-8",
    );
    let long = Builder::new().tensor("t".repeat(257), &[4], 0, 0).data(64);
    refused(&long, "length of name of tensor 0: 257 is more than the 256");
    let twice = one(&[4], 0).tensor("t", &[4], 0, 32);
    refused(&twice, "byte 65, tensor t: given a second time");
}

#[test]
fn tensor_places() {
    let at = |offset| Builder::new().tensor("t", &[16], 0, offset).data(64);
    assert!(Gguf::from_bytes(at(0).bytes()).is_ok());
    refused(&at(8), "byte 24, tensor t: data offset 8 is not a multiple of the alignment 32");
    refused(&at(32), "tensor t: data offset 32 with 64 bytes ends after the file (128 bytes)");
    refused(
        &at(u64::MAX - 31),
        "tensor t: data offset 18446744073709551584 with 64 bytes ends after",
    );
    let overlapping = at(0).tensor("u", &[8], 0, 32);
    refused(&overlapping, "byte 57, tensor u: its data overlaps that of tensor t");
    let mut same = at(0);
    same.tensors.push(TensorLine { name: b"u".to_vec(), ..same.tensors[0].clone() });
    refused(&same, "tensor u: its data overlaps that of tensor t");
}

#[test]
fn what_cannot_be_mapped() {
    let folder = env!("CARGO_MANIFEST_DIR");
    let line = Gguf::open(folder).unwrap_err().to_string();
    assert!(line.starts_with(folder) && line.contains("a directory; give the path"), "{line}");
    let missing = Gguf::open("no/such\nfile.gguf").unwrap_err().to_string();
    assert!(missing.starts_with("no/such\\nfile.gguf: cannot be read: "), "{missing}");
}

#[cfg(unix)]
#[test]
fn a_pipe_is_refused_without_waiting_for_a_writer() {
    let pipe = std::env::temp_dir().join(format!("reef-pipe-{}.gguf", std::process::id()));
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    if !made.is_ok_and(|status| status.success()) {
        return println!("skipped: no mkfifo here");
    }
    let line = Gguf::open(&pipe).unwrap_err().to_string();
    std::fs::remove_file(&pipe).unwrap();
    assert!(line.contains("not a regular file; give the path"), "{line}");
}
