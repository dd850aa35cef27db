//! Which layers attend to everything, to a window, to a chunk, or recur instead.

use serde_json::Value;

use super::{LIMIT_LAYERS, LIMIT_TOKENS, entry, family, is_family};
use crate::config::{ConfigError, Fields};

/// What stands in one place of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Attention over all tokens.
    Full,
    /// Attention over the last tokens.
    Sliding(u64),
    /// Attention within a chunk.
    Chunked(u64),
    /// A recurrent layer.
    Recurrent,
    /// A feed-forward block on its own (Nemotron-H).
    FeedForward,
    /// A block of experts on its own (Nemotron-H).
    Experts,
}

/// The kinds of all `count` layers, from the first source that the config has: names per layer, a
/// pattern text, flags per layer, a period.
pub fn slots(fields: &Fields, count: usize) -> Result<Vec<Slot>, ConfigError> {
    let per_layer = match ["layer_types", "layers_block_type"].iter().find(|f| fields.has(f)) {
        Some(field) => Some(named(fields, field)?),
        None => match fields.text("hybrid_override_pattern") {
            Some(pattern) => Some(lettered(fields, pattern)?),
            None => flagged(fields)?,
        },
    };
    match per_layer {
        Some((field, slots)) if slots.len() != count => {
            Err(fields.wrong(field, &format!("{count} entries, one a layer, not {}", slots.len())))
        }
        Some((_, slots)) => Ok(slots),
        None => periodic(fields, count),
    }
}

