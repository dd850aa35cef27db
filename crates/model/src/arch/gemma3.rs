//! Gemma 3 text models (arXiv 2503.19786): five window layers to one full layer, norms before and
//! after each half of a layer, an RMS norm on each query and key head, embeddings scaled by √width.

use super::Model;
use super::parts::{Ends, FeedForward, Norm, Projection};
use super::pass::{Activation, Pass};
use crate::gguf::Gguf;
use crate::runner::LoadError;
use crate::spec::ModelSpec;

/// A Gemma 3 decoder.
pub struct Gemma3 {
    ends: Ends,
    embedding_scale: f32,
    layers: Vec<Layer>,
}

struct Layer {
    /// KV group and index in it.
    cache: (usize, usize),
    attention_norm: Norm,
    projection: Projection,
    query_norm: Norm,
    key_norm: Norm,
    attention_post_norm: Norm,
    ffn_norm: Norm,
    feed_forward: FeedForward,
    ffn_post_norm: Norm,
}

impl Gemma3 {
    /// Loads the weights. Norm weights in the file already include Gemma's `+ 1`.
    pub fn load(gguf: &Gguf, spec: &ModelSpec) -> Result<Gemma3, LoadError> {
        // The largest tensor first: while it is repacked it is in memory twice.
        let ends = Ends::load(gguf, spec)?;
        let layer = |l: usize| {
            let norm = |name: &str, len| Norm::load(gguf, &format!("blk.{l}.{name}"), len);
            Ok(Layer {
                cache: spec.group_of(l),
                attention_norm: norm("attn_norm", spec.width)?,
                projection: Projection::load(gguf, spec, l)?,
                query_norm: norm("attn_q_norm", spec.head_dim)?,
                key_norm: norm("attn_k_norm", spec.head_dim)?,
                attention_post_norm: norm("post_attention_norm", spec.width)?,
                ffn_norm: norm("ffn_norm", spec.width)?,
                feed_forward: FeedForward::load(gguf, spec, l)?,
                ffn_post_norm: norm("post_ffw_norm", spec.width)?,
            })
        };
        let layers = (0..spec.layers).map(layer).collect::<Result<_, LoadError>>()?;
        let embedding_scale = spec.embedding_scale;
        Ok(Gemma3 { ends, embedding_scale, layers })
    }
}

impl Model for Gemma3 {
    fn ends(&self) -> &Ends {
        &self.ends
    }

    fn forward(&self, pass: &mut Pass<'_>) {
        pass.embed(&self.ends.embedding, self.embedding_scale);
        for layer in &self.layers {
            let (group, index) = layer.cache;
            pass.norm(&layer.attention_norm);
            pass.project_qkv(&layer.projection);
            pass.norm_heads(&layer.query_norm, &layer.key_norm);
            pass.attend(group, index);
            pass.project_attended(&layer.projection);
            pass.norm_delta(&layer.attention_post_norm);
            pass.add_delta();

            pass.norm(&layer.ffn_norm);
            pass.feed_forward(&layer.feed_forward, Activation::GeluTanh);
            pass.norm_delta(&layer.ffn_post_norm);
            pass.add_delta();
        }
    }
}
