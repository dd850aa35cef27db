//! E6: what happens with more ranks than KV heads?

use super::prelude::*;

pub struct TpHeads;

impl Question for TpHeads {
    fn about(&self) -> About {
        About {
            name: "tp-heads",
            aliases: &[],
            covers: &["E6"],
            asks: "How many copies of the KV cache do this many ranks keep?",
            explanation: "A rank holds max(1, KV heads / ranks) heads. Up to as many ranks as heads the KV of \
                a token is divided; beyond, every further rank keeps a copy and the pool of the group stops \
                growing. MLA has one latent for all heads, so every rank is a copy (mla-tp).",
            source: "vLLM ModelConfig.get_num_kv_heads",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-70B"),
            standard::kv_cache_dtype(),
            Input { is_fixed: false, ..standard::tp(16.0) },
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; tp);
        let dtype = standard::dtype(&sheet.word("kv_cache_dtype")?)?;
        let model = sheet.model()?;
        let alone = model.kv_bytes_per_token(dtype, 1) as f64;
        let on_rank = model.kv_bytes_per_token(dtype, tp as u64) as f64;
        fact!(sheet, whole: BytesPerToken = alone, "the model's", "KV of a token on one rank alone");
        fact!(sheet, per_rank: BytesPerToken = on_rank, "the model's", "KV of a token on each of tp ranks");
        step!(sheet, copies: Ratio = tp * per_rank / whole, "copies of the cache in the group");
        let advice = match copies > 1.0 {
            true => {
                "use fewer --tensor-parallel-size with --pipeline-parallel-size or \
                     --data-parallel-size, or --decode-context-parallel-size to divide the copies by tokens"
            }
            false => {
                "no copies: each further rank up to the number of KV heads adds its whole pool"
            }
        };
        let decision = Some(if copies > 1.0 { "duplicated" } else { "divided" }.to_string());
        Ok(Verdict { answer: "copies", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "Llama-3.1-70B"), ("tp", "16")],
            answer: 2.0,
            cited: Cited {
                step: "copies",
                value: 2.0,
                tolerance: 0.0,
                from: "economics 5.6: 8 KV heads on 16 ranks: 2x",
            },
            moves: [
                Move { input: "tp", to: "8", answer: 1.0 },
                Move { input: "model", to: "DeepSeek-V3", answer: 16.0 },
            ],
        }
    }
}
