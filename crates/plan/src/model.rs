//! A model as the planner sees it: what each layer keeps per token or per sequence, and how many
//! parameters there are.
//!
//! Read from an HF `config.json`, a directory that holds one, a GGUF, or a name among the bundled
//! configs ([`crate::source`]).

use serde::Serialize;

use crate::dtype::KvDtype;

/// Heads of one layer's KV cache, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Heads {
    /// KV heads.
    pub kv: u64,
    /// Channels of a key.
    pub key_dim: u64,
    /// Channels of a value.
    pub value_dim: u64,
}

impl Heads {
    /// KV heads that one of `tp` ranks holds: at least one, so more ranks than heads keep copies.
    pub fn per_rank(&self, tp: u64) -> u64 {
        (self.kv / tp.max(1)).max(1)
    }

    /// Bytes of one token on one rank, keys in `key`, values in `value`.
    pub fn token_bytes(&self, key: KvDtype, value: KvDtype, tp: u64) -> u64 {
        let heads = self.per_rank(tp);
        key.bytes(heads * self.key_dim)
            + value.bytes(heads * self.value_dim)
            + heads * (key.scale_bytes() + value.scale_bytes())
    }
}

/// A compressed (latent) KV cache: one vector a token for all heads, so that tensor parallelism
/// does not shrink it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Latent {
    /// Channels of the latent.
    pub rank: u64,
    /// Channels of the rotated key that all heads share.
    pub rope_dim: u64,
    /// Channels of the sparse-attention indexer's key; 0 without one.
    pub indexer_dim: u64,
    /// Tokens that one stored entry stands for: 1, or the compression of DeepSeek-V4's layers.
    pub compression: u64,
    /// Window of uncompressed tokens kept beside it, 0 without one.
    pub window: u64,
    /// What the cache would be with keys and values expanded per head, where the config tells.
    pub expanded: Option<Heads>,
}

impl Latent {
    /// Bytes of one stored entry: `(rank + rope) * bytes`, no factor 2 (656 B as `fp8_ds_mla`).
    pub fn entry_bytes(&self, dtype: KvDtype) -> u64 {
        dtype.bytes(self.rank + self.rope_dim)
    }

    /// The format that a cache of `dtype` stores it in: sparse attention's fp8 kernels have their own
    /// (vLLM's `fp8_ds_mla`; SGLang's sparse pool is the same 656 bytes).
    pub fn stored_as(&self, dtype: KvDtype) -> KvDtype {
        match dtype {
            KvDtype::Fp8 if self.indexer_dim > 0 => KvDtype::Fp8DsMla,
            dtype => dtype,
        }
    }

    /// Bytes of one indexer key: fp8 codes and an f32 scale per 128 of them.
    pub fn indexer_bytes(&self) -> u64 {
        self.indexer_dim + self.indexer_dim.div_ceil(128) * 4
    }
}

/// State of a recurrent layer: one a sequence, whatever its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Recurrent {
    /// Which recurrence.
    pub kind: RecurrentKind,
    /// Channels that the short convolution looks back on.
    pub convolution_channels: u64,
    /// Taps of the convolution; it keeps one less.
    pub convolution_taps: u64,
    /// Elements of the recurrent state over all ranks.
    pub state_elements: u64,
    /// Bytes of a state element, where the config fixes them (`mamba_ssm_dtype`).
    pub state_bytes: Option<u64>,
}

/// Kinds of recurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecurrentKind {
    /// Mamba-1 state-space layers (Jamba, Falcon-Mamba).
    Mamba1,
    /// Mamba-2 state-space layers.
    Mamba2,
    /// Gated delta net (Qwen3-Next and later).
    Gdn,
    /// Kimi delta attention.
    Kda,
    /// Short convolutions without a state (LFM2).
    ShortConvolution,
    /// Linear attention without a convolution (MiniMax-Text-01's lightning attention).
    Lightning,
}

