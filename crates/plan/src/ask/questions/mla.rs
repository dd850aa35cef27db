//! E10: what does MLA's latent cache cost to keep, and to use?

use super::prelude::*;
use crate::device::Arithmetic;
use crate::model::Cache;

pub struct Mla;

impl Question for Mla {
    fn about(&self) -> About {
        About {
            name: "mla",
            aliases: &[],
            covers: &["E10"],
            asks: "What does a latent cache cost per token, and does its decode attention hit the ridge?",
            explanation: "MLA keeps rank + rope channels a token for all heads. With the up-projections \
                absorbed into query and output, every head scores the latent itself: 2 (rank + rope) + 2 rank \
                operations a head and cached token against (rank + rope) × bytes read once, so with 128 heads \
                decode attention reaches about 242 operations a byte in bf16 and lies at the ridge where GQA \
                is at 8. The bill of absorption is rank against head_dim channels in each score; without it \
                every step would expand all cached latents again.",
            source: "DeepSeek-V2 (arXiv 2405.04434); FlashMLA: 2 × heads operations a byte",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let heads = |facts: &Facts| Ok(facts.model()?.heads.unwrap_or(0) as f64);
        vec![
            standard::model("DeepSeek-V3"),
            standard::gpu("H100"),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            Input::worked("heads", Unit::Count, "the model's", heads, "query heads on one rank")
                .whole(),
            Input::number("queries", Unit::Tokens, 1.0, "query tokens a step (1 + drafts)").whole(),
            Input::number("head_dim", Unit::Count, 128.0, "channels a head would have without MLA")
                .fixed(),
            standard::peak(),
            standard::bandwidth(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, heads, queries, head_dim, peak, bandwidth);
        let model = sheet.model()?;
        let latent = model.layers.iter().find_map(|layer| match layer {
            Cache::Latent(latent) => Some(*latent),
            _ => None,
        });
        let Some(latent) = latent else {
            return Err(AskError::Wrong {
                field: "--model".into(),
                value: model.name.clone(),
                mend: "it has no latent cache; ask about DeepSeek-V3, Kimi-K2-Instruct or another"
                    .into(),
            });
        };
        let dtype = standard::dtype(&sheet.word("kv_cache_dtype")?)?;
        let (rank, rope) = (latent.rank as f64, latent.rope_dim as f64);
        let entry = latent.entry_bytes(dtype) as f64;
        let layers = model.layers.len() as f64;
        let origin = "the model's";
        fact!(sheet, latent_rank: Count = rank, origin, "channels of the latent");
        fact!(sheet, rope_dim: Count = rope, origin, "channels of the shared rotated key");
        fact!(sheet, layers: Count = layers, origin, "layers");
        fact!(sheet, entry_bytes: Bytes = entry, origin, "a token in one layer");
        step!(
            sheet,
            expanded: BytesPerToken = 2.0 * heads * head_dim * 2.0 * layers,
            "the same with keys and values per head, in bf16"
        );
        step!(sheet, saving: Ratio = expanded / kv_bytes, "times smaller");
        step!(sheet, bill: Ratio = (2.0 * latent_rank + rope_dim) / (2.0 * head_dim), "more operations a \
            score and sum than with per-head keys");
        step!(
            sheet,
            intensity: FlopPerByte =
                queries * heads * (2.0 * (latent_rank + rope_dim) + 2.0 * latent_rank) / entry_bytes,
            "operations a byte of decode attention, absorbed"
        );
        step!(sheet, ridge: FlopPerByte = peak / bandwidth, "the device's");
        let native = sheet.device()?.native_peak(Arithmetic::Fp8).is_some();
        let is_compute = intensity >= ridge;
        let advice = match (is_compute, native) {
            (true, true) => {
                "bound by arithmetic: drafts and larger batches no longer come free; fp8 \
                             attention kernels help more than fewer bytes"
            }
            (true, false) => "bound by arithmetic: drafts and larger batches no longer come free",
            (false, _) => {
                "still bound by memory: --speculative-config with a draft token or two is nearly free"
            }
        };
        let decision = Some(if is_compute { "compute-bound" } else { "memory-bound" }.to_string());
        Ok(Verdict { answer: "intensity", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "DeepSeek-V3"), ("gpu", "H100")],
            answer: 241.78,
            cited: Cited {
                step: "saving",
                value: 57.0,
                tolerance: 0.005,
                from: "economics 5.7: 70,272 B a token, 57x less than 128 heads of 128",
            },
            moves: [
                Move { input: "queries", to: "2", answer: 483.56 },
                Move { input: "heads", to: "16", answer: 30.222 },
            ],
        }
    }
}
