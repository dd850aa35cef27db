//! The GGUF reader: what a good file gives, and one clear line for each way a file can be bad.

mod builder;
mod damage;
mod mutations;
mod real_files;
mod residency;

use builder::{ARRAY, Builder, F64, I32, STRING, U8, U16, array, string};
use reef_model::gguf::{Gguf, GgufError, Optional, TensorType, Value, ValueType, escape};

fn valid() -> Gguf {
    Gguf::from_bytes(Builder::valid().bytes()).expect("a valid file")
}

#[test]
fn the_header_is_read() {
    let file = valid();
    assert_eq!(file.version(), 3);
    assert_eq!(file.alignment(), 32);
    assert_eq!(file.architecture().unwrap(), "llama");
    assert_eq!(file.file_size(), Builder::valid().bytes().len());
    assert_eq!(file.metadata().len(), 16);
    let first = file.metadata().next().unwrap();
    assert_eq!(first, ("general.architecture", Value::Str("llama")));
    let first_data = file.tensors().map(|tensor| tensor.offset).min().unwrap();
    assert_eq!(file.preamble(), &Builder::valid().bytes()[..first_data]);
    let mut older = Builder::valid();
    older.version = 2;
    assert_eq!(Gguf::from_bytes(older.bytes()).unwrap().version(), 2);
}

#[test]
fn integers_of_any_width_are_accepted_where_they_fit() {
    let file = valid();
    assert_eq!(file.u32("llama.block_count").unwrap(), 2);
    assert_eq!(file.usize("test.u8").unwrap(), 7);
    assert_eq!(file.u64("test.u64").unwrap(), u64::MAX);
    for (key, line) in [
        ("test.i8", "key test.i8: value -1 does not fit a 32-bit unsigned integer"),
        ("test.u64", "value 18446744073709551615 does not fit"),
        ("test.f64", "key test.f64: has type f64, expected a 32-bit unsigned integer"),
        ("tokenizer.ggml.tokens", "has type array of 3 string, expected"),
        (
            "test.none",
            "key test.none is missing: the file is incomplete, fetch or convert it again",
        ),
    ] {
        let error = file.u32(key).unwrap_err().to_string();
        assert!(error.contains(line), "{error}");
    }
}

#[test]
fn other_scalars_are_read_by_type() {
    let file = valid();
    assert_eq!(file.f32("llama.rope.freq_base").unwrap(), 1e4);
    assert_eq!(file.f32("test.f64").unwrap(), 0.5);
    assert!(file.bool("test.bool").unwrap());
    assert!(matches!(file.bool("test.u8"), Err(GgufError::WrongType { .. })));
    assert!(matches!(file.str("test.u8"), Err(GgufError::WrongType { .. })));
    assert!(matches!(file.f32("test.u8"), Err(GgufError::WrongType { .. })));
    assert_eq!(file.u32("test.none").optional().unwrap(), None);
    assert!(file.u32("test.f64").optional().is_err());
}

#[test]
fn arrays_are_views_of_the_file() {
    let file = valid();
    let tokens: Vec<&str> = file.str_array("tokenizer.ggml.tokens").unwrap().collect();
    assert_eq!(tokens, ["<s>", "é", ""]);
    assert_eq!(file.str_array("tokenizer.ggml.tokens").unwrap().len(), 3);
    assert_eq!(file.i32_array("tokenizer.ggml.token_type").unwrap(), [1, 3]);
    assert_eq!(file.u32_array("test.flags").unwrap(), [1, 0, 1]);
    assert!(file.f32_array("test.empty").unwrap().is_empty());
    assert!(matches!(file.f32_array("test.flags"), Err(GgufError::WrongType { .. })));
    let Some(Value::Array(flags)) = file.get("test.flags") else { panic!("an array") };
    assert_eq!((flags.element_type(), flags.len(), flags.is_empty()), (ValueType::Bool, 3, false));
    assert!(flags.strings().is_none());
}

