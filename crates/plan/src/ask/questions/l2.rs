//! E24: does pinning data in the last-level cache help a decode step?

use super::prelude::*;

pub struct L2;

impl Question for L2 {
    fn about(&self) -> About {
        About {
            name: "l2",
            aliases: &["cache"],
            covers: &["E24"],
            asks: "Which share of a decode step can the on-device cache hold, and so save at most?",
            explanation: "A step streams all weights and all KV once; nothing is read twice within it but what \
                several query heads share. Data pinned from one step to the next saves at most cache / \
                streamed. On a data-center GPU that is under a percent: a kernel that reads KV once a group \
                (packed-gqa) gains more. It pays where the whole model fits: small models on CPUs with large \
                L3, or on devices with tens of MiB of cache and a 4-bit draft model.",
            source: "CUDA programming guide: at most 75 % of L2 can be set aside (A100: 30 of 40 MB)",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let cache = |facts: &Facts| Ok(facts.device()?.cache_bytes);
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("A100"),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            Input::number("tokens", Unit::Tokens, 16_384.0, "tokens in flight, all sequences"),
            Input::worked("cache", Unit::Bytes, "the device's", cache, "last-level cache"),
            Input::number("pinnable", Unit::Ratio, 0.75, "share of it that may be set aside"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; weight_bytes, kv_bytes, tokens, cache, pinnable);
        step!(sheet, streamed: Bytes = weight_bytes + tokens * kv_bytes, "read in a step");
        step!(sheet, pinned: Bytes = min(cache * pinnable, streamed), "held from step to step");
        step!(sheet, saved: Ratio = pinned / streamed, "share of the step that it saves at most");
        let pays = saved >= 0.05;
        let advice = match pays {
            true => {
                "pin the weights (access-policy window), or run the model on cores that share the cache"
            }
            false => {
                "leave the cache alone: fewer bytes (fp8 weights or KV) or a GQA-packed kernel gain more"
            }
        };
        let decision = Some(if pays { "pays" } else { "not worth it" }.to_string());
        Ok(Verdict { answer: "saved", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("gpu", "A100"), ("weight-bytes", "16.06GB"), ("tokens", "16384")],
            answer: 0.001_727_7,
            cited: Cited {
                step: "pinned",
                value: 30.0 * 1_048_576.0,
                tolerance: 1e-9,
                from: "CUDA programming guide: 75 % of the A100's 40 MB may be set aside",
            },
            moves: [
                Move { input: "gpu", to: "L40S", answer: 0.004_146_4 },
                Move { input: "weight_bytes", to: "98.4MB", answer: 0.014_006_6 },
            ],
        }
    }
}
