//! One row of the table: an engine's start as its log and flags tell it.

use std::collections::HashMap;

use super::cells::{self, Printed};
use crate::device;
use crate::dtype::KvDtype;
use crate::engines::setup::{Draft, DraftKind, Setup};
use crate::engines::version::Version;
use crate::engines::vllm::behavior;
use crate::engines::weights::WeightFormat;
use crate::engines::{self, Engine, GIB};
use crate::figure::{Figure, Unit};
use crate::model::{Cache, Model};

/// Tokens of a block on the CPU backend, where no flag says: vllm#29233 estimates 37,376 tokens for 4 GiB.
const CPU_BLOCK: u64 = 128;

/// The cells of a row by column.
#[derive(Clone, Debug, Default)]
pub struct Row(pub HashMap<String, String>);

impl Row {
    /// The text of a cell; empty where the table has no such column.
    pub fn text(&self, column: &str) -> &str {
        self.0.get(column).map_or("", |cell| cell.trim())
    }

    /// The first number of a cell.
    pub fn printed(&self, column: &str) -> Option<Printed> {
        Printed::parse(self.text(column))
    }

    /// A cell in GiB as bytes.
    pub fn bytes(&self, column: &str) -> Option<Printed> {
        Some(self.printed(column)?.scaled(GIB))
    }

    /// A whole number.
    pub fn whole(&self, column: &str) -> Option<u64> {
        cells::whole(self.text(column))
    }

