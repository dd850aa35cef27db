//! E14: what does MLA lose under tensor parallelism, and what does DP-attention win back?

use super::prelude::*;
use crate::model::Parameters;

pub struct MlaTp;

impl Question for MlaTp {
    fn about(&self) -> About {
        About {
            name: "mla-tp",
            aliases: &["dp-attention"],
            covers: &["E14"],
            asks: "How many times more tokens does DP-attention hold than tensor parallelism under MLA?",
            explanation: "One latent serves all heads, so it cannot be sharded by heads: under TP every rank \
                keeps the whole cache and the group holds what one rank holds. With DP-attention each rank \
                keeps its own requests, ranks times as many, but also all attention weights, \
                (ranks - 1) / ranks of them more than before; those come out of the pool.",
            source: "DeepSeek-V2 (arXiv 2405.04434); SGLang DP-attention docs",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let attention = |facts: &Facts| {
            let attention = facts.model()?.parameters()?.attention;
            let format = standard::weight_format(facts.word("weights")?)?;
            Ok(format.bytes(&Parameters { attention, ..Parameters::default() }))
        };
        let whole = |facts: &Facts| {
            let dtype = standard::dtype(facts.word("kv_cache_dtype")?)?;
            Ok(facts.model()?.kv_bytes_per_token(dtype, 1) as f64)
        };
        let (per_token, own) = (Unit::BytesPerToken, "KV of a token on a rank that has it alone");
        let origin = "the model's attention parameters in that format";
        let meaning = "attention weights, over all ranks";
        vec![
            standard::model("DeepSeek-V3"),
            Input { is_fixed: false, ..standard::tp(8.0) },
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            Input::worked("own_bytes", per_token, "the model's, on one rank", whole, own),
            Input {
                fallback: crate::ask::input::Fallback::Word("fp8", &[]),
                ..standard::weights()
            },
            Input::worked("attention_bytes", Unit::Bytes, origin, attention, meaning)
                .within(0.0, 1e13),
            Input::number(
                "pool",
                Unit::Bytes,
                40.0 * 1_073_741_824.0,
                "KV memory of a rank under TP",
            ),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; tp, kv_bytes, own_bytes, attention_bytes, pool);
        step!(sheet, tp_tokens: Tokens = pool / kv_bytes, "the group under TP: every rank the same");
        step!(sheet, gross: Ratio = tp * kv_bytes / own_bytes, "times more tokens if weights cost nothing");
        step!(
            sheet,
            extra_weights: Bytes = attention_bytes * (tp - 1.0) / tp,
            "attention weights a rank keeps in addition"
        );
        step!(
            sheet,
            dp_tokens: Tokens = tp * max(0.0, pool - extra_weights) / own_bytes,
            "the group under DP-attention"
        );
        step!(sheet, gain: Ratio = dp_tokens / tp_tokens, "times more tokens");
        let does_gain = gain > 1.0;
        let advice = match does_gain {
            true => {
                "--enable-dp-attention --dp-size = ranks (SGLang), --data-parallel-size with \
                     --enable-expert-parallel (vLLM)"
            }
            false => {
                "stay with TP: its ranks divide the KV already, or copied weights eat the gain"
            }
        };
        let decision = Some(if does_gain { "DP-attention" } else { "TP" }.to_string());
        Ok(Verdict { answer: "gain", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "DeepSeek-V3"), ("tp", "8"), ("attention-bytes", "11.41GB")],
            answer: 6.1403,
            cited: Cited {
                step: "gross",
                value: 8.0,
                tolerance: 0.0,
                from: "economics 5.7: DP-attention gives aggregate capacity x8 on 8 ranks",
            },
            moves: [
                Move { input: "pool", to: "20GiB", answer: 4.2807 },
                Move { input: "tp", to: "4", answer: 3.2030 },
            ],
        }
    }
}
