//! Files made by others: the goldens (where they are) and fetched models.

use std::path::{Path, PathBuf};

use reef_model::gguf::{Gguf, TensorType};

/// Folder `name` of the shared data, or `None` with a line that says the test was skipped.
fn shared(name: &str) -> Option<PathBuf> {
    let root = std::env::var_os("REEF_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
        PathBuf::from,
    );
    let folder = root.join(name);
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: no folder {}", folder.display());
    None
}

/// The `.gguf` files in a folder and in the folders in it.
fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let mut files = list(folder);
    files.extend(files.clone().iter().flat_map(|inner| list(inner)));
    files.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    files
}

/// Opens a file and reads each of its values and the ends of each tensor.
fn open(path: &Path) -> Gguf {
    let file = Gguf::open(path).unwrap();
    for (key, value) in file.metadata() {
        assert_eq!(file.get(key), Some(value), "{key}");
    }
    for tensor in file.tensors() {
        assert!(!tensor.data.is_empty() && file.tensor(tensor.name).unwrap().dims == tensor.dims);
        let before = (tensor.data[0], tensor.data[tensor.data.len() - 1]);
        file.advise_dont_need(&tensor);
        let after = (tensor.data[0], tensor.data[tensor.data.len() - 1]);
        assert_eq!(before, after, "{}: advice changed the data", tensor.name);
    }
    file
}

#[test]
fn golden_architectures() {
    let Some(folder) = shared("golden/archs") else { return };
    let files = gguf_files(&folder);
    assert!(files.len() >= 10);
    for path in files {
        let file = open(&path);
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        let architecture = file.architecture().unwrap();
        assert!(stem.starts_with(architecture), "{stem}: {architecture}");
        assert_eq!(file.u32(&format!("{architecture}.block_count")).unwrap(), 2);
        let table = file.tensor("token_embd.weight").unwrap();
        assert_eq!((table.dims[1], table.tensor_type), (128, TensorType::F32));
    }
}

#[test]
fn golden_vocabularies() {
    let Some(folder) = shared("golden/vocabs") else { return };
    let known =
        [("gpt-2", 50_257), ("llama-bpe", 128_256), ("llama-spm", 32_000), ("qwen2", 151_936)];
    for (name, size) in known {
        let file = open(&folder.join(format!("ggml-vocab-{name}.gguf")));
        assert_eq!(file.str_array("tokenizer.ggml.tokens").unwrap().count(), size);
        assert_eq!(file.i32_array("tokenizer.ggml.token_type").unwrap().len(), size);
        assert_eq!(file.tensors().len(), 0);
    }
}

#[test]
fn fetched_models() {
    let folder = std::env::var_os("REEF_HOME").map(PathBuf::from).or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        Some(cache.or(home)?.join("reef"))
    });
    let files = folder.as_deref().map(gguf_files).unwrap_or_default();
    if files.is_empty() {
        eprintln!("skipped: no fetched model");
    }
    for path in files {
        let file = open(&path);
        let table = file.tensor("token_embd.weight").unwrap();
        assert_eq!(table.dims[1], file.str_array("tokenizer.ggml.tokens").unwrap().count());
    }
}