    /// The engine.
    pub fn engine(&self) -> Option<&'static dyn Engine> {
        engines::find(self.text("engine"))
    }

    /// All that the row says in words about flags and model, in lower case.
    fn words(&self) -> String {
        ["other_flags", "model", "family"].map(|column| self.text(column)).join("; ").to_lowercase()
    }

    /// The setup that the row's flags describe, nothing of it measured.
    pub fn setup(&self, model: &Model) -> Setup {
        let words = self.words();
        let (version, first_engine) = match self.engine().map(Engine::name) {
            // Another fork's own version numbers mean nothing here: only `V0` does.
            Some("vllm") if self.text("engine").contains("V0") => (Version::new(0, 7), true),
            Some("vllm") => behavior::parse_version(self.text("engine_version")),
            _ => (
                Version::parse(self.text("engine_version"), 10).unwrap_or(Version::new(0, 0)),
                false,
            ),
        };
        let count = |column| self.whole(column).filter(|count| *count > 0).unwrap_or(1);
        let (kv_keys, kv_values) = self.kv_dtypes();
        let device = find_device(self.text("gpu")).filter(|device| self.has_memory_of(device));
        let latent = model.layers.iter().any(|layer| matches!(layer, Cache::Latent(_)));
        let fraction = cells::after(&words, "mem-fraction-static");
        let recurrent = model.layers.iter().any(|layer| matches!(layer, Cache::Recurrent(_)));
        Setup {
            version,
            first_engine,
            device: device.map_or(String::new(), |device| device.name.to_string()),
            architecture: device.map_or(String::new(), |device| device.architecture.to_string()),
            total: device
                .map(|device| Figure::measured(device.memory_bytes, Unit::Bytes, device.source)),
            tp: count("tp"),
            pp: count("pp"),
            dp: count("dp"),
            cp: ["decode-context-parallel-size", "dcp"]
                .iter()
                .find_map(|mark| cells::after(&words, mark))
                .map_or(1, |ranks| ranks.value as u64),
            weights: self.weight_format(model),
            kv_keys,
            kv_values,
            max_model_len: self.whole("max_model_len"),
            utilization: self.printed("gpu_memory_utilization").or(fraction).map(|p| p.value),
            max_num_batched_tokens: self.whole("max_num_batched_tokens"),
            max_num_seqs: self.whole("max_num_seqs"),
            // A recurrent model's block is a result, and a window model's several: both are predicted.
            block_size: self
                .whole("block_size")
                .filter(|block| *block > 0 && !recurrent)
                .or(self.is_on_cpu().then_some(CPU_BLOCK)),
            prefix_caching: prefix_caching(&words),
            draft: self.drafted_states().or_else(|| draft(&words)),
            graphs: !(words.contains("enforce_eager") || words.contains("enforce-eager")),
            text_only: words.contains("language-model-only"),
            hybrid_manager: !words.contains("disable-hybrid-kv-cache-manager")
                // llama.cpp's one line for all layers is from before it had window buffers.
                && !self.text("other_reported").contains("KV self size"),
            state_bytes: words.contains("ssm_cache_dtype=float32").then_some(4),
            expanded_mla: latent && !self.text("kv_cache_dtype").to_lowercase().contains("v none"),
            micro_batch: cells::after(self.text("other_reported"), "n_ubatch")
                .map_or(512, |printed| printed.value as u64),
            sequences: self.sequences(),
            ..Setup::default()
        }
    }

    /// Whether vLLM ran on an x86 CPU, as the row's engine or device says.
    fn is_on_cpu(&self) -> bool {
        let names = format!("{} {}", self.text("engine"), self.text("gpu")).to_lowercase();
        let mut words = names.split(|c: char| !c.is_ascii_alphanumeric());
        names.starts_with("vllm") && words.any(|word| ["cpu", "xeon", "epyc"].contains(&word))
    }

    /// Whether the memory that the log prints, if it does, is the device's: a slice or a namesake is not it.
    fn has_memory_of(&self, device: &device::Device) -> bool {
        let printed = self.bytes("gpu_total_gib").filter(|printed| printed.value > 0.0);
        printed.is_none_or(|printed| (printed.value / device.memory_bytes - 1.0).abs() < 0.1)
    }

    /// Checks that the KV format is one that we can size: a wrong number would be worse than none.
    ///
    /// # Errors
    /// Names the cell, its value and what it may be.
    pub fn check_format(&self) -> Result<(), String> {
        let cell = self.text("kv_cache_dtype");
        let lower = cell.to_lowercase();
        let open = ["", "default", "unspecified", "unknown", "n/a", "none", "-"];
        if open.contains(&lower.as_str()) || self.kv_dtype_named(cell).is_some() {
            return Ok(());
        }
        let known: Vec<&str> = KvDtype::known().collect();
        Err(format!(
            "kv_cache_dtype = `{cell}`: not a format we know; known are {}",
            known.join(", ")
        ))
    }

    fn kv_dtype_named(&self, text: &str) -> Option<KvDtype> {
        text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).find_map(KvDtype::parse)
    }

    /// Sequences of a llama.cpp context: `4/1 seqs`, `4 seqs` or `1 seq`.
    fn sequences(&self) -> u64 {
        let text = self.text("other_reported");
        let slots = text.split(" seqs").next().filter(|head| head.len() < text.len());
        let word = slots.and_then(|head| head.rsplit([' ', '(', ',']).next());
        let slots = word.and_then(|word| word.split('/').next()?.parse::<u64>().ok());
        slots.filter(|slots| (1..=4096).contains(slots)).unwrap_or(1)
    }

    /// llama.cpp's states behind each sequence's own, one per drafted token: `2 rs_seq`.
    fn drafted_states(&self) -> Option<Draft> {
        let states = *cells::before(self.text("other_reported"), " rs_seq").first()?;
        let tokens = (states.value as u64).min(64);
        (tokens > 0).then_some(Draft { kind: DraftKind::Lookup, layers: None, tokens })
    }

    /// The format that the row names, else the published checkpoint's.
    fn weight_format(&self, model: &Model) -> WeightFormat {
        let published = model.quantization.as_deref().and_then(WeightFormat::parse);
        self.weight_format_named().or(published).unwrap_or(WeightFormat::Bf16)
    }

    /// The weight format that the row's flags or the model's name say.
    pub fn weight_format_named(&self) -> Option<WeightFormat> {
        ["weight_quant", "model"].iter().find_map(|column| WeightFormat::find_in(self.text(column)))
    }

    /// Formats of keys and values: `fp8 (inferred)`, `auto`, or `K q8_0 / V f16`.
    fn kv_dtypes(&self) -> (KvDtype, KvDtype) {
        let cell = self.text("kv_cache_dtype");
        let find = |text: &str| self.kv_dtype_named(text);
        let (keys, values) = cell.split_once('/').unwrap_or((cell, cell));
        let keys = find(keys).unwrap_or(KvDtype::Bf16);
        (keys, find(values).unwrap_or(keys))
    }

    /// `yes` or `no` of the cell `started`, for the length of the row.
    pub fn started(&self) -> Option<bool> {
        let cell = self.text("started").to_lowercase();
        match () {
            () if cell.starts_with("yes") => Some(true),
            () if cell.starts_with("no") && !cell.starts_with("not ") => Some(false),
            () => None,
        }
    }

    /// Whether the start failed for a cause that no sizing of memory foretells.
    pub fn failed_otherwise(&self) -> bool {
        let cell = self.text("started").to_lowercase();
        self.started() == Some(false)
            && ["kernel", "oom after", "driver", "crash"].iter().any(|cause| cell.contains(cause))
    }
}

