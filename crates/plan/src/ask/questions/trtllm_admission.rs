//! E28: what do TensorRT-LLM's two admission policies admit?

use super::prelude::*;

pub struct TrtllmAdmission;

impl Question for TrtllmAdmission {
    fn about(&self) -> About {
        About {
            name: "trtllm-admission",
            aliases: &["admission"],
            covers: &["E28"],
            asks: "How many requests do TensorRT-LLM's two admission policies run at once?",
            explanation: "GUARANTEED_NO_EVICT reserves the blocks of prompt + max_tokens at admission (of the \
                whole window if max_tokens is omitted): nobody is paused, memory idles. MAX_UTILIZATION admits \
                by what is used now, prompt + half of a reply on average, and pauses somebody when replies \
                outgrow it: recompute, or suspend to host memory in the V2 manager, which knows only this \
                policy. The gap is the ratio of reserved to used; oversubscribed runs have been reported 41 % \
                slower, so keep replies' variance in mind.",
            source: "TensorRT-LLM kvcache docs and scheduler_v2.py; NVIDIA/TensorRT-LLM#16827",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::block_size(32.0),
            Input::number("pool", Unit::Bytes, 50.0 * 1_073_741_824.0, "KV memory"),
            Input::number("prompt", Unit::Tokens, 1000.0, "tokens of a prompt").whole(),
            Input::number("max_tokens", Unit::Tokens, 4096.0, "max_tokens of a request").whole(),
            Input::number("output", Unit::Tokens, 300.0, "tokens that replies really have"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, block_size, pool, prompt, max_tokens, output);
        step!(sheet, pool_blocks: Blocks = floor(pool / (block_size * kv_bytes)), "blocks of the pool");
        step!(
            sheet,
            reserved: Blocks = ceil((prompt + max_tokens) / block_size),
            "blocks reserved to completion"
        );
        step!(sheet, guaranteed: Sequences = floor(pool_blocks / reserved), "with GUARANTEED_NO_EVICT");
        step!(
            sheet,
            used: Blocks = ceil((prompt + output / 2.0) / block_size),
            "blocks a request uses on average"
        );
        step!(sheet, utilized: Sequences = floor(pool_blocks / used), "with MAX_UTILIZATION");
        if guaranteed < 1.0 {
            return Err(AskError::NoAnswer(format!(
                "the pool has {pool_blocks} blocks and a request reserves {reserved}: lower --max-tokens or \
                 --prompt, or raise --pool"
            )));
        }
        step!(sheet, gain: Ratio = utilized / guaranteed, "times more requests at once");
        let advice = match gain > 1.5 {
            true => {
                "send max_tokens with every request, close to what replies need; or MAX_UTILIZATION with \
                     a host tier (host_cache_size), watching paused requests"
            }
            false => "GUARANTEED_NO_EVICT costs little here, and nobody is ever paused",
        };
        Ok(Verdict { answer: "gain", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("prompt", "1000"), ("max-tokens", "4096"), ("output", "300")],
            answer: 4.4375,
            cited: Cited {
                step: "guaranteed",
                value: 80.0,
                tolerance: 0.0,
                from: "counted by the documented rule: 12,800 blocks, 160 reserved a request",
            },
            moves: [
                Move { input: "max_tokens", to: "300", answer: 1.137_821 },
                Move { input: "output", to: "4096", answer: 1.6625 },
            ],
        }
    }
}
