//! Embeds every `configs/*.json` under its name, so that a new config is a new file and nothing else.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("configs");
    println!("cargo::rerun-if-changed={}", folder.display());
    let entries = fs::read_dir(&folder).expect("configs/ is part of the crate");
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let mut code = String::from(
        "/// Bundled configs: name and JSON text.\nstatic BUNDLED: &[(&str, &str)] = &[\n",
    );
    for path in files {
        let name = path.file_stem().expect("it ends in .json").to_string_lossy().into_owned();
        writeln!(code, "    ({name:?}, include_str!({:?})),", path).expect("memory");
    }
    code.push_str("];\n");
    let target = Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("bundled.rs");
    fs::write(target, code).expect("cargo's folder is writable");
}
