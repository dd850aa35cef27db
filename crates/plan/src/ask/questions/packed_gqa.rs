//! E37: how many operations does decode attention do for each byte of KV?

use super::prelude::*;
use crate::device::Arithmetic;

pub struct PackedGqa;

impl Question for PackedGqa {
    fn about(&self) -> About {
        About {
            name: "packed-gqa",
            aliases: &["gqa"],
            covers: &["E37"],
            asks: "How many operations does decode attention do for each byte of KV, packed by group?",
            explanation: "A cached token of one KV head costs 2 operations a channel for the score and 2 for \
                the sum, for each of the r query heads of its group, and is read once if the kernel packs \
                them: 4 r D / (2 D × width) = 2 r / width. Read once a query head the intensity stays at 2 / \
                width and the traffic is r times larger. Draft tokens multiply both. Batch does not: each \
                sequence has its own KV.",
            source: "GQA (arXiv 2305.13245); FlashAttention's pack_gqa",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let group = |facts: &Facts| {
            let model = facts.model()?;
            let missing = |what: &str| AskError::NoAnswer(format!("{}: {what}", model.name));
            let heads =
                model.heads.ok_or_else(|| missing("its config counts no heads: give --group"))?;
            let kv_heads = model.kv_heads().ok_or_else(|| {
                missing(
                    "its heads share a latent, not KV heads: `reef plan ask mla`, or give --group",
                )
            })?;
            Ok(heads as f64 / kv_heads.max(1) as f64)
        };
        let width = |facts: &Facts| {
            let (bytes, per) = standard::dtype(facts.word("kv_cache_dtype")?)?.ratio();
            Ok(bytes as f64 / per as f64)
        };
        vec![
            standard::model("Llama-3.1-70B"),
            standard::gpu("H100"),
            standard::kv_cache_dtype(),
            Input::worked(
                "group",
                Unit::Count,
                "query heads over KV heads",
                group,
                "query heads a KV head",
            ),
            Input::worked("width", Unit::Count, "of that format", width, "bytes of an element")
                .within(0.1, 4.0)
                .fixed(),
            Input::number("queries", Unit::Tokens, 1.0, "query tokens a step (1 + drafts)").whole(),
            standard::peak(),
            standard::bandwidth(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; group, width, queries, peak, bandwidth);
        step!(sheet, unpacked: FlopPerByte = 2.0 * queries / width, "read once a query head");
        step!(sheet, packed: FlopPerByte = 2.0 * queries * group / width, "read once a group");
        step!(sheet, ridge: FlopPerByte = peak / bandwidth, "the device's");
        step!(sheet, busy: Ratio = min(1.0, packed / ridge), "arithmetic used while KV streams");
        let is_memory = packed < ridge;
        let has_fp8 = sheet.device()?.native_peak(Arithmetic::Fp8).is_some();
        let advice = match (is_memory, has_fp8) {
            (true, true) => {
                "memory-bound: only fewer KV bytes (--kv-cache-dtype fp8) or a packed kernel help"
            }
            (true, false) => {
                "memory-bound: only fewer KV bytes (int8 or 4-bit KV) or a packed kernel help"
            }
            (false, _) => "at the ridge: drafts and wider groups no longer come free",
        };
        let decision = Some(if is_memory { "memory-bound" } else { "compute-bound" }.to_string());
        Ok(Verdict { answer: "packed", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "Llama-3.1-70B"), ("gpu", "H100")],
            answer: 8.0,
            cited: Cited {
                step: "packed",
                value: 8.0,
                tolerance: 0.0,
                from: "economics 5.5: decode attention has intensity H / G: 64 / 8",
            },
            moves: [
                Move { input: "kv_cache_dtype", to: "fp8", answer: 16.0 },
                Move { input: "model", to: "Llama-2-7b-hf", answer: 1.0 },
            ],
        }
    }
}
