//! Qwen 3, dense (arXiv 2505.09388): Llama's wiring with an RMS norm on each query and key head.

use super::Model;
use super::parts::{Ends, FeedForward, Norm, Projection};
use super::pass::{Activation, Pass};
use crate::gguf::Gguf;
use crate::runner::LoadError;
use crate::spec::ModelSpec;

/// A Qwen 3 decoder.
pub struct Qwen3 {
    ends: Ends,
    layers: Vec<Layer>,
}

struct Layer {
    attention_norm: Norm,
    projection: Projection,
    query_norm: Norm,
    key_norm: Norm,
    ffn_norm: Norm,
    feed_forward: FeedForward,
}

impl Qwen3 {
    /// Loads the weights.
    pub fn load(gguf: &Gguf, spec: &ModelSpec) -> Result<Qwen3, LoadError> {
        // The largest tensor first: while it is repacked it is in memory twice.
        let ends = Ends::load(gguf, spec)?;
        let layer = |l: usize| {
            let norm = |name: &str, len| Norm::load(gguf, &format!("blk.{l}.{name}"), len);
            Ok(Layer {
                attention_norm: norm("attn_norm", spec.width)?,
                projection: Projection::load(gguf, spec, l)?,
                query_norm: norm("attn_q_norm", spec.head_dim)?,
                key_norm: norm("attn_k_norm", spec.head_dim)?,
                ffn_norm: norm("ffn_norm", spec.width)?,
                feed_forward: FeedForward::load(gguf, spec, l)?,
            })
        };
        let layers = (0..spec.layers).map(layer).collect::<Result<_, LoadError>>()?;
        Ok(Qwen3 { ends, layers })
    }
}

impl Model for Qwen3 {
    fn ends(&self) -> &Ends {
        &self.ends
    }

    fn forward(&self, pass: &mut Pass<'_>) {
        pass.embed(&self.ends.embedding, 1.0);
        for (index, layer) in self.layers.iter().enumerate() {
            pass.norm(&layer.attention_norm);
            pass.project_qkv(&layer.projection);
            pass.norm_heads(&layer.query_norm, &layer.key_norm);
            pass.attend(0, index);
            pass.project_attended(&layer.projection);
            pass.add_delta();

            pass.norm(&layer.ffn_norm);
            pass.feed_forward(&layer.feed_forward, Activation::Silu);
            pass.add_delta();
        }
    }
}
