//! E33: why does 141 GB of weights not start on 160 GB?

use super::prelude::*;

pub struct WeightsFit;

impl Question for WeightsFit {
    fn about(&self) -> About {
        About {
            name: "weights-fit",
            aliases: &["refusal"],
            covers: &["E33"],
            asks: "Does a model whose weights fit the GPUs start, and with how much context?",
            explanation: "Weights are the first of five things that must fit: the engine keeps 1 - utilization \
                of every device free, devices hold less than their name says (80 GB prints 79.2 GiB), \
                activations and CUDA with NCCL take gigabytes more under TP (1.79 GiB alone, 3.58 at TP 2), \
                and one request of --max-model-len must fit the rest. 141 GB on 160 GB leaves room for a few \
                thousand tokens.",
            source: "vLLM PR 10511 (non-torch memory under TP); Llama-3.1-70B: 70.55e9 parameters",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-70B"),
            standard::gpu("H100"),
            standard::tp(2.0),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            Input::number("max_model_len", Unit::Tokens, 131_072.0, "--max-model-len").whole(),
            standard::kv_bytes(),
            standard::memory(),
            standard::utilization(0.9),
            standard::overhead(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; tp, weight_bytes, kv_bytes, memory, utilization, overhead, max_model_len);
        step!(sheet, installed: Bytes = tp * memory, "memory of the group");
        step!(sheet, weights_share: Ratio = weight_bytes / installed, "share that weights take");
        step!(
            sheet,
            kv_pool: Bytes = memory * utilization - weight_bytes / tp - overhead,
            "left for KV on a rank"
        );
        step!(sheet, tokens: Tokens = floor(max(0.0, kv_pool) / kv_bytes), "tokens that holds");
        step!(sheet, needed: Bytes = max_model_len * kv_bytes, "one request of --max-model-len on a rank");
        step!(
            sheet,
            ranks_needed: Count =
                pow(2.0, ceil(log2((weight_bytes + tp * needed) / (memory * utilization - overhead)))),
            "ranks that hold weights and one such request, a power of two"
        );
        let starts = tokens >= max_model_len;
        let advice = if starts {
            format!("starts, with {tokens:.0} tokens of KV")
        } else if kv_pool <= 0.0 {
            "vLLM refuses (\"No available memory for the cache blocks\"): fewer weight bytes \
             (--quantization fp8) or more --tensor-parallel-size"
                .into()
        } else {
            format!(
                "vLLM refuses at --max-model-len {max_model_len:.0}: set it to {tokens:.0}, or use \
                 --quantization fp8, or --tensor-parallel-size {ranks_needed:.0}"
            )
        };
        let decision = Some(if starts { "starts" } else { "refuses" }.to_string());
        Ok(Verdict { answer: "tokens", decision, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("model", "Llama-3.1-70B"),
                ("gpu", "H100"),
                ("tp", "2"),
                ("overhead", "4.84GiB"),
            ],
            answer: 4_736.0,
            cited: Cited {
                step: "weights_share",
                value: 141.1 / 170.06,
                tolerance: 0.001,
                from: "141 GB of weights on two 80 GB GPUs (2 x 79.19 GiB = 170.06 GB)",
            },
            moves: [
                Move { input: "weights", to: "fp8", answer: 213_632.0 },
                Move { input: "utilization", to: "0.95", answer: 30_685.0 },
            ],
        }
    }
}