/// On, off, or as the version has it.
fn prefix_caching(words: &str) -> Option<bool> {
    let off = ["no prefix caching", "prefix caching disabled", "no-enable-prefix-caching"];
    let on = ["prefix caching", "mamba align", "enable-prefix-caching"];
    match () {
        () if off.iter().any(|mark| words.contains(mark)) => Some(false),
        () if on.iter().any(|mark| words.contains(mark)) => Some(true),
        () => None,
    }
}

/// Speculation named in words: the model's next-token layers, or a head beside it.
fn draft(words: &str) -> Option<Draft> {
    let next_token = ["mtp", "nextn", "spec decode"].iter().any(|mark| words.contains(mark));
    let head = ["eagle", "draft", "dflash", "medusa"].iter().any(|mark| words.contains(mark));
    if !next_token && !head {
        return None;
    }
    let tokens = cells::after(words, "k=").map_or(1, |printed| printed.value as u64).min(64);
    let layers = cells::before(words, " draft layer").first().map(|printed| printed.value as u64);
    let kind = if next_token { DraftKind::NextToken } else { DraftKind::Head };
    Some(Draft { kind, layers: layers.filter(|_| kind == DraftKind::Head), tokens })
}

/// The device that a cell such as `RTX 5090 32GB (31.36 GiB)` names.
pub fn find_device(cell: &str) -> Option<&'static device::Device> {
    let head = cell.split(['(', ',']).next().unwrap_or(cell).replace("-class", "");
    let words: Vec<&str> = head.split_whitespace().collect();
    let is_size = |word: &&&str| {
        let size = word.to_lowercase();
        let digits = size.trim_end_matches("gb").trim_end_matches("gib");
        !(digits.len() < size.len() && digits.parse::<f64>().is_ok())
    };
    let without_sizes: Vec<&str> = words.iter().filter(is_size).copied().collect();
    // A laptop's part is another device under the same name.
    let other = ["unspecified", "laptop", "mobile", "max-q"];
    let lower = head.to_lowercase();
    if without_sizes.is_empty() || other.iter().any(|word| lower.contains(word)) {
        return None;
    }
    let shorter = (1..=without_sizes.len()).rev().map(|length| without_sizes[..length].join(" "));
    let names = std::iter::once(words.join(" ")).chain(shorter);
    let usable = |name: &String| name.chars().any(|c| c.is_ascii_digit());
    names.filter(usable).find_map(|name| device::find(&name).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_found_in_cells() {
        let found = |cell| find_device(cell).map(|device| device.name);
        assert_eq!(found("RTX 5090 32GB (31.36 GiB)"), Some("RTX-5090"));
        assert_eq!(found("H100 80GB"), Some("H100-SXM"));
        assert_eq!(found("A100 80GB"), Some("A100-80GB"));
        assert_eq!(found("L4-class 24GB"), Some("L4"));
        assert_eq!(found("L40S 48GB (G6e)"), Some("L40S"));
        assert_eq!(found("MI355X-class 288GB"), Some("MI355X"));
        for unknown in [
            "RTX 4070 Laptop 8GB",
            "48GB class (46 GB usable)",
            "unspecified",
            "8 GPUs (unspecified)",
            "",
            "n/a",
        ] {
            assert_eq!(found(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn flags_are_read_from_words() {
        assert_eq!(prefix_caching("async-scheduling, no prefix caching"), Some(false));
        assert_eq!(prefix_caching("prefix caching (mamba align)"), Some(true));
        assert_eq!(prefix_caching("enforce_eager"), None);
        let sequences = |text: &str| {
            let cells = HashMap::from([("other_reported".to_string(), text.to_string())]);
            let row = Row(cells);
            (row.sequences(), row.drafted_states().map_or(0, |draft| draft.tokens))
        };
        assert_eq!(sequences("SWA 36.00 MiB (1024 cells, 18 layers), 4/1 seqs"), (4, 0));
        assert_eq!(sequences("201.00 MiB (4 cells, 32 layers, 4 seqs 2 rs_seq)"), (4, 2));
        assert_eq!(sequences("n_ubatch 512, 1 seq"), (1, 0));
    }
}
