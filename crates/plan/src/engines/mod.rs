//! The engines behind one trait: from a model and flags to the ledger, the pool, the printed numbers and
//! the verdict.

pub mod llamacpp;
pub mod memory;
pub mod mend;
pub mod reef;
pub mod setup;
pub mod sglang;
pub mod trtllm;
pub mod version;
pub mod vllm;
pub mod weights;

use serde::Serialize;

use crate::config::ConfigError;
use crate::figure::{Figure, Unit};
use crate::model::{Cache, MissingFields, Model};
use setup::Setup;

/// Why an engine's plan cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The config lacks fields.
    #[error(transparent)]
    Missing(#[from] MissingFields),
    /// The config is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The engine does not run this, or we do not know how it does.
    #[error("{engine} and {what}: {mend}")]
    Unsupported {
        /// The engine.
        engine: &'static str,
        /// What it does not do.
        what: String,
        /// What to do instead.
        mend: String,
    },
    /// A flag that the answer needs, or whose value cannot be.
    #[error("{flag}: {why}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What is wrong and what to write.
        why: String,
    },
}

/// An engine whose start-up can be foretold.
pub trait Engine: Sync {
    /// The name that `--engine` takes.
    fn name(&self) -> &'static str;

    /// The plan of one start, without mends (see [`mend::mends`]).
    ///
    /// # Errors
    /// Missing config fields or flags, or a combination that the engine refuses.
    fn plan(&self, model: &Model, setup: &Setup) -> Result<Plan, PlanError>;

    /// Flag changes worth trying: the text of the flag and the setup with it.
    fn changes(&self, model: &Model, setup: &Setup, plan: &Plan) -> Vec<(String, Setup)>;
}

/// Every engine.
pub fn engines() -> [&'static dyn Engine; 5] {
    [&vllm::Vllm, &sglang::Sglang, &trtllm::TensorRtLlm, &llamacpp::LlamaCpp, &reef::Reef]
}

/// The engine of that name, in the spellings of logs and tables.
pub fn find(name: &str) -> Option<&'static dyn Engine> {
    let plain: String = name.to_lowercase().chars().filter(char::is_ascii_alphanumeric).collect();
    let name = match plain.as_str() {
        // Forks keep vLLM's accounting.
        _ if plain.starts_with("vllm") || plain.contains("vllmv0") => "vllm",
        _ if plain.starts_with("sglang") => "sglang",
        _ if plain.starts_with("tensorrt") || plain.starts_with("trtllm") => "trtllm",
        _ if plain.contains("llamacpp") => "llamacpp",
        "reef" => "reef",
        _ => return None,
    };
    engines().into_iter().find(|engine| engine.name() == name)
}

/// Where a device's memory goes, per GPU, in bytes. `None` = the engine does not account for it or
/// nothing says.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Ledger {
    /// Memory of the device.
    pub total: Option<Figure>,
    /// Part of it that the engine may use.
    pub reserved: Option<Figure>,
    /// Weights.
    pub weights: Option<Figure>,
    /// Largest memory of activations during the profile run.
    pub activation: Option<Figure>,
    /// Memory outside the tensor library: context, communication, kernels.
    pub non_torch: Option<Figure>,
    /// CUDA graphs.
    pub graphs: Option<Figure>,
    /// What is left for the KV pool.
    pub kv: Option<Figure>,
}

/// One KV group: layers that share block tables.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolGroup {
    /// What its layers are: `full`, `window 1024`, `state` …
    pub kind: String,
    /// Layers of the model in it.
    pub layers: u64,
    /// Groups of this kind that the engine makes.
    pub groups: u64,
    /// Tokens of a block.
    pub block_size: u64,
}

/// The KV pool of one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pool {
    /// Groups, by kind.
    pub groups: Vec<PoolGroup>,
    /// Bytes of one block.
    pub block_bytes: Figure,
    /// Blocks.
    pub blocks: Figure,
    /// Smallest block of any group in tokens: the granularity of the printed numbers.
    pub block_size: u64,
}

