//! Draft layers: next-token-prediction layers shipped with a model, and EAGLE heads beside it.

use super::LIMIT_LAYERS;
use crate::config::{ConfigError, Fields};
use crate::model::Cache;

/// Names of the field that counts next-token-prediction layers.
pub const NEXT_TOKEN_LAYERS: [&str; 3] =
    ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"];

/// What the next-token-prediction layers keep: the same as the last layer that caches tokens.
pub fn layers(fields: &Fields, target: &[Cache]) -> Result<Vec<Cache>, ConfigError> {
    let count = fields.number(&NEXT_TOKEN_LAYERS, LIMIT_LAYERS)?.unwrap_or(0) as usize;
    Ok(like_target(target).map_or(Vec::new(), |layer| vec![layer; count]))
}

/// The cache of a draft layer built like the target's attention (MTP, EAGLE).
pub fn like_target(target: &[Cache]) -> Option<Cache> {
    let caches = |layer: &&Cache| matches!(layer, Cache::Full { .. } | Cache::Latent(_));
    target.iter().rev().find(caches).copied()
}
