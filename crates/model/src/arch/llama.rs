//! Llama (Touvron et al., arXiv 2302.13971): SmolLM2, Llama, Mistral; and Qwen 2, which differs only
//! in its QKV bias (carried by the projection) and in the rope's pairing (carried by the spec).

use super::Model;
use super::parts::{Ends, FeedForward, Norm, Projection};
use super::pass::{Activation, Pass};
use crate::gguf::Gguf;
use crate::runner::LoadError;
use crate::spec::ModelSpec;

/// A Llama-like decoder.
pub struct Llama {
    ends: Ends,
    layers: Vec<Layer>,
}

struct Layer {
    attention_norm: Norm,
    projection: Projection,
    ffn_norm: Norm,
    feed_forward: FeedForward,
}

impl Llama {
    /// Loads the weights.
    pub fn load(gguf: &Gguf, spec: &ModelSpec) -> Result<Llama, LoadError> {
        // The largest tensor first: while it is repacked it is in memory twice.
        let ends = Ends::load(gguf, spec)?;
        let layer = |l: usize| {
            Ok(Layer {
                attention_norm: Norm::load(gguf, &format!("blk.{l}.attn_norm"), spec.width)?,
                projection: Projection::load(gguf, spec, l)?,
                ffn_norm: Norm::load(gguf, &format!("blk.{l}.ffn_norm"), spec.width)?,
                feed_forward: FeedForward::load(gguf, spec, l)?,
            })
        };
        let layers = (0..spec.layers).map(layer).collect::<Result<_, LoadError>>()?;
        Ok(Llama { ends, layers })
    }
}

impl Model for Llama {
    fn ends(&self) -> &Ends {
        &self.ends
    }

    fn forward(&self, pass: &mut Pass<'_>) {
        pass.embed(&self.ends.embedding, 1.0);
        for (index, layer) in self.layers.iter().enumerate() {
            pass.norm(&layer.attention_norm);
            pass.project_qkv(&layer.projection);
            pass.attend(0, index);
            pass.project_attended(&layer.projection);
            pass.add_delta();

            pass.norm(&layer.ffn_norm);
            pass.feed_forward(&layer.feed_forward, Activation::Silu);
            pass.add_delta();
        }
    }
}