type PerLayer = (&'static str, Vec<Slot>);

fn window(fields: &Fields) -> Result<Slot, ConfigError> {
    Ok(Slot::Sliding(fields.required(&["sliding_window", "sliding_window_size"], LIMIT_TOKENS)?))
}

fn chunk(fields: &Fields) -> Result<Slot, ConfigError> {
    Ok(Slot::Chunked(fields.required(&["attention_chunk_size"], LIMIT_TOKENS)?))
}

/// `layer_types` and `layers_block_type`: a word per layer.
fn named(fields: &Fields, field: &'static str) -> Result<PerLayer, ConfigError> {
    let wrong = || fields.wrong(field, "a list of known layer types");
    let mut slots = Vec::new();
    for value in fields.list(field).ok_or_else(wrong)? {
        slots.push(match value.as_str().ok_or_else(wrong)? {
            "full_attention" | "attention" | "full" | "global" | "global_attention" => Slot::Full,
            "sliding_attention" | "sliding" | "local" | "local_attention" | "swa" => {
                window(fields)?
            }
            "chunked_attention" | "chunked" => chunk(fields)?,
            "linear_attention"
            | "lightning_attention"
            | "mamba"
            | "mamba2"
            | "gdn"
            | "kda"
            | "conv"
            | "short_conv"
            | "recurrent" => Slot::Recurrent,
            "mlp" | "feed_forward" => Slot::FeedForward,
            "moe" => Slot::Experts,
            _ => return Err(wrong()),
        });
    }
    Ok((field, slots))
}

/// Nemotron-H: `M` Mamba-2, `*` attention, `-` feed-forward, `E` experts.
fn lettered(fields: &Fields, pattern: &str) -> Result<PerLayer, ConfigError> {
    const FIELD: &str = "hybrid_override_pattern";
    let slot = |letter| match letter {
        'M' => Ok(Slot::Recurrent),
        '*' => Ok(Slot::Full),
        '-' => Ok(Slot::FeedForward),
        'E' => Ok(Slot::Experts),
        _ => Err(fields.wrong(FIELD, "letters M, *, - and E")),
    };
    Ok((FIELD, pattern.chars().map(slot).collect::<Result<_, _>>()?))
}

/// A number per layer: MiniMax `attn_type_list` (1 softmax, 0 lightning), MiMo `hybrid_layer_pattern`
/// (1 window), Llama 4 `no_rope_layers` (1 = rope, so chunked), Jamba/Bamba `attn_layer_indices`.
fn flagged(fields: &Fields) -> Result<Option<PerLayer>, ConfigError> {
    let has = |field: &str| fields.list(field).is_some_and(|list| !list.is_empty());
    let (field, one, zero) = if has("attn_type_list") {
        ("attn_type_list", Slot::Full, Slot::Recurrent)
    } else if has("hybrid_layer_pattern") {
        ("hybrid_layer_pattern", window(fields)?, Slot::Full)
    } else if has("no_rope_layers") && fields.has("attention_chunk_size") {
        ("no_rope_layers", chunk(fields)?, Slot::Full)
    } else {
        return Ok(None);
    };
    let slot = |value: &Value| match entry(fields, field, value)? {
        0 => Ok(zero),
        _ => Ok(one),
    };
    let list = fields.list(field).into_iter().flatten();
    Ok(Some((field, list.map(slot).collect::<Result<_, ConfigError>>()?)))
}

/// Every n-th layer full where a period says so, else windows or full attention throughout.
fn periodic(fields: &Fields, count: usize) -> Result<Vec<Slot>, ConfigError> {
    let every = |period: u64, other: Slot| {
        let period = period.max(1) as usize;
        let slot = |layer: usize| if layer % period == period - 1 { Slot::Full } else { other };
        (0..count).map(slot).collect()
    };
    if is_family(fields, &["mamba", "falcon_mamba"]) {
        return Ok(vec![Slot::Recurrent; count]);
    }
    if let Some(pattern) = fields.text("sliding_window_pattern") {
        return repeated(fields, pattern, count);
    }
    if let Some(period) = fields.number(&["full_attention_interval"], LIMIT_LAYERS)? {
        return Ok(every(period, Slot::Recurrent));
    }
    if let Some(slots) = listed_attention(fields, count)? {
        return Ok(slots);
    }
    let uses_window = fields.flag("use_sliding_window") != Some(false);
    let window =
        fields.number(&["sliding_window"], LIMIT_TOKENS)?.filter(|w| *w > 0 && uses_window);
    if let Some(window) = window {
        return Ok(match window_period(fields)? {
            Some(WindowPeriod::FullAt(first, period)) => (0..count)
                .map(|layer| match layer == first || layer % period == period - 1 {
                    true => Slot::Full,
                    false => Slot::Sliding(window),
                })
                .collect(),
            Some(WindowPeriod::From(first)) => {
                let slot = |layer| if layer < first { Slot::Full } else { Slot::Sliding(window) };
                (0..count).map(slot).collect()
            }
            None => vec![Slot::Sliding(window); count],
        });
    }
    match fields.number(&["attention_chunk_size"], LIMIT_TOKENS)? {
        // Llama 4: every fourth layer has no rope and attends to all.
        Some(chunk) if chunk > 0 => Ok(every(4, Slot::Chunked(chunk))),
        _ => Ok(vec![Slot::Full; count]),
    }
}

/// EXAONE 4: `LLLG`, repeated: `L` a window, `G` full.
fn repeated(fields: &Fields, pattern: &str, count: usize) -> Result<Vec<Slot>, ConfigError> {
    let wrong = || fields.wrong("sliding_window_pattern", "a period, or letters L and G");
    let slot = |letter| match letter {
        'L' => window(fields),
        'G' => Ok(Slot::Full),
        _ => Err(wrong()),
    };
    let period: Vec<Slot> = pattern.chars().map(slot).collect::<Result<_, _>>()?;
    match period.is_empty() {
        true => Err(wrong()),
        false => Ok(period.iter().copied().cycle().take(count).collect()),
    }
}

/// Where full layers stand among window layers.
enum WindowPeriod {
    /// At `first` and at every `period`-th.
    FullAt(usize, usize),
    /// Windows from a layer on.
    From(usize),
}

/// The period from the config, else what the family's configs leave unsaid.
fn window_period(fields: &Fields) -> Result<Option<WindowPeriod>, ConfigError> {
    let names = ["sliding_window_pattern", "_sliding_window_pattern"];
    if let Some(period) = fields.number(&names, LIMIT_LAYERS)?.filter(|period| *period > 0) {
        return Ok(Some(WindowPeriod::FullAt(usize::MAX, period as usize)));
    }
    let family = family(fields);
    let qwen = family.starts_with("qwen");
    if let Some(first) = fields.number(&["max_window_layers"], LIMIT_LAYERS)?.filter(|_| qwen) {
        return Ok(Some(WindowPeriod::From(first as usize)));
    }
    let known = [
        ("gemma2", usize::MAX, 2),
        ("gemma3n", usize::MAX, 5),
        ("gemma3", usize::MAX, 6),
        ("gpt_oss", usize::MAX, 2),
        ("cohere2", usize::MAX, 4),
        ("mimo_v2", 0, 6),
    ];
    let found = known.iter().find(|(prefix, _, _)| family.starts_with(prefix));
    Ok(found.map(|(_, first, period)| WindowPeriod::FullAt(*first, *period)))
}

/// Recurrent models that name or count their attention layers: `attn_layer_indices` (Bamba),
/// `full_attn_idxs` (LFM2),
/// `attn_layer_period` and `attn_layer_offset` (Jamba), `linear_attn_config.full_attn_layers` (Kimi
/// Linear, counted from 1) or a bare count `full_attn_layers`, spread evenly.
fn listed_attention(fields: &Fields, count: usize) -> Result<Option<Vec<Slot>>, ConfigError> {
    let kimi = fields.get("linear_attn_config").and_then(|config| config.get("full_attn_layers"));
    let indices = ["attn_layer_indices", "full_attn_idxs"];
    let listed = indices.iter().find_map(|name| Some((*name, fields.list(name)?)));
    let full: Vec<usize> = if let Some((name, list)) = listed {
        let index = |value| entry(fields, name, value).map(|index| index as usize);
        list.iter().map(index).collect::<Result<_, _>>()?
    } else if let Some(list) = kimi.and_then(Value::as_array) {
        let index = |value| entry(fields, "linear_attn_config", value);
        let indices: Vec<u64> = list.iter().map(index).collect::<Result<_, _>>()?;
        indices.into_iter().map(|index| (index as usize).saturating_sub(1)).collect()
    } else if let Some(full) = fields.number(&["full_attn_layers"], count as u64)? {
        (0..full as usize).map(|index| (index + 1) * count / full as usize - 1).collect()
    } else if let Some(period) = fields.number(&["attn_layer_period"], LIMIT_LAYERS)? {
        let offset = fields.number(&["attn_layer_offset"], LIMIT_LAYERS)?.unwrap_or(0);
        (0..count).filter(|layer| *layer as u64 % period.max(1) == offset).collect()
    } else {
        return Ok(None);
    };
    let slot = |layer| if full.contains(&layer) { Slot::Full } else { Slot::Recurrent };
    Ok(Some((0..count).map(slot).collect()))
}
