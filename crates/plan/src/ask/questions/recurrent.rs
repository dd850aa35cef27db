//! E17: what does a recurrent hybrid keep per sequence, and which block size follows?

use super::prelude::*;
use crate::model::Cache;

pub struct Recurrent;

impl Question for Recurrent {
    fn about(&self) -> About {
        About {
            name: "recurrent",
            aliases: &["mamba", "gdn"],
            covers: &["E17"],
            asks: "Which attention block size do recurrent layers force, and what do their states cost?",
            explanation: "A recurrent layer keeps one state a sequence, whatever its length. vLLM gives it a \
                page of the same pool, so the attention block grows until its page is as large: 16 × \
                ceil(state / (16 × attention bytes a token)), and the state's page is padded up to it. FP8 KV \
                therefore doubles the block and saves nothing on states. Prefix caching keeps a state per \
                aligned boundary; drafts keep one more a draft token.",
            source: "vLLM HybridAttentionMambaModelConfig; block sizes as vLLM logs them",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let meaning = "states a sequence keeps (1 + draft tokens, 2 + with prefix caching)";
        vec![
            standard::model("Qwen3.5-0.8B"),
            standard::tp(1.0),
            standard::kv_cache_dtype(),
            Input::number("sequences", Unit::Sequences, 256.0, "--max-num-seqs").whole(),
            Input::number("states", Unit::Count, 1.0, meaning).whole(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; tp, sequences, states);
        let dtype = standard::dtype(&sheet.word("kv_cache_dtype")?)?;
        let model = sheet.model()?;
        let ranks = tp as u64;
        let state = model.layers.iter().find_map(|layer| match layer {
            Cache::Recurrent(recurrent) => Some(recurrent.bytes(ranks, 0, 2, 2)),
            _ => None,
        });
        let token =
            model.layers.iter().map(|layer| layer.token_bytes(dtype, ranks)).find(|b| *b > 0);
        let (Some(state), Some(token)) = (state, token) else {
            return Err(AskError::Wrong {
                field: "--model".into(),
                value: model.name.clone(),
                mend: "it does not mix recurrent and attention layers; ask about Qwen3.5-0.8B or another".into(),
            });
        };
        let layers =
            model.layers.iter().filter(|layer| matches!(layer, Cache::Recurrent(_))).count();
        let (state, token, layers) = (state as f64, token as f64, layers as f64);
        let attention_bytes = model.kv_bytes_per_token(dtype, ranks) as f64;
        let origin = "the model's";
        fact!(sheet, state_bytes: Bytes = state, origin, "state of a sequence in one layer, one rank");
        fact!(sheet, token_bytes: Bytes = token, origin, "attention bytes a token in one layer");
        fact!(sheet, attention_bytes: Bytes = attention_bytes, origin, "attention bytes a token, all layers");
        fact!(sheet, recurrent_layers: Count = layers, origin, "recurrent layers");
        step!(
            sheet,
            all_states: Bytes = sequences * states * recurrent_layers * state_bytes,
            "states of all sequences"
        );
        step!(
            sheet,
            worth_tokens: Tokens = recurrent_layers * state_bytes / attention_bytes,
            "tokens of attention KV that a sequence's states are worth"
        );
        step!(sheet, block: Tokens = 16.0 * ceil(state_bytes / (16.0 * token_bytes)), "attention block size");
        step!(sheet, padding: Ratio = block * token_bytes / state_bytes - 1.0, "padding of a state's page");
        let advice = "states, not tokens, limit concurrency at short context: lower --max-num-seqs; expect \
                      prefix hits only at block boundaries this far apart";
        Ok(Verdict { answer: "block", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "Qwen3.5-0.8B")],
            answer: 544.0,
            cited: Cited {
                step: "block",
                value: 544.0,
                tolerance: 0.0,
                from: "logged by vLLM: 544, page padded by 2.64 %",
            },
            moves: [
                Move { input: "model", to: "granite-4.0-h-1b", answer: 400.0 },
                Move { input: "kv_cache_dtype", to: "fp8", answer: 1072.0 },
            ],
        }
    }
}
