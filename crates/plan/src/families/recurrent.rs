//! Recurrent layers: Mamba-1 and 2, gated delta nets (GDN), Kimi delta attention (KDA), lightning attention,
//! and short convolutions (LFM2).

use serde_json::Value;

use super::attention::HIDDEN;
use super::{LIMIT_DIM, LIMIT_HEAD_DIM, is_family};
use crate::config::{ConfigError, Fields, whole};
use crate::model::{Recurrent, RecurrentKind};

/// The state of one recurrent layer, recognized by the fields that describe it.
pub fn state(fields: &Fields) -> Result<Recurrent, ConfigError> {
    let state_bytes = state_bytes(fields);
    if fields.has("linear_attn_config") || fields.has("linear_num_heads") {
        return kda(fields);
    }
    if fields.has("conv_L_cache") {
        return short_convolution(fields);
    }
    if is_first_mamba(fields) {
        return mamba1(fields, state_bytes);
    }
    if fields.has("linear_num_value_heads") {
        let key_heads = fields.required(&["linear_num_key_heads"], LIMIT_HEAD_DIM)?;
        let value_heads = fields.required(&["linear_num_value_heads"], LIMIT_HEAD_DIM)?;
        let key_dim = fields.required(&["linear_key_head_dim"], LIMIT_HEAD_DIM)?;
        let value_dim = fields.required(&["linear_value_head_dim"], LIMIT_HEAD_DIM)?;
        return Ok(Recurrent {
            kind: RecurrentKind::Gdn,
            convolution_channels: 2 * key_heads * key_dim + value_heads * value_dim,
            convolution_taps: fields.required(&["linear_conv_kernel_dim"], LIMIT_HEAD_DIM)?,
            state_elements: value_heads * key_dim * value_dim,
            state_bytes,
        });
    }
    if fields.list("attn_type_list").is_some() {
        let heads = fields.required(&["num_attention_heads"], LIMIT_HEAD_DIM)?;
        let dim = super::attention::head_dim(fields)?;
        let state_elements = heads * dim * dim;
        let kind = RecurrentKind::Lightning;
        let (convolution_channels, convolution_taps) = (0, 0);
        return Ok(Recurrent {
            kind,
            convolution_channels,
            convolution_taps,
            state_elements,
            state_bytes,
        });
    }
    mamba2(fields, state_bytes)
}

/// LFM2: the last `conv_L_cache - 1` inputs of a gated convolution over the residual stream.
fn short_convolution(fields: &Fields) -> Result<Recurrent, ConfigError> {
    let channels = match fields.number(&["conv_dim"], LIMIT_DIM)? {
        Some(channels) => channels,
        None => fields.required(&HIDDEN, LIMIT_DIM)?,
    };
    Ok(Recurrent {
        kind: RecurrentKind::ShortConvolution,
        convolution_channels: channels,
        convolution_taps: fields.required(&["conv_L_cache"], LIMIT_HEAD_DIM)?,
        state_elements: 0,
        state_bytes: None,
    })
}

/// Whether the recurrence is Mamba-1, whose channels have no heads (Jamba, Falcon-Mamba).
pub fn is_first_mamba(fields: &Fields) -> bool {
    let heads = ["mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads"];
    let states = ["mamba_d_state", "state_size"].iter().any(|name| fields.has(name));
    states && !heads.iter().any(|name| fields.has(name))
}

/// Channels inside a Mamba-1 layer: `mamba_expand * hidden_size`, or stated.
pub fn inner_width(fields: &Fields) -> Result<u64, ConfigError> {
    if is_family(fields, &["mamba", "falcon_mamba"])
        && let Some(width) = fields.number(&["intermediate_size"], LIMIT_DIM)?
    {
        return Ok(width);
    }
    let expand = fields.number(&["mamba_expand", "expand"], 1 << 6)?.unwrap_or(2);
    Ok(expand * fields.required(&HIDDEN, LIMIT_DIM)?)
}

/// Mamba-1: convolution over the inner channels, `d_state` elements for each.
fn mamba1(fields: &Fields, state_bytes: Option<u64>) -> Result<Recurrent, ConfigError> {
    let inner = inner_width(fields)?;
    let state = fields.required(&["mamba_d_state", "state_size"], LIMIT_HEAD_DIM)?;
    Ok(Recurrent {
        kind: RecurrentKind::Mamba1,
        convolution_channels: inner,
        convolution_taps: fields.number(&["mamba_d_conv", "conv_kernel"], 64)?.unwrap_or(4),
        state_elements: inner * state,
        state_bytes,
    })
}

/// Mamba-2: convolution over `heads * head_dim + 2 * groups * d_state` channels, state of
/// `heads * head_dim * d_state`.
fn mamba2(fields: &Fields, state_bytes: Option<u64>) -> Result<Recurrent, ConfigError> {
    let heads = fields.required(&["mamba_num_heads", "mamba_n_heads"], LIMIT_HEAD_DIM)?;
    let head_dim = fields.required(&["mamba_head_dim", "mamba_d_head"], LIMIT_HEAD_DIM)?;
    let state = fields.required(&["ssm_state_size", "mamba_d_state"], LIMIT_HEAD_DIM)?;
    let groups = fields.required(&["n_groups", "mamba_n_groups"], LIMIT_HEAD_DIM)?;
    Ok(Recurrent {
        kind: RecurrentKind::Mamba2,
        convolution_channels: heads * head_dim + 2 * groups * state,
        convolution_taps: fields.required(&["conv_kernel", "mamba_d_conv"], LIMIT_HEAD_DIM)?,
        state_elements: heads * head_dim * state,
        state_bytes,
    })
}

/// KDA: convolutions over queries, keys and values, a matrix of `head_dim^2` per head in f32.
fn kda(fields: &Fields) -> Result<Recurrent, ConfigError> {
    let nested = |key: &str| fields.get("linear_attn_config")?.get(key).and_then(whole_small);
    let number = |key: &str, name: &'static str| match nested(key) {
        Some(value) => Ok(value),
        None => fields.required(&[name], LIMIT_HEAD_DIM),
    };
    let heads = number("num_heads", "linear_num_heads")?;
    let head_dim = number("head_dim", "linear_head_dim")?;
    Ok(Recurrent {
        kind: RecurrentKind::Kda,
        convolution_channels: 3 * heads * head_dim,
        convolution_taps: number("short_conv_kernel_size", "short_conv_kernel_size")?,
        state_elements: heads * head_dim * head_dim,
        state_bytes: Some(4),
    })
}

fn whole_small(value: &Value) -> Option<u64> {
    whole(value).filter(|value| *value <= LIMIT_HEAD_DIM)
}

/// Bytes of a state element where the config says: `mamba_ssm_dtype`, float32 in every Qwen3.5 and later.
fn state_bytes(fields: &Fields) -> Option<u64> {
    let dtype = ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"].iter().find_map(|f| fields.text(f));
    match dtype {
        Some("float32") => Some(4),
        Some("bfloat16" | "float16") => Some(2),
        _ if is_family(fields, &["qwen3_5"]) => Some(4),
        _ => None,
    }
}
