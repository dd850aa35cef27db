//! No file, however damaged, makes the GGUF reader panic, hang or take unbounded memory.
//!
//! The reader's source is included rather than linked: only it is instrumented, and the target builds
//! in seconds without the rest of `reef-model`.
#![no_main]

#[allow(dead_code, unused_imports)]
#[path = "../../crates/model/src/gguf/mod.rs"]
mod gguf;

use gguf::{Gguf, Value};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| match Gguf::from_bytes(bytes) {
    Ok(file) => read_all(&file),
    Err(error) => {
        let line = error.to_string();
        assert!(!line.contains(char::is_control) && line.len() < 1200, "{line:?}");
    }
});

/// Reads everything an accepted file offers, and checks what the reader promises about it.
fn read_all(file: &Gguf) {
    for (key, value) in file.metadata() {
        assert_eq!(file.get(key).map(|found| found.value_type()), Some(value.value_type()));
        let _ = (file.u32(key), file.u64(key), file.f32(key), file.bool(key), file.str(key));
        let _ = (file.u32_array(key), file.i32_array(key), file.f32_array(key));
        let _ = (file.u32_per_layer(key, 3), file.usize(key));
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
            let strings = file.str_array(key).map(Iterator::count).unwrap_or(array.len());
            assert_eq!(strings, array.len());
        }
    }
    for tensor in file.tensors() {
        assert_eq!(file.tensor(tensor.name).expect("listed"), tensor);
        assert_eq!(tensor.tensor_type.bytes_of(tensor.elements()), Some(tensor.data.len()));
        assert_eq!(tensor.offset % file.alignment(), 0);
        assert!(tensor.offset + tensor.data.len() <= file.file_size());
        let _ = tensor.require_readable();
        file.advise_dont_need(&tensor);
    }
}
