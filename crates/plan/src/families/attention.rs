//! Multi-head, grouped and multi-query attention: heads of a layer's KV cache.

use serde_json::Value;

use super::window::Slot;
use super::{LIMIT_DIM, LIMIT_HEAD_DIM, LIMIT_HEADS, entry};
use crate::config::{ConfigError, Fields, whole};
use crate::model::{Cache, Heads};

/// Names of the field that counts query heads.
pub const QUERY_HEADS: [&str; 3] = ["num_attention_heads", "n_head", "n_heads"];
/// Names of the field that counts KV heads.
pub const KV_HEADS: [&str; 4] =
    ["num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"];
/// Names of the field with a head's channels.
pub const HEAD_DIM: [&str; 3] = ["head_dim", "attention_head_dim", "kv_channels"];
/// Names of the field with the width of the residual stream.
pub const HIDDEN: [&str; 3] = ["hidden_size", "n_embd", "d_model"];

/// The cache of attention layer `index` of the given kind.
pub fn cache(fields: &Fields, slot: Slot, index: usize) -> Result<Cache, ConfigError> {
    let heads = heads(fields, slot, index)?;
    if heads.kv == 0 {
        return Ok(Cache::Nothing);
    }
    Ok(match slot {
        Slot::Sliding(window) => Cache::Sliding { heads, window },
        Slot::Chunked(chunk) => Cache::Chunked { heads, chunk },
        _ => Cache::Full { heads },
    })
}

/// KV heads and dimensions; full layers may differ from window layers (`global_*` of Gemma 4, `swa_*` of
/// MiMo), and each layer from the next (lists, `block_configs` of Nemotron-NAS).
fn heads(fields: &Fields, slot: Slot, index: usize) -> Result<Heads, ConfigError> {
    let special = match slot {
        Slot::Full => ["num_global_key_value_heads", "global_head_dim", "global_v_head_dim"],
        Slot::Sliding(_) => ["swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"],
        _ => [""; 3],
    };
    let head_dim = head_dim(fields)?;
    let key_dim = fields.number(&[special[1]], LIMIT_HEAD_DIM)?.unwrap_or(head_dim);
    let value_dim = match fields.number(&[special[2]], LIMIT_HEAD_DIM)? {
        Some(value_dim) => value_dim,
        // A head's own width for global layers also widens its values.
        None if key_dim != head_dim => key_dim,
        None => fields.number(&["v_head_dim"], LIMIT_HEAD_DIM)?.unwrap_or(head_dim),
    };
    let kv = match fields.number(&[special[0]], LIMIT_HEADS)? {
        Some(kv) => kv,
        None => kv_heads(fields, index)?,
    };
    Ok(Heads { kv, key_dim, value_dim })
}

/// Channels of a head: its own field, else hidden size / query heads.
pub fn head_dim(fields: &Fields) -> Result<u64, ConfigError> {
    if let Some(dim) = fields.number(&HEAD_DIM, LIMIT_HEAD_DIM)? {
        return Ok(dim);
    }
    if fields.has(HIDDEN[0]) || HIDDEN.iter().any(|name| fields.has(name)) {
        let hidden = fields.required(&HIDDEN, LIMIT_DIM)?;
        let heads = fields.required(&QUERY_HEADS, LIMIT_HEADS)?;
        return Ok(hidden / heads.max(1));
    }
    fields.required(&HEAD_DIM, LIMIT_HEAD_DIM)
}

fn kv_heads(fields: &Fields, index: usize) -> Result<u64, ConfigError> {
    if let Some(blocks) = fields.list("block_configs") {
        return nas_heads(fields, blocks.get(index));
    }
    let Some(name) = KV_HEADS.iter().find(|name| fields.has(name)) else {
        // DBRX and MPT nest the count.
        let nested = fields.get("attn_config").and_then(|config| config.get("kv_n_heads"));
        if let Some(heads) = nested.and_then(whole).filter(|heads| *heads <= LIMIT_HEADS) {
            return Ok(heads);
        }
        // Falcon-7B and StarCoder: one KV head for all.
        let grouped = fields.flag("new_decoder_architecture") == Some(true);
        if fields.flag("multi_query") == Some(true) && !grouped {
            return Ok(1);
        }
        // Without a KV head count every query head has its own (multi-head attention).
        return match fields.number(&QUERY_HEADS, LIMIT_HEADS)? {
            Some(heads) => Ok(heads),
            None => fields.required(&KV_HEADS, LIMIT_HEADS),
        };
    };
    match fields.list(name) {
        Some(list) => match list.get(index) {
            Some(value) => match entry(fields, name, value)? {
                heads if heads <= LIMIT_HEADS => Ok(heads),
                _ => Err(fields.wrong(name, &format!("at most {LIMIT_HEADS} heads a layer"))),
            },
            None => Err(fields.wrong(name, "one entry a layer")),
        },
        None => fields.required(&[name], LIMIT_HEADS),
    }
}

/// Nemotron-NAS: `block_configs[i].attention` says `no_op`, or how many query heads share a KV head.
fn nas_heads(fields: &Fields, block: Option<&Value>) -> Result<u64, ConfigError> {
    let wrong =
        || fields.wrong("block_configs", "attention with n_heads_in_group or no_op per layer");
    let attention = block.and_then(|block| block.get("attention")).ok_or_else(wrong)?;
    let is_set = |key: &str| attention.get(key).and_then(Value::as_bool) == Some(true);
    if is_set("no_op") || is_set("replace_with_linear") {
        return Ok(0);
    }
    let group = attention.get("n_heads_in_group").and_then(Value::as_u64).filter(|g| *g > 0);
    let heads = fields.required(&QUERY_HEADS, LIMIT_HEADS)?;
    group.map(|group| heads / group).ok_or_else(wrong)
}
