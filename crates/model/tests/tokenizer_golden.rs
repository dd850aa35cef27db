//! Token ids against llama.cpp's: its own vectors, and strings tokenized with the two models of `reef pull`.

use std::path::PathBuf;

use reef_model::gguf::Gguf;
use reef_model::tokenizer::{Decode, Encode, Tokenizer};

const PLAIN: Encode = Encode { add_special: false, parse_special: true };

fn data(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The tokenizer in `file`, or a line that says why the test is skipped.
fn load(file: PathBuf, mend: &str) -> Option<Tokenizer> {
    if !file.exists() {
        eprintln!("skipped: no {} ({mend})", file.display());
        return None;
    }
    Some(Tokenizer::from_gguf(&Gguf::open(&file).unwrap()).unwrap())
}

/// A vocabulary of the shared goldens.
fn vocabulary(name: &str) -> Option<Tokenizer> {
    let shared = std::env::var_os("REEF_SHARED").map(PathBuf::from);
    let beside = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared"));
    let file = format!("golden/vocabs/ggml-vocab-{name}.gguf");
    load(shared.unwrap_or_else(beside).join(file), "set REEF_SHARED to where the goldens are")
}

/// A model of `reef pull`.
fn model(alias: &str) -> Option<Tokenizer> {
    let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = folder("REEF_HOME")
        .or_else(|| folder("XDG_CACHE_HOME").map(|path| path.join("reef")))
        .or_else(|| std::env::home_dir().map(|path| path.join(".cache/reef")))?;
    load(cache.join(format!("{alias}.gguf")), &format!("`reef pull {alias}` fetches it"))
}

/// The ids of each text of the vectors of `name` are llama.cpp's, and decode to the text.
fn check_vectors(name: &str) {
    let Some(tokenizer) = vocabulary(name) else { return };
    let texts = data(&format!("ggml-vocab-{name}.gguf.inp"));
    let ids = data(&format!("ggml-vocab-{name}.gguf.out"));
    let texts: Vec<&str> = texts.split_terminator("\n__ggml_vocab_test__\n").collect();
    let ids: Vec<&str> = ids.split_terminator('\n').collect();
    assert_eq!(texts.len(), ids.len());
    for (text, ids) in texts.iter().zip(ids) {
        let ids: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(tokenizer.encode(text, PLAIN).unwrap(), ids, "{name}: {text:?}");
        assert_eq!(tokenizer.decode(&ids, Decode::default()), *text, "{name}: {ids:?}");
    }
}

#[test]
fn gpt_2_vectors() {
    check_vectors("gpt-2");
}

#[test]
fn llama_bpe_vectors() {
    check_vectors("llama-bpe");
}

#[test]
fn llama_spm_vectors() {
    check_vectors("llama-spm");
}

#[test]
fn qwen2_vectors() {
    check_vectors("qwen2");
}

/// The ids of awkward strings are llama.cpp's, and decode to the strings.
fn check_model(alias: &str) {
    let Some(tokenizer) = model(alias) else { return };
    let golden: serde_json::Value =
        serde_json::from_str(&data(&format!("tokenizer-{alias}.json"))).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text, PLAIN).unwrap(), ids, "{alias}: {text:?}");
        let shown = Decode { show_special: true, continues: false };
        assert_eq!(tokenizer.decode(&ids, shown), text, "{alias}: {ids:?}");
    }
}

#[test]
fn smollm2_strings() {
    check_model("smollm2");
}

#[test]
fn gemma3_strings() {
    check_model("gemma3");
}
