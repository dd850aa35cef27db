//! E2: how many sequences fit at once?

use super::prelude::*;

pub struct Concurrency;

impl Question for Concurrency {
    fn about(&self) -> About {
        About {
            name: "concurrency",
            aliases: &[],
            covers: &["E2"],
            asks: "How many sequences of this length fit in KV memory at once?",
            explanation: "What an engine leaves for KV is its share of the device less weights, activations \
                and what CUDA and NCCL keep. A rank holds its part of the weights and max(1, heads / tp) KV \
                heads; a sequence takes whole blocks, and only the window in windowed layers. The admission \
                ceiling (--max-num-seqs) caps the result. `fit` works the same out with the engine's own \
                rounding and refusal.",
            source: "vLLM gpu_worker.py memory profiling; start-up log C005 of crates/plan/tests/data/cases.csv",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("H100"),
            standard::tp(1.0),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            standard::memory(),
            standard::utilization(0.9),
            standard::overhead(),
            standard::pool(),
            standard::context(8192.0),
            Input::number("ceiling", Unit::Sequences, 256.0, "--max-num-seqs").whole(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; pool, context, ceiling, tp);
        let dtype = standard::dtype(&sheet.word("kv_cache_dtype")?)?;
        let model = sheet.model()?;
        let kv_of_context = model.kv_bytes(context as u64, dtype, tp as u64) as f64;
        let origin = "the model's layers at this length";
        fact!(sheet, sequence_bytes: Bytes = kv_of_context, origin, "KV and state of a sequence on one rank");
        step!(sheet, by_memory: Sequences = pool / sequence_bytes, "sequences that memory holds");
        step!(sheet, sequences: Sequences = min(by_memory, ceiling), "with the admission ceiling");
        let by_memory_alone = by_memory <= ceiling;
        let advice = match by_memory_alone {
            true => {
                "memory decides: lower --max-model-len, use --kv-cache-dtype fp8, raise \
                     --gpu-memory-utilization, or more --tensor-parallel-size"
            }
            false => "--max-num-seqs decides: raise it, KV memory has room",
        };
        let decision = if by_memory_alone { "KV memory" } else { "--max-num-seqs" };
        let decision = Some(decision.to_string());
        Ok(Verdict { answer: "sequences", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("model", "Llama-3.1-70B"),
                ("gpu", "MI300X"),
                ("overhead", "5GiB"),
                ("context", "8192"),
            ],
            answer: 14.441_79,
            cited: Cited {
                step: "sequence_bytes",
                value: 2_684_354_560.0,
                tolerance: 0.0,
                from: "Llama-3-70B, 8,192 tokens in 16 bits: 80 layers x 8 heads x 2 x 128 x 2 bytes x 8,192 = \
                       2,684,354,560 bytes",
            },
            moves: [
                Move { input: "context", to: "32768", answer: 3.610_448 },
                Move { input: "kv_cache_dtype", to: "fp8", answer: 28.883_58 },
            ],
        }
    }
}