/// Whether the engine starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It starts, whatever value the uncertain figures take in their ranges.
    Starts,
    /// It starts at the best estimate; at the worst it does not.
    ProbablyStarts,
    /// It refuses at the best estimate; at the best case it starts.
    ProbablyRefuses,
    /// It refuses.
    Refuses,
    /// Nothing known decides it.
    Unknown,
}

impl Verdict {
    /// From what happens at the worst, the best estimate and the best case.
    pub fn from_cases(worst: bool, best_estimate: bool, best: bool) -> Verdict {
        match (worst, best_estimate, best) {
            (true, true, _) => Verdict::Starts,
            (_, true, _) => Verdict::ProbablyStarts,
            (_, false, true) => Verdict::ProbablyRefuses,
            (_, false, false) => Verdict::Refuses,
        }
    }

    /// Yes, no, or unknown.
    pub fn answer(self) -> Option<bool> {
        match self {
            Verdict::Starts | Verdict::ProbablyStarts => Some(true),
            Verdict::Refuses | Verdict::ProbablyRefuses => Some(false),
            Verdict::Unknown => None,
        }
    }
}

/// What an engine would say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The engine.
    pub engine: &'static str,
    /// Its version as understood.
    pub version: String,
    /// Where the memory goes.
    pub ledger: Ledger,
    /// Bytes that one more token adds while it is inside every window.
    pub kv_bytes_per_token: Option<Figure>,
    /// Bytes that one sequence of the maximum length needs, with the engine's rounding.
    pub kv_needed: Option<Figure>,
    /// The pool, once its size is known.
    pub pool: Option<Pool>,
    /// Tokens as this version prints them.
    pub printed_tokens: Option<Figure>,
    /// Sequences of the maximum length at once.
    pub concurrency: Option<Figure>,
    /// Longest length that starts.
    pub max_len: Option<Figure>,
    /// The length that was planned for.
    pub max_model_len: Option<u64>,
    /// Whether it starts.
    pub verdict: Verdict,
    /// The engine's own words if it refuses.
    pub refusal: Option<String>,
    /// What the numbers leave out or rest on.
    pub notes: Vec<String>,
}

impl Plan {
    /// A plan that says nothing yet but what every engine says: names, lengths and the model's notes.
    fn new(engine: &'static str, model: &Model, setup: &Setup, ledger: Ledger) -> Plan {
        Plan {
            engine,
            version: setup.version.shown(),
            ledger,
            kv_bytes_per_token: None,
            kv_needed: None,
            pool: None,
            printed_tokens: None,
            concurrency: None,
            max_len: None,
            max_model_len: setup.max_model_len.or(model.trained_context),
            verdict: Verdict::Unknown,
            refusal: None,
            notes: model.notes.clone(),
        }
    }
}

/// A whole number of bytes in GiB, two decimals: as engines print it.
pub fn gib(bytes: f64) -> String {
    format!("{:.2}", bytes / GIB)
}

/// Bytes of a GiB.
pub const GIB: f64 = (1_u64 << 30) as f64;

/// `10 layers * 4096 B + 50 layers * 8192 B`: how bytes per token add up over the layers that have some.
pub fn layers_formula(model: &Model, bytes_of: impl Fn(&Cache) -> u64) -> String {
    let mut counted: Vec<(u64, usize)> = Vec::new();
    for bytes in model.layers.iter().map(bytes_of).filter(|bytes| *bytes > 0) {
        match counted.iter_mut().find(|(known, _)| *known == bytes) {
            Some((_, layers)) => *layers += 1,
            None => counted.push((bytes, 1)),
        }
    }
    let parts = counted.iter().map(|(bytes, layers)| format!("{layers} layers * {bytes} B"));
    parts.collect::<Vec<_>>().join(" + ")
}

/// Applies a monotone function to a figure's best estimate and both ends.
pub fn through(
    input: &Figure,
    unit: Unit,
    function: impl Fn(f64) -> f64,
    formula: impl Into<String>,
) -> Figure {
    let (low, high) = (function(input.low), function(input.high));
    Figure::derived(function(input.value), unit, formula).within(low, high)
}
