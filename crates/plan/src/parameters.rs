//! Parameter counts from config fields, by class.

use serde_json::Value;

use crate::config::{ConfigError, Fields, whole};
use crate::families::attention::{HIDDEN, QUERY_HEADS, head_dim};
use crate::families::drafter::NEXT_TOKEN_LAYERS;
use crate::families::recurrent::{inner_width, is_first_mamba};
use crate::families::window::{self, Slot};
use crate::families::{LAYER_FIELDS, LIMIT_DIM, LIMIT_LAYERS, is_family, is_parallel};
use crate::model::{Cache, MissingFields, Parameters};

/// Names of the field that counts routed experts.
pub const EXPERTS: [&str; 3] = ["n_routed_experts", "num_local_experts", "num_experts"];
/// Names of the field that counts the experts of a token.
pub const EXPERTS_PER_TOKEN: [&str; 2] = ["num_experts_per_tok", "top_k_experts"];
/// Names of the field with the width of the dense feed-forward layer.
pub const INTERMEDIATE: [&str; 4] = ["intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"];

/// Counts the parameters, or names the fields that the count needs.
pub fn count(fields: &Fields, layers: &[Cache]) -> Result<Parameters, MissingFields> {
    let as_missing = |error: ConfigError| match error {
        ConfigError::Missing(missing) => missing,
        // A field with a wrong value is as good as missing: the mend is the same.
        ConfigError::Wrong { model, field, .. } => MissingFields { model, fields: vec![field] },
        other => MissingFields { model: fields.model().into(), fields: vec![other.to_string()] },
    };
    Counter { fields, layers }.count().map_err(as_missing)
}

struct Counter<'a> {
    fields: &'a Fields,
    layers: &'a [Cache],
}

