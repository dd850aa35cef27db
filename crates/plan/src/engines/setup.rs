//! What the user says about one start of an engine: flags, device, and what a log has measured.

use serde::Serialize;

use super::PlanError;
use super::version::{LATEST, Version};
use super::weights::WeightFormat;
use crate::dtype::KvDtype;
use crate::figure::Figure;

/// Largest length, batch or count taken from flags.
const LIMIT: u64 = 1 << 32;
/// Most tokens of a block.
const LIMIT_BLOCK: u64 = 1 << 16;
/// Most tokens drafted a step.
const LIMIT_DRAFT: u64 = 1 << 10;
/// Most ranks of any kind of parallelism.
const LIMIT_RANKS: u64 = 1 << 12;

/// Speculative decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Draft {
    /// Who drafts.
    pub kind: DraftKind,
    /// Draft layers with a KV cache; `None` = what the model ships (next-token layers) or one.
    pub layers: Option<u64>,
    /// Tokens drafted per step.
    pub tokens: u64,
}

/// Who drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DraftKind {
    /// Next-token-prediction layers shipped with the model (MTP, NEXTN).
    NextToken,
    /// A head beside the model (EAGLE), built like its layers.
    Head,
    /// Nobody with a KV cache (n-gram lookup).
    Lookup,
}

/// What a log has measured, in bytes per GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Weights.
    pub weights: Option<Figure>,
    /// Memory outside the tensor library.
    pub non_torch: Option<Figure>,
    /// Activation peak of the profile run.
    pub activation: Option<Figure>,
    /// CUDA graphs.
    pub graphs: Option<Figure>,
    /// Memory that the engine may use.
    pub reserved: Option<Figure>,
    /// The KV pool.
    pub kv: Option<Figure>,
}

/// One start of an engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setup {
    /// Version; behaviour follows it.
    pub version: Version,
    /// vLLM's first engine (V0), which later versions kept beside the second for a while.
    pub first_engine: bool,
    /// Name of the device, for messages.
    pub device: String,
    /// Its architecture as the device table names it, for defaults that follow it.
    pub architecture: String,
    /// Memory of one device, in bytes.
    pub total: Option<Figure>,
    /// Ranks that split each layer.
    pub tp: u64,
    /// Ranks that split the stack.
    pub pp: u64,
    /// Replicas of the attention.
    pub dp: u64,
    /// Ranks that split the experts; 0 = as `tp`.
    pub ep: u64,
    /// Ranks that split a sequence's cache (decode context parallelism).
    pub cp: u64,
    /// Weight format.
    pub weights: WeightFormat,
    /// Format of keys.
    pub kv_keys: KvDtype,
    /// Format of values.
    pub kv_values: KvDtype,
    /// `--max-model-len`.
    pub max_model_len: Option<u64>,
    /// `--gpu-memory-utilization` or the engine's equal of it.
    pub utilization: Option<f64>,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: Option<u64>,
    /// `--max-num-seqs`.
    pub max_num_seqs: Option<u64>,
    /// `--block-size`.
    pub block_size: Option<u64>,
    /// Prefix caching; `None` = the version's default.
    pub prefix_caching: Option<bool>,
    /// Speculation.
    pub draft: Option<Draft>,
    /// CUDA graphs are captured (not `--enforce-eager`).
    pub graphs: bool,
    /// Only the language model of a multimodal one is loaded.
    pub text_only: bool,
    /// Window layers may be charged as windows (not `--disable-hybrid-kv-cache-manager`).
    pub hybrid_manager: bool,
    /// Bytes of a recurrent state's element, where a flag fixes it.
    pub state_bytes: Option<u64>,
    /// MLA keys and values are kept per head, not as a latent (llama.cpp without `-mla`).
    pub expanded_mla: bool,
    /// Tokens of llama.cpp's micro-batch.
    pub micro_batch: u64,
    /// Sequences that llama.cpp splits its context among.
    pub sequences: u64,
    /// The KV budget where it is given outright (`--kv-memory`, `--kv-cache-memory-bytes`).
    pub kv_budget: Option<Figure>,
    /// What a log has measured.
    pub measured: Measured,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            version: LATEST,
            first_engine: false,
            device: String::new(),
            architecture: String::new(),
            total: None,
            tp: 1,
            pp: 1,
            dp: 1,
            ep: 0,
            cp: 1,
            weights: WeightFormat::Bf16,
            kv_keys: KvDtype::Bf16,
            kv_values: KvDtype::Bf16,
            max_model_len: None,
            utilization: None,
            max_num_batched_tokens: None,
            max_num_seqs: None,
            block_size: None,
            prefix_caching: None,
            draft: None,
            graphs: true,
            text_only: false,
            hybrid_manager: true,
            state_bytes: None,
            expanded_mla: false,
            micro_batch: 512,
            sequences: 1,
            kv_budget: None,
            measured: Measured::default(),
        }
    }
}

impl Setup {
    /// Checks every flag's range.
    ///
    /// # Errors
    /// Names the flag, its value and what it may be.
    pub fn check(&self) -> Result<(), PlanError> {
        let ranks = [
            ("--tp", self.tp, 1),
            ("--pp", self.pp, 1),
            ("--dp", self.dp, 1),
            ("--ep", self.ep, 0),
            ("--cp", self.cp, 1),
        ];
        for (flag, value, least) in ranks {
            if !(least..=LIMIT_RANKS).contains(&value) {
                let why = format!("{value} is not between {least} and {LIMIT_RANKS}");
                return Err(PlanError::Flag { flag, why });
            }
        }
        let counts = [
            ("--max-model-len", self.max_model_len),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
        ];
        if let Some(block) = self.block_size.filter(|block| !(1..=LIMIT_BLOCK).contains(block)) {
            let why = format!("{block} is not between 1 and {LIMIT_BLOCK}");
            return Err(PlanError::Flag { flag: "--block-size", why });
        }
        for (flag, value) in counts {
            if let Some(value) = value.filter(|value| !(1..=LIMIT).contains(value)) {
                let why = format!("{value} is not between 1 and {LIMIT}");
                return Err(PlanError::Flag { flag, why });
            }
        }
        if self.draft_tokens() > LIMIT_DRAFT {
            let why = format!("{} is more than {LIMIT_DRAFT}", self.draft_tokens());
            return Err(PlanError::Flag { flag: "--draft-tokens", why });
        }
        for (flag, value) in [("--ubatch-size", self.micro_batch), ("--parallel", self.sequences)] {
            if !(1..=1 << 20).contains(&value) {
                let why = format!("{value} is not between 1 and {}", 1 << 20);
                return Err(PlanError::Flag { flag, why });
            }
        }
        match self.utilization {
            Some(share) if !(share > 0.0 && share <= 1.0) => Err(PlanError::Flag {
                flag: "--gpu-memory-utilization",
                why: format!("{share} is not a share between 0 and 1, for example 0.9"),
            }),
            _ => Ok(()),
        }
    }

    /// Tokens drafted per step; 0 without speculation.
    pub fn draft_tokens(&self) -> u64 {
        self.draft.map_or(0, |draft| draft.tokens)
    }
}