impl Recurrent {
    /// Bytes of one sequence's state on one of `tp` ranks with `draft_tokens` extra convolution
    /// columns: `channels / tp * (taps - 1 + k) * conv + state / tp * ssm`.
    pub fn bytes(&self, tp: u64, draft_tokens: u64, convolution: u64, state: u64) -> u64 {
        let columns = match self.convolution_taps {
            0 => 0,
            taps => taps - 1 + draft_tokens,
        };
        let state = self.state_bytes.unwrap_or(state);
        self.convolution_channels.div_ceil(tp) * columns * convolution
            + self.state_elements.div_ceil(tp) * state
    }
}

/// What a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Cache {
    /// Keys and values of every token.
    Full {
        /// Shape.
        heads: Heads,
    },
    /// Keys and values of the last `window` tokens.
    Sliding {
        /// Shape.
        heads: Heads,
        /// Tokens of the window.
        window: u64,
    },
    /// Keys and values of the current chunk (Llama 4).
    Chunked {
        /// Shape.
        heads: Heads,
        /// Tokens of a chunk.
        chunk: u64,
    },
    /// A latent per token (MLA).
    Latent(Latent),
    /// A state per sequence.
    Recurrent(Recurrent),
    /// Reads the cache of layer `with` and owns none.
    Shared {
        /// Index of the layer that owns it.
        with: usize,
    },
    /// Keeps nothing (feed-forward blocks of Nemotron-H, removed attention).
    Nothing,
}

impl Cache {
    /// Heads, where the cache has them.
    pub fn heads(&self) -> Option<Heads> {
        match self {
            Cache::Full { heads } | Cache::Sliding { heads, .. } | Cache::Chunked { heads, .. } => {
                Some(*heads)
            }
            _ => None,
        }
    }

    /// Bytes that a token inside every window adds on one of `tp` ranks.
    pub fn token_bytes(&self, dtype: KvDtype, tp: u64) -> u64 {
        match self {
            Cache::Latent(latent) => {
                let entry = latent.entry_bytes(dtype) / latent.compression.max(1);
                entry + if latent.indexer_dim > 0 { latent.indexer_bytes() } else { 0 }
            }
            cache => cache.heads().map_or(0, |heads| heads.token_bytes(dtype, dtype, tp)),
        }
    }

    /// Tokens of a sequence of `tokens` that the layer still holds (before block rounding).
    pub fn tokens_kept(&self, tokens: u64) -> u64 {
        match self {
            Cache::Sliding { window, .. } => tokens.min(*window),
            Cache::Chunked { chunk, .. } => tokens.min(*chunk),
            Cache::Full { .. } | Cache::Latent(_) => tokens,
            Cache::Recurrent(_) | Cache::Shared { .. } | Cache::Nothing => 0,
        }
    }
}

/// Parameters by what they do; quantisers treat the classes differently, ranks share them differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Parameters {
    /// Token embedding (and per-layer embeddings).
    pub embedding: u64,
    /// Output matrix; 0 where it is tied to the embedding.
    pub output: u64,
    /// Attention and recurrent projections.
    pub attention: u64,
    /// Dense and shared feed-forward matrices, routers left out.
    pub dense: u64,
    /// Routed experts, all of them.
    pub experts: u64,
    /// Routed experts that one token uses.
    pub experts_active: u64,
    /// Routers.
    pub router: u64,
    /// Norms, biases and other small tensors.
    pub small: u64,
    /// Vision or audio towers, where the config describes them.
    pub tower: u64,
    /// Next-token-prediction (draft) layers shipped with the model; loaded only for speculation.
    pub draft: u64,
}

impl Parameters {
    /// All parameters that are loaded without speculation.
    pub fn total(&self) -> u64 {
        self.embedding
            + self.output
            + self.attention
            + self.dense
            + self.experts
            + self.router
            + self.small
            + self.tower
    }

    /// Parameters that one decoded token multiplies with (embedding rows are looked up, not multiplied;
    /// a tied embedding is the output matrix).
    pub fn active(&self) -> u64 {
        let output = if self.output > 0 { self.output } else { self.embedding };
        output + self.attention + self.dense + self.experts_active + self.router + self.small
    }
}

