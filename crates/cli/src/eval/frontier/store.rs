//! Finished cells in a file of JSON lines: each is written once it is done and not measured again.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use reef_engine::eval::Treatment;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// Goes up when cells are measured differently: older ones are then measured again.
const VERSION: u64 = 1;

/// What all cells of a run depend on.
#[derive(Clone, Debug)]
pub struct Inputs(Value);

impl Inputs {
    /// The model file by its SHA-256, the scored tokens by theirs, and `settings`.
    pub fn new(model: &Path, ids: &[u32], settings: Value) -> anyhow::Result<Inputs> {
        let mut file =
            File::open(model).with_context(|| format!("cannot read {}", model.display()))?;
        let mut digest = Sha256::new();
        std::io::copy(&mut file, &mut digest)
            .with_context(|| format!("cannot read {}", model.display()))?;
        let mut tokens = Sha256::new();
        ids.iter().for_each(|id| tokens.update(id.to_le_bytes()));
        Ok(Inputs(json!({
            "version": VERSION,
            "model_sha256": hex(&digest.finalize()),
            "tokens_sha256": hex(&tokens.finalize()),
            "tokens": ids.len(),
            "settings": settings,
        })))
    }

    fn of(&self, treatment: &Treatment) -> Value {
        let eviction = treatment.eviction.as_ref();
        let mut inputs = self.0.clone();
        inputs["cell"] = json!({
            "kv_format": treatment.format.name(),
            "sinks": treatment.sink_tokens,
            "tail": treatment.tail_tokens,
            "policy": eviction.map(|eviction| &eviction.policy),
            "budget": eviction.map(|eviction| eviction.budget_tokens),
        });
        inputs
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The file and the cells in it.
pub struct Store {
    path: PathBuf,
    inputs: Inputs,
    lines: Vec<Value>,
    /// Whether the file ends within a line: a run was killed while it wrote.
    torn: bool,
}

impl Store {
    /// Reads `path`, or makes it: a place that cannot be written is refused before hours of work. Lines of
    /// other inputs are kept; what is no JSON is passed over.
    pub fn open(path: &Path, inputs: Inputs) -> anyhow::Result<Store> {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        let bytes =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = String::from_utf8_lossy(&bytes);
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let torn = !text.is_empty() && !text.ends_with('\n');
        Ok(Store { path: path.to_path_buf(), inputs, lines, torn })
    }

    /// The cell of `treatment` under exactly these inputs.
    pub fn find(&self, treatment: &Treatment) -> Option<&Value> {
        let inputs = self.inputs.of(treatment);
        self.lines.iter().find(|line| line["inputs"] == inputs).map(|line| &line["result"])
    }

    /// Appends a finished cell.
    pub fn add(&mut self, treatment: &Treatment, result: Value) -> anyhow::Result<()> {
        let line = json!({"inputs": self.inputs.of(treatment), "result": result});
        let context = || format!("cannot write {}", self.path.display());
        let mut file =
            OpenOptions::new().create(true).append(true).open(&self.path).with_context(context)?;
        let start = if std::mem::take(&mut self.torn) { "\n" } else { "" };
        file.write_all(format!("{start}{line}\n").as_bytes()).with_context(context)?;
        self.lines.push(line);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reef_kv::page::PageFormat;

    /// A folder of this test alone, gone when it ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("reef-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn finished_cells_are_found_under_the_same_inputs_only() {
        let folder = Folder::new("frontier");
        let (model, path) = (folder.0.join("model"), folder.0.join("cells.jsonl"));
        std::fs::write(&model, "weights").unwrap();
        let open = |ids: &[u32], context: usize| {
            let inputs = Inputs::new(&model, ids, json!({"context": context})).unwrap();
            Store::open(&path, inputs).unwrap()
        };
        let (int4, int8) = (Treatment::flat(PageFormat::Int4), Treatment::flat(PageFormat::Int8));
        open(&[1, 2], 64).add(&int4, json!({"nll": 1.0})).unwrap();
        assert_eq!(open(&[1, 2], 64).find(&int4), Some(&json!({"nll": 1.0})));
        assert_eq!(open(&[1, 2], 64).find(&int8), None);
        assert_eq!(open(&[1, 3], 64).find(&int4), None);
        assert_eq!(open(&[1, 2], 65).find(&int4), None);
        std::fs::write(&model, "other weights").unwrap();
        assert_eq!(open(&[1, 2], 64).find(&int4), None);
    }

    #[test]
    fn a_line_cut_short_costs_that_cell_alone() {
        let folder = Folder::new("frontier-torn");
        let (model, path) = (folder.0.join("model"), folder.0.join("cells.jsonl"));
        std::fs::write(&model, "weights").unwrap();
        let open = || Store::open(&path, Inputs::new(&model, &[1], json!({})).unwrap()).unwrap();
        let cells = [PageFormat::Int8, PageFormat::K8V4, PageFormat::Int4].map(Treatment::flat);
        open().add(&cells[0], json!(0)).unwrap();
        open().add(&cells[1], json!(1)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 9]).unwrap();
        open().add(&cells[2], json!(2)).unwrap();
        let found = cells.each_ref().map(|cell| open().find(cell).cloned());
        assert_eq!(found, [Some(json!(0)), None, Some(json!(2))]);
        // Bytes that are no text cost their line alone, too.
        let mut damaged = b"\xff\xfe{\n".to_vec();
        damaged.extend(std::fs::read(&path).unwrap());
        std::fs::write(&path, damaged).unwrap();
        assert_eq!(open().find(&cells[2]), Some(&json!(2)));
        let nowhere = folder.0.join("none").join("cells");
        let error = Store::open(&nowhere, Inputs(json!({}))).err().unwrap();
        assert!(error.to_string().starts_with("cannot write"), "{error}");
    }
}
