//! E23: can a million tokens be served on these GPUs, and where does it break?

use super::prelude::*;

pub struct MillionTokens;

impl Question for MillionTokens {
    fn about(&self) -> About {
        About {
            name: "million-tokens",
            aliases: &["context-parallel"],
            covers: &["E23"],
            asks: "What does one very long context take on a group of GPUs with context parallelism?",
            explanation: "Tensor parallelism divides KV by KV heads only; context parallelism divides it by \
                tokens, so the cache is spread over all GPUs. Prefill is quadratic: 2 × tokens² × heads × \
                head_dim operations a layer under a causal mask. Passing KV round the ring hides behind \
                arithmetic while each rank holds at least (KV heads / query heads) × width × peak / (2 × \
                link) tokens: easy with GQA on NVLink, ten times harder across nodes. Decode reads KV once a \
                token over all GPUs together and adds a small exchange per layer. It breaks first at memory \
                per GPU, then at prefill time.",
            source: "Context parallelism for million-token inference (arXiv 2411.01783): Llama 3 405B, 1 M tokens, \
                128 H100 in 77 s",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let width = |facts: &Facts| {
            let model = facts.model()?;
            Ok((model.heads.unwrap_or(0) * model.head_dim().unwrap_or(0)) as f64)
        };
        let layers = |facts: &Facts| {
            Ok(facts.model()?.layers.iter().filter(|layer| layer.heads().is_some()).count() as f64)
        };
        let groups = |facts: &Facts| {
            let model = facts.model()?;
            Ok(model.kv_heads().unwrap_or(1) as f64 / model.heads.unwrap_or(1).max(1) as f64)
        };
        let link = |facts: &Facts| Ok(facts.device()?.link_bytes_s());
        vec![
            standard::model("Llama-3.1-70B"),
            standard::gpu("H100"),
            standard::count(8.0),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            standard::context(1_000_000.0),
            standard::kv_bytes(),
            standard::active_parameters(),
            Input::worked(
                "width",
                Unit::Count,
                "heads × head_dim",
                width,
                "channels of all query heads",
            ),
            Input::worked("layers", Unit::Count, "the model's", layers, "attention layers"),
            Input::worked(
                "kv_share",
                Unit::Ratio,
                "the model's",
                groups,
                "KV heads over query heads",
            ),
            standard::memory(),
            standard::utilization(0.9),
            standard::overhead(),
            standard::peak(),
            standard::mfu(),
            standard::bandwidth(),
            Input::worked(
                "ring_link",
                Unit::BytesPerSecond,
                "the device's",
                link,
                "link between ranks",
            ),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; count, weight_bytes, kv_bytes, active_parameters, width, layers, kv_share, memory);
        inputs!(sheet; utilization, overhead, peak, mfu, bandwidth, ring_link, context);
        step!(sheet, kv_total: Bytes = context * kv_bytes, "KV of the context");
        step!(
            sheet,
            per_gpu: Bytes = (weight_bytes + kv_total) / count + overhead,
            "a GPU's share of weights and KV, and its overhead"
        );
        step!(sheet, budget: Bytes = memory * utilization, "what it may use");
        step!(
            sheet,
            flops: Count = 2.0 * active_parameters * context + 2.0 * context * context * width * layers,
            "operations of the prefill"
        );
        step!(sheet, prefill_s: Seconds = flops / (count * peak * mfu), "prefill");
        step!(sheet, token_s: Seconds = (weight_bytes + kv_total) / (count * bandwidth), "a decoded token at least");
        step!(
            sheet,
            ring_tokens: Tokens = kv_share * 2.0 * peak * mfu / (2.0 * ring_link),
            "tokens a rank needs to hide the ring"
        );
        step!(sheet, rank_tokens: Tokens = context / count, "tokens a rank has");
        let does_fit = per_gpu <= budget;
        let hides = rank_tokens >= ring_tokens;
        let advice = match (does_fit, hides) {
            (false, _) => "memory breaks first: --kv-cache-dtype fp8, smaller weights or more GPUs",
            (true, false) => {
                "the ring is exposed: pass queries instead of KV, or keep the ring in one node"
            }
            (true, true) => {
                "one such request at a time fits: set --max-model-len, and \
                             --decode-context-parallel-size beyond the KV heads"
            }
        };
        Ok(Verdict { answer: "per_gpu", decision: standard::fits(does_fit), advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("model", "Llama-3.1-405B"),
                ("count", "128"),
                ("mfu", "0.5076"),
                ("kv-bytes", "516096"),
                ("overhead", "3GiB"),
            ],
            answer: 1.359_428e10,
            cited: Cited {
                step: "prefill_s",
                value: 77.0,
                tolerance: 0.02,
                from: "arXiv 2411.01783: 1 M tokens on 128 H100 at 502 TFLOP/s each: 77 s",
            },
            moves: [
                Move { input: "context", to: "2000000", answer: 1.762_628e10 },
                Move { input: "count", to: "64", answer: 2.396_733e10 },
            ],
        }
    }
}