/// A model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Its name: the config's `_model`, a file stem or the name it was asked for by.
    pub name: String,
    /// `model_type` of the config or `general.architecture` of the GGUF; empty if neither says.
    pub family: String,
    /// What each layer keeps, in order.
    pub layers: Vec<Cache>,
    /// What each next-token-prediction layer keeps; charged only under speculation.
    pub draft_layers: Vec<Cache>,
    /// Width of the residual stream.
    pub hidden: Option<u64>,
    /// Rows of the embedding.
    pub vocabulary: Option<u64>,
    /// Query heads of a layer.
    pub heads: Option<u64>,
    /// Width of the dense feed-forward layer.
    pub intermediate: Option<u64>,
    /// Routed experts of a layer; 0 in a dense model.
    pub experts: u64,
    /// Routed experts that a token uses; 0 in a dense model.
    pub experts_per_token: u64,
    /// Width of one expert.
    pub expert_intermediate: Option<u64>,
    /// Context length it was trained for, in tokens.
    pub trained_context: Option<u64>,
    /// Parameters by class; an error names the config fields that are missing.
    #[serde(skip)]
    pub parameters: Result<Parameters, MissingFields>,
    /// Format of the published checkpoint, in a quantiser's words; `None` = 16 bits.
    pub quantization: Option<String>,
    /// Whether an encoder for images or sound stands before the language model.
    pub has_encoder: bool,
    /// Bytes of the published tensors, where the source is a file with weights or has their index beside it.
    pub file_bytes: Option<u64>,
    /// What to distrust: fields assumed or taken from memory.
    pub notes: Vec<String>,
}

/// Config fields that an answer needs and the config lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the config of {model} has no {}: supply {}",
    fields.join(", no "),
    fields.iter().map(|field| format!("--set {field}=VALUE")).collect::<Vec<_>>().join(" ")
)]
pub struct MissingFields {
    /// The model's name.
    pub model: String,
    /// Names of the fields.
    pub fields: Vec<String>,
}

impl Model {
    /// Bytes of KV memory that one more token takes on one of `tp` ranks while it is inside every
    /// window: the sum over layers of `kv_heads * (key_dim + value_dim) * bytes`
    /// (Llama-3.1-8B in bf16: 32 * 8 * 256 * 2 = 131,072).
    pub fn kv_bytes_per_token(&self, dtype: KvDtype, tp: u64) -> u64 {
        self.layers.iter().map(|layer| layer.token_bytes(dtype, tp)).sum()
    }

    /// Bytes of KV memory and recurrent state of one sequence of `tokens` tokens on one of `tp` ranks,
    /// windows taken into account, before an engine's block rounding and padding.
    pub fn kv_bytes(&self, tokens: u64, dtype: KvDtype, tp: u64) -> u64 {
        let kept = |layer: &Cache| layer.token_bytes(dtype, tp) * layer.tokens_kept(tokens);
        self.layers.iter().map(kept).sum::<u64>() + self.state_bytes(tp)
    }

    /// Bytes of recurrent state of one sequence on one of `tp` ranks, states in 2 bytes unless the
    /// config says otherwise.
    pub fn state_bytes(&self, tp: u64) -> u64 {
        let state = |layer: &Cache| match layer {
            Cache::Recurrent(recurrent) => recurrent.bytes(tp, 0, 2, 2),
            _ => 0,
        };
        self.layers.iter().map(state).sum()
    }

    /// KV heads of the layer that has the most.
    pub fn kv_heads(&self) -> Option<u64> {
        self.layers.iter().filter_map(|layer| Some(layer.heads()?.kv)).max()
    }

    /// Channels of a key head in the first layer that has one.
    pub fn head_dim(&self) -> Option<u64> {
        self.layers.iter().find_map(|layer| Some(layer.heads()?.key_dim))
    }

    /// The parameter inventory, or the fields it lacks.
    pub fn parameters(&self) -> Result<Parameters, MissingFields> {
        self.parameters.clone()
    }
}
