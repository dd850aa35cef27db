//! Multi-head latent attention: one latent a token for all heads (DeepSeek-V2, arXiv 2405.04434), and
//! DeepSeek-V4's layers that compress several tokens into one entry.

use super::attention::QUERY_HEADS;
use super::{LIMIT_HEAD_DIM, LIMIT_HEADS, LIMIT_TOKENS, entry};
use crate::config::{ConfigError, Fields};
use crate::model::{Cache, Heads, Latent};

/// The latent of one layer, with the sparse-attention indexer where there is one (DeepSeek-V3.2, GLM-5).
pub fn latent(fields: &Fields) -> Result<Latent, ConfigError> {
    let rank = fields.required(&["kv_lora_rank"], LIMIT_HEAD_DIM)?;
    let rope_dim = fields.required(&["qk_rope_head_dim"], LIMIT_HEAD_DIM)?;
    let nope = fields.number(&["qk_nope_head_dim"], LIMIT_HEAD_DIM)?;
    let value_dim = fields.number(&["v_head_dim"], LIMIT_HEAD_DIM)?;
    let heads = fields.number(&QUERY_HEADS, LIMIT_HEADS)?;
    let expanded = match (nope, value_dim, heads) {
        (Some(nope), Some(value_dim), Some(kv)) => {
            Some(Heads { kv, key_dim: nope + rope_dim, value_dim })
        }
        _ => None,
    };
    let indexer_dim = fields.number(&["index_head_dim"], LIMIT_HEAD_DIM)?.unwrap_or(0);
    Ok(Latent { rank, rope_dim, indexer_dim, compression: 1, window: 0, expanded })
}

/// DeepSeek-V4: `compress_ratios[i]` tokens share one entry of `head_dim` channels in layer i, 0 keeps
/// only the sliding window; layers at the finest compression have an indexer. The list may go on with
/// the draft layers.
pub fn compressed_layers(fields: &Fields, count: usize) -> Result<Vec<Cache>, ConfigError> {
    const FIELD: &str = "compress_ratios";
    let head_dim = fields.required(&["head_dim"], LIMIT_HEAD_DIM)?;
    let rope_dim = fields.required(&["qk_rope_head_dim"], LIMIT_HEAD_DIM)?;
    let window = fields.required(&["sliding_window"], LIMIT_TOKENS)?;
    let indexer_dim = fields.number(&["index_head_dim"], LIMIT_HEAD_DIM)?.unwrap_or(0);
    fields.complete()?;
    let list = fields.list(FIELD).filter(|list| list.len() >= count);
    let list = list.ok_or_else(|| fields.wrong(FIELD, "one entry a layer"))?;
    let ratios: Vec<u64> =
        list.iter().map(|value| entry(fields, FIELD, value)).collect::<Result<_, _>>()?;
    let finest = ratios.iter().copied().filter(|ratio| *ratio > 0).min().unwrap_or(0);
    let layer = |&ratio: &u64| match ratio {
        0 => {
            // Keys are values: one vector a token.
            let heads = Heads { kv: 1, key_dim: head_dim, value_dim: 0 };
            Cache::Sliding { heads, window }
        }
        ratio => Cache::Latent(Latent {
            rank: head_dim.saturating_sub(rope_dim),
            rope_dim,
            indexer_dim: if ratio == finest { indexer_dim } else { 0 },
            compression: ratio,
            window,
            expanded: None,
        }),
    };
    Ok(ratios[..count].iter().map(layer).collect())
}