#[test]
fn a_number_per_layer_may_be_one_number() {
    let mut bytes = Vec::new();
    for count in [4i32, 0, 4] {
        bytes.extend(count.to_le_bytes());
    }
    let file = Builder::new()
        .key("heads", ARRAY, array(I32, 3, &bytes))
        .key("all", U16, 8u16.to_le_bytes())
        .key("float", F64, 8f64.to_le_bytes());
    let file = Gguf::from_bytes(file.bytes()).unwrap();
    assert_eq!(file.u32_per_layer("heads", 3).unwrap(), [4, 0, 4]);
    assert_eq!(file.u32_per_layer("all", 2).unwrap(), [8, 8]);
    let error = file.u32_per_layer("heads", 4).unwrap_err().to_string();
    assert!(error.ends_with("key heads: 3 values, expected 4"), "{error}");
    assert!(file.u32_per_layer("float", 4).is_err());
}

#[test]
fn tensors_are_slices_of_the_file() {
    let bytes = Builder::valid().bytes();
    let file = valid();
    assert_eq!(file.tensors().len(), 3);
    let norm = file.tensor("output_norm.weight").unwrap();
    assert_eq!((norm.dims, norm.tensor_type), (&[3usize][..], TensorType::F32));
    assert_eq!(norm.data, &bytes[norm.offset..][..12]);
    assert_eq!(norm.data[0], 64);
    norm.require_readable().unwrap();
    file.advise_dont_need(&norm);
    let missing = file.tensor("output.weight").unwrap_err().to_string();
    assert_eq!(
        missing,
        "tensor output.weight is missing: the file is incomplete, fetch or convert it again"
    );
}

#[test]
fn a_known_type_that_reef_does_not_compute_with_is_refused_on_loading_only() {
    let file = valid();
    let tensor = file.tensor("blk.0.ffn_up.weight").unwrap();
    assert_eq!(tensor.data.len(), 18);
    assert_eq!(
        tensor.require_readable().unwrap_err().to_string(),
        "tensor blk.0.ffn_up.weight has type IQ4_NL, which Reef does not read; convert the model \
         to one of Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K F16 BF16 F32"
    );
}

#[test]
fn tensor_types_have_unique_ids_and_whole_blocks() {
    for (index, &tensor_type) in TensorType::ALL.iter().enumerate() {
        assert_eq!(TensorType::from_id(tensor_type.id()), Some(tensor_type));
        let block = tensor_type.block_elements();
        assert_eq!(tensor_type.bytes_of(3 * block), Some(3 * tensor_type.block_bytes()));
        assert_eq!(tensor_type.bytes_of(block + 1).is_some(), block == 1);
        assert!(TensorType::ALL[..index].iter().all(|earlier| earlier.id() < tensor_type.id()));
    }
    assert_eq!(TensorType::F64.bytes_of(usize::MAX), None);
    for id in [4, 5, 31, 33, 36, 38, 42, u32::MAX] {
        assert_eq!(TensorType::from_id(id), None);
    }
}

#[test]
fn a_file_without_tensors_needs_no_data_section() {
    let file = Builder::new().key("a", STRING, string("b")).bytes();
    assert_eq!(Gguf::from_bytes(file).unwrap().tensors().len(), 0);
}

#[test]
fn a_single_number_has_no_dimensions() {
    let file = Builder::new().tensor("scale", &[], 0, 0).data(4).bytes();
    let file = Gguf::from_bytes(file).unwrap();
    let scale = file.tensor("scale").unwrap();
    assert_eq!((scale.elements(), scale.dims.len(), scale.data.len()), (1, 0, 4));
}

#[test]
fn other_alignments_are_followed() {
    let mut file = Builder::new()
        .key("general.alignment", 4, 256u32.to_le_bytes())
        .tensor("a", &[4], 0, 0)
        .tensor("b", &[4], 0, 256)
        .data(272);
    file.alignment = 256;
    let file = Gguf::from_bytes(file.bytes()).unwrap();
    assert_eq!(file.tensor("b").unwrap().offset % 256, 0);
    assert_eq!(file.tensor("b").unwrap().data[0], 0);
}

#[test]
fn names_from_a_file_cannot_reach_the_terminal_raw() {
    assert_eq!(escape("a\u{1b}[2J\n\u{202e}é'\\"), "a\\u{1b}[2J\\n\\u{202e}é'\\\\");
    let file = Builder::new().key("a\n\u{1b}", U8, [0]).key("a\n\u{1b}", U8, [0]).bytes();
    let error = Gguf::from_bytes(file).unwrap_err().to_string();
    assert!(error.contains("key a\\n\\u{1b}: given a second time"), "{error}");
}
