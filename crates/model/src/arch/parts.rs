//! Pieces of a layer that architectures share, and how they are loaded.

use crate::gguf::Gguf;
use crate::linear::{Linear, ScaleRule, load_optional};
use crate::runner::LoadError;
use crate::spec::{Architecture, ModelSpec};

/// Weight of an RMS norm.
pub struct Norm {
    /// One multiplier per channel.
    pub weight: Vec<f32>,
}

impl Norm {
    /// Loads `NAME.weight` of `len` channels.
    pub fn load(gguf: &Gguf, name: &str, len: usize) -> Result<Norm, LoadError> {
        let name = format!("{name}.weight");
        let weight = load_optional(gguf, &name, len)?.ok_or(LoadError::Missing(name))?;
        Ok(Norm { weight })
    }
}

/// Attention projections of a layer.
pub struct Projection {
    /// Q, K and V stacked.
    pub qkv: Linear,
    /// Output projection.
    pub output: Linear,
}

impl Projection {
    /// Loads `blk.LAYER.attn_{q,k,v,output}`.
    pub fn load(gguf: &Gguf, spec: &ModelSpec, layer: usize) -> Result<Projection, LoadError> {
        let name = |part: &str| format!("blk.{layer}.attn_{part}");
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        Ok(Projection {
            qkv: Linear::load(
                gguf,
                &["q", "k", "v"].map(name),
                &[q, kv, kv],
                spec.width,
                ScaleRule::Product,
            )?,
            output: Linear::load(gguf, &[name("output")], &[spec.width], q, ScaleRule::Product)?,
        })
    }
}

/// Gated feed-forward of a layer.
pub struct FeedForward {
    /// Gate and up stacked.
    pub gate_up: Linear,
    /// Down projection.
    pub down: Linear,
}

impl FeedForward {
    /// Loads `blk.LAYER.ffn_{gate,up,down}`.
    pub fn load(gguf: &Gguf, spec: &ModelSpec, layer: usize) -> Result<FeedForward, LoadError> {
        let name = |part: &str| format!("blk.{layer}.ffn_{part}");
        let rule = match spec.architecture {
            Architecture::Llama | Architecture::Qwen3 => ScaleRule::Sum,
            Architecture::Qwen2 | Architecture::Gemma3 => ScaleRule::Ignored,
        };
        let stacked = [spec.hidden, spec.hidden];
        Ok(FeedForward {
            gate_up: Linear::load(gguf, &["gate", "up"].map(name), &stacked, spec.width, rule)?,
            down: Linear::load(gguf, &[name("down")], &[spec.width], spec.hidden, rule)?.precise(),
        })
    }
}

/// What stands before the first and after the last layer.
pub struct Ends {
    /// Token embeddings, `[vocabulary][width]`.
    pub embedding: Linear,
    /// Norm before the head.
    pub norm: Norm,
    /// The head, unless it is the embedding table itself.
    head: Option<Linear>,
}

impl Ends {
    /// Loads `token_embd`, `output_norm` and, if present, `output`.
    pub fn load(gguf: &Gguf, spec: &ModelSpec) -> Result<Ends, LoadError> {
        let table = |name: &str| {
            let (names, rows) = ([name.to_string()], [spec.vocabulary]);
            let table = Linear::load(gguf, &names, &rows, spec.width, ScaleRule::Product)?;
            Ok::<Linear, LoadError>(table.precise())
        };
        let head = gguf.tensor("output.weight").is_ok().then(|| table("output")).transpose()?;
        let norm = Norm::load(gguf, "output_norm", spec.width)?;
        Ok(Ends { embedding: table("token_embd")?, norm, head })
    }

    /// The head: hidden state to logits.
    pub fn head(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}
