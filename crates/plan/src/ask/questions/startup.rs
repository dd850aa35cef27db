//! E27: will vLLM start with these flags, and what is the longest context it takes?

use super::prelude::*;
use crate::model::Cache;

pub struct Startup;

/// vLLM's own words for a pool of that size, where its plan has them.
fn refusal(sheet: &Worksheet, pool: f64) -> String {
    let plan = start::plan(&sheet.facts(), Some(pool));
    plan.and_then(|plan| plan.refusal).unwrap_or_else(|| "(not known for this model)".into())
}

/// For models with windows or recurrent layers: bytes of one request and the longest that the pool holds, by
/// vLLM's own groups. `None` for models whose layers all keep every token: the formula says it.
fn planned(sheet: &Worksheet, pool: f64) -> Result<Option<(f64, f64)>, AskError> {
    let keeps_all = |layer: &Cache| matches!(layer, Cache::Full { .. } | Cache::Latent(_));
    if sheet.model()?.layers.iter().all(keeps_all) {
        return Ok(None);
    }
    let plan = start::plan(&sheet.facts(), Some(pool));
    let known = plan.and_then(|plan| Some((plan.kv_needed?.value, plan.max_len?.value)));
    let unknown = "how vLLM cuts this model's KV memory is not known: ask `reef plan fit`";
    known.map(Some).ok_or_else(|| AskError::NoAnswer(unknown.into()))
}

impl Question for Startup {
    fn about(&self) -> About {
        About {
            name: "startup",
            aliases: &["vllm-flags"],
            covers: &["E27"],
            asks: "Does vLLM start with these flags, and which --max-model-len would it take at most?",
            explanation: "At start vLLM checks that one request of --max-model-len fits the KV memory: blocks of \
                the whole length against --gpu-memory-utilization × total less what the profiling run used. \
                If not it refuses and prints the largest length that fits, a block multiple. --max-num-seqs \
                and --max-num-batched-tokens act through the profiling run (and reserve windows in hybrid \
                models): lowering them lowers the activation peak. `reef plan fit` has each version's rounding.",
            source: "vLLM kv_cache_utils.py check_enough_kv_cache_memory; start-up log C021 of crates/plan/tests/data/cases.csv",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("L4"),
            standard::tp(1.0),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::memory(),
            standard::utilization(0.9),
            standard::overhead(),
            standard::pool(),
            standard::block_size(16.0),
            Input::number("max_model_len", Unit::Tokens, 131_072.0, "--max-model-len").whole(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; tp, weight_bytes, kv_bytes, memory, overhead, pool, block_size, max_model_len);
        let (needed, longest) = match planned(sheet, pool)? {
            Some((of_request, of_pool)) => {
                let origin = "vLLM's groups of blocks for this model";
                fact!(sheet, needed: Bytes = of_request, origin, "KV of one request of that length");
                fact!(sheet, longest: Tokens = of_pool, origin, "largest --max-model-len that starts");
                (needed, longest)
            }
            None => {
                step!(
                    sheet,
                    needed: Bytes = ceil(max_model_len / block_size) * block_size * kv_bytes,
                    "KV of one request of that length"
                );
                step!(
                    sheet,
                    longest: Tokens = floor(pool / (block_size * kv_bytes)) * block_size,
                    "largest --max-model-len that starts"
                );
                (needed, longest)
            }
        };
        step!(
            sheet,
            utilization_needed: Ratio = (needed + weight_bytes / tp + overhead) / memory,
            "--gpu-memory-utilization that would hold it"
        );
        let starts = needed <= pool;
        let mend = match utilization_needed <= 0.97 {
            true => format!(
                "--max-model-len {longest:.0}, or --gpu-memory-utilization {:.2}",
                (100.0 * utilization_needed).ceil() / 100.0
            ),
            false => format!(
                "--max-model-len {longest:.0}, --kv-cache-dtype fp8, or more --tensor-parallel-size"
            ),
        };
        let advice = match starts {
            true => format!("starts; up to --max-model-len {longest:.0} would"),
            false => format!("{mend}. vLLM refuses with: {}", refusal(sheet, pool)),
        };
        let decision = Some(if starts { "starts" } else { "refuses" }.to_string());
        Ok(Verdict { answer: "longest", decision, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("model", "Qwen2.5-7B-Instruct"),
                ("pool", "6.11GiB"),
                ("block-size", "64"),
                ("max-model-len", "118000"),
            ],
            answer: 114_368.0,
            cited: Cited {
                step: "longest",
                value: 114_432.0,
                tolerance: 0.001,
                from: "cases.csv C021: 6.11 GiB available, 6.3 needed, estimated maximum 114,432",
            },
            moves: [
                Move { input: "pool", to: "12.22GiB", answer: 228_800.0 },
                Move { input: "kv_cache_dtype", to: "fp8", answer: 228_800.0 },
            ],
        }
    }
}