impl Counter<'_> {
    fn number(&self, names: &[&str]) -> Result<Option<u64>, ConfigError> {
        self.fields.number(names, LIMIT_DIM)
    }

    fn required(&self, names: &[&str]) -> Result<u64, ConfigError> {
        self.fields.required(names, LIMIT_DIM)
    }

    fn count(&self) -> Result<Parameters, ConfigError> {
        let fields = self.fields;
        let hidden = self.required(&HIDDEN)?;
        let vocabulary = fields.required(&["vocab_size", "padded_vocab_size"], 1 << 24)?;
        let slots = match fields.list("compress_ratios") {
            Some(_) => vec![Slot::Full; self.layers.len()],
            None => {
                let count = fields.required(&LAYER_FIELDS, LIMIT_LAYERS)? as usize;
                window::slots(fields, count.min(self.layers.len()))?
            }
        };
        let mut sum = Parameters { embedding: vocabulary * hidden, ..Parameters::default() };
        if !self.is_tied() {
            sum.output = vocabulary * hidden;
        }
        sum.small = hidden;
        for (index, slot) in slots.iter().enumerate() {
            sum.small += 2 * hidden;
            self.add_mixer(&mut sum, *slot, index, hidden)?;
            self.add_feed_forward(&mut sum, *slot, index, hidden)?;
        }
        self.add_per_layer_embeddings(&mut sum, hidden)?;
        sum.tower = self.tower()?;
        sum.draft = self.draft(&slots, hidden)?;
        fields.complete()?;
        Ok(sum)
    }

    /// Whether the output matrix is the embedding: the field, else the habit of the family.
    fn is_tied(&self) -> bool {
        let tied = self.fields.flag("tie_word_embeddings");
        tied.unwrap_or_else(|| is_family(self.fields, &["gemma", "cohere"]))
    }

    fn add_mixer(
        &self,
        sum: &mut Parameters,
        slot: Slot,
        index: usize,
        hidden: u64,
    ) -> Result<(), ConfigError> {
        sum.attention += match slot {
            Slot::FeedForward | Slot::Experts => 0,
            Slot::Recurrent => self.recurrent(hidden)?,
            _ if self.fields.has("kv_lora_rank") => self.latent(hidden)?,
            _ if self.fields.has("compress_ratios") => self.compressed(hidden)?,
            _ => self.attention(slot, index, hidden)?,
        };
        if is_parallel(self.fields) {
            sum.attention += self.recurrent(hidden)?;
        }
        Ok(())
    }

    /// Queries, keys, values and output; Qwen3-Next and later gate the output with as many channels as
    /// the queries have; a layer that shares another's KV has no key and value projections.
    fn attention(&self, slot: Slot, index: usize, hidden: u64) -> Result<u64, ConfigError> {
        let queries = self.required(&QUERY_HEADS)?;
        let gated = match self.fields.flag("attn_output_gate") {
            Some(gated) => gated,
            None => self.fields.has("linear_num_value_heads"),
        };
        let (keys, dims) = match self.layers[index] {
            Cache::Nothing => return Ok(0),
            Cache::Shared { with } => (0, self.layers[with].heads()),
            cache => {
                let heads = cache.heads();
                // Gemma 4's global layers project keys only and use them as values.
                let one = slot == Slot::Full && self.fields.flag("attention_k_eq_v") == Some(true);
                let value = |h: crate::model::Heads| if one { 0 } else { h.value_dim };
                (heads.map_or(0, |h| h.kv * (h.key_dim + value(h))), heads)
            }
        };
        let (key_dim, value_dim) = dims.map_or((0, 0), |heads| (heads.key_dim, heads.value_dim));
        let query = queries * key_dim * if gated { 2 } else { 1 };
        Ok(hidden * (query + keys) + queries * value_dim * hidden)
    }

    /// DeepSeek-V2's projections: queries through `q_lora_rank` where there is one, keys and values
    /// through the latent; the indexer's own where there is one.
    fn latent(&self, hidden: u64) -> Result<u64, ConfigError> {
        let heads = self.required(&QUERY_HEADS)?;
        let (rank, rope) =
            (self.required(&["kv_lora_rank"])?, self.required(&["qk_rope_head_dim"])?);
        let (nope, value) =
            (self.required(&["qk_nope_head_dim"])?, self.required(&["v_head_dim"])?);
        let query_rank = self.number(&["q_lora_rank"])?;
        let query = match query_rank {
            Some(query_rank) => hidden * query_rank + query_rank * heads * (nope + rope),
            None => hidden * heads * (nope + rope),
        };
        let keys = hidden * (rank + rope) + rank * heads * (nope + value);
        Ok(query + keys + heads * value * hidden + self.indexer(hidden, query_rank)?)
    }

    fn indexer(&self, hidden: u64, query_rank: Option<u64>) -> Result<u64, ConfigError> {
        let Some(dim) = self.number(&["index_head_dim"])? else {
            return Ok(0);
        };
        let heads = self.required(&["index_n_heads"])?;
        Ok(query_rank.unwrap_or(hidden) * heads * dim + hidden * (dim + heads))
    }

    /// DeepSeek-V4: low-rank queries, one shared key-value vector, low-rank grouped output.
    fn compressed(&self, hidden: u64) -> Result<u64, ConfigError> {
        let heads = self.required(&QUERY_HEADS)?;
        let dim = head_dim(self.fields)?;
        let query = self.required(&["q_lora_rank"])?;
        let output = self.required(&["o_lora_rank"])?;
        let groups = self.number(&["o_groups"])?.unwrap_or(8);
        let grouped = heads * dim * output + groups * output * hidden;
        Ok(hidden * query + query * heads * dim + 2 * hidden * dim + grouped)
    }

    fn recurrent(&self, hidden: u64) -> Result<u64, ConfigError> {
        let state = crate::families::recurrent::state(self.fields)?;
        let taps = state.convolution_channels * state.convolution_taps;
        if self.fields.has("linear_num_value_heads") {
            let values = self.required(&["linear_num_value_heads"])?
                * self.required(&["linear_value_head_dim"])?;
            let heads = self.required(&["linear_num_value_heads"])?;
            // Queries, keys, values; the gate z; beta and alpha per head; the output.
            return Ok(hidden * (state.convolution_channels + 2 * values + 2 * heads) + taps);
        }
        if self.fields.has("linear_attn_config") || self.fields.has("linear_num_heads") {
            let channels = state.convolution_channels / 3;
            // Queries, keys, values, output; decay and gate through a rank of one head.
            let head = state.state_elements / channels.max(1);
            return Ok(hidden * 4 * channels + 2 * (hidden + channels) * head + taps);
        }
        if self.fields.has("conv_L_cache") {
            // Input and two gates, the output.
            return Ok(hidden * 3 * state.convolution_channels
                + state.convolution_channels * hidden
                + taps);
        }
        if is_first_mamba(self.fields) {
            let inner = inner_width(self.fields)?;
            let rank = self.number(&["mamba_dt_rank", "time_step_rank"])?;
            let rank = rank.unwrap_or(hidden.div_ceil(16));
            let states = state.state_elements / inner.max(1);
            // Input and gate, output; step, B and C; the step's own projection; A.
            return Ok(hidden * 3 * inner + inner * (2 * rank + 3 * states) + taps);
        }
        let heads = self.required(&["mamba_num_heads", "mamba_n_heads"])?;
        let inner = heads * self.required(&["mamba_head_dim", "mamba_d_head"])?;
        Ok(hidden * (state.convolution_channels + inner + heads) + inner * hidden + taps)
    }

    fn add_feed_forward(
        &self,
        sum: &mut Parameters,
        slot: Slot,
        index: usize,
        hidden: u64,
    ) -> Result<(), ConfigError> {
        let alone =
            self.fields.has("hybrid_override_pattern") || self.fields.has("layers_block_type");
        let alone = alone && is_family(self.fields, &["nemotron"]);
        let is_expert = match slot {
            _ if alone && !matches!(slot, Slot::FeedForward | Slot::Experts) => return Ok(()),
            Slot::FeedForward => false,
            Slot::Experts => true,
            _ => self.is_expert_layer(index)?,
        };
        // Nemotron-H squares a ReLU: two matrices; all others gate: three.
        let matrices = if is_family(self.fields, &["nemotron_h"]) { 2 } else { 3 };
        if !is_expert {
            sum.dense += matrices * hidden * self.dense_width(index)?;
            return Ok(());
        }
        let experts = self.required(&EXPERTS)?.min(1 << 12);
        let active = self.required(&EXPERTS_PER_TOKEN)?;
        let width = self.expert_width()?;
        sum.experts += matrices * hidden * width * experts;
        sum.experts_active += matrices * hidden * width * active;
        sum.router += hidden * experts;
        sum.dense += matrices * hidden * self.shared_width(width)?;
        Ok(())
    }

    fn expert_width(&self) -> Result<u64, ConfigError> {
        match self.fields.largest(&["moe_intermediate_size"], LIMIT_DIM)? {
            Some(width) => Ok(width),
            None => self.required(&INTERMEDIATE),
        }
    }

    /// Width of what every token passes beside the routed experts.
    fn shared_width(&self, expert: u64) -> Result<u64, ConfigError> {
        let own = [
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ];
        if let Some(width) = self.number(&own)? {
            return Ok(width);
        }
        if let Some(shared) = self.number(&["n_shared_experts", "num_shared_experts"])? {
            return Ok(shared * expert);
        }
        match () {
            () if is_family(self.fields, &["llama4"]) => Ok(expert),
            // Gemma 4's expert layers keep their dense feed-forward beside the experts.
            () if is_family(self.fields, &["gemma4"]) => self.required(&INTERMEDIATE),
            () => Ok(0),
        }
    }

    fn dense_width(&self, index: usize) -> Result<u64, ConfigError> {
        if let Some(width) = self.number(&["intermediate_size_mlp"])? {
            return Ok(width);
        }
        let name = INTERMEDIATE.iter().find(|name| self.fields.list(name).is_some());
        let listed = name.and_then(|name| self.fields.list(name)?.get(index).and_then(whole));
        let width = match listed {
            Some(width) => width.min(LIMIT_DIM),
            None => self.required(&INTERMEDIATE)?,
        };
        // Llama 4 has one dense width for its dense layers, twice that of an expert.
        let wide = is_family(self.fields, &["llama4"])
            || (self.fields.flag("use_double_wide_mlp") == Some(true)
                && matches!(self.layers[index], Cache::Shared { .. }));
        Ok(if wide { 2 * width } else { width })
    }

    /// Which layers route to experts: after `first_k_dense_replace`, by `moe_layer_freq` (a list or a
    /// step), `decoder_sparse_step` and `mlp_only_layers`, `interleave_moe_layer_step`.
    fn is_expert_layer(&self, index: usize) -> Result<bool, ConfigError> {
        let fields = self.fields;
        let none = self.number(&EXPERTS)?.unwrap_or(0) == 0;
        let first = fields.number(&["first_k_dense_replace"], LIMIT_LAYERS)?.unwrap_or(0);
        let only_dense = fields
            .list("mlp_only_layers")
            .is_some_and(|list| list.iter().filter_map(whole).any(|layer| layer == index as u64));
        if none || (index as u64) < first || only_dense {
            return Ok(false);
        }
        if let Some(list) = fields.list("moe_layer_freq") {
            return Ok(list.get(index).and_then(Value::as_u64) == Some(1));
        }
        let steps = ["interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq"];
        let step = fields.number(&steps, LIMIT_LAYERS)?.unwrap_or(1).max(1);
        Ok((index as u64 + 1).is_multiple_of(step))
    }

    /// Gemma 3n and 4: an embedding per layer and the projections that mix it in.
    fn add_per_layer_embeddings(
        &self,
        sum: &mut Parameters,
        hidden: u64,
    ) -> Result<(), ConfigError> {
        let width = self.number(&["hidden_size_per_layer_input"])?.unwrap_or(0);
        if width > 0 {
            let vocabulary = self.fields.required(&["vocab_size_per_layer_input"], 1 << 24)?;
            let layers = self.layers.len() as u64;
            sum.embedding += vocabulary * layers * width;
            sum.dense += hidden * layers * width + layers * 2 * hidden * width;
        }
        Ok(())
    }

    /// Vision tower from `vision_config`: 4 d^2 of attention and the feed-forward per block.
    fn tower(&self) -> Result<u64, ConfigError> {
        let Some(vision) = self.fields.get("vision_config").and_then(Value::as_object) else {
            return Ok(0);
        };
        let number = |names: &[&str]| {
            let value = names.iter().find_map(|name| vision.get(*name).and_then(whole));
            value.map(|value| value.min(LIMIT_DIM))
        };
        let blocks = number(&["depth", "num_hidden_layers", "num_layers"]);
        // Qwen2-VL calls the blocks' width `embed_dim` and the language model's `hidden_size`.
        let (Some(blocks), Some(width)) = (blocks, number(&["embed_dim", "hidden_size", "width"]))
        else {
            return Ok(0);
        };
        let feed_forward = number(&["intermediate_size"]).unwrap_or(4 * width);
        Ok(blocks.min(LIMIT_LAYERS) * (4 * width * width + 2 * width * feed_forward))
    }

    /// Next-token-prediction layers: a projection of two hidden states and one more layer like the last.
    fn draft(&self, slots: &[Slot], hidden: u64) -> Result<u64, ConfigError> {
        let count = self.fields.number(&NEXT_TOKEN_LAYERS, LIMIT_LAYERS)?.unwrap_or(0);
        let like = slots.iter().rposition(|slot| !matches!(slot, Slot::Recurrent));
        let Some(like) = like.filter(|_| count > 0) else {
            return Ok(0);
        };
        let mut one = Parameters::default();
        self.add_mixer(&mut one, slots[like], like, hidden)?;
        self.add_feed_forward(&mut one, slots[like], like, hidden)?;
        let layer = one.attention + one.dense + one.experts + one.router;
        Ok(count * (layer + 2 * hidden * hidden))
    }
}
