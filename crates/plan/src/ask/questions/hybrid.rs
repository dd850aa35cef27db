//! E7: what do windowed layers save?

use super::prelude::*;
use crate::ask::report::cell;
use crate::dtype::KvDtype;

pub struct Hybrid;

impl Question for Hybrid {
    fn about(&self) -> About {
        About {
            name: "hybrid",
            aliases: &["windows"],
            covers: &["E7"],
            asks: "Which share of a full cache does a model with windowed layers keep?",
            explanation: "A windowed layer keeps its last W tokens, a full layer all: kept = f + (1 - f) × \
                min(1, W / L) with f the share of full layers. The saving is real only where the engine \
                gives window pages back (vLLM's hybrid manager; --disable-hybrid-kv-cache-manager or a \
                drafter with another KV shape charges window layers as full). While a prompt is prefilled \
                in chunks, the window reserves W - 1 + chunk tokens.",
            source: "Gemma 3 layer pattern; vLLM kv_cache_interface.py",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("gemma-3-27b-it"),
            standard::kv_cache_dtype(),
            standard::context(32_768.0),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; context);
        let dtype = standard::dtype(&sheet.word("kv_cache_dtype")?)?;
        let model = sheet.model()?;
        let share = |tokens: f64, dtype: KvDtype| {
            let all = model.kv_bytes_per_token(dtype, 1) as f64 * tokens;
            (model.kv_bytes(tokens as u64, dtype, 1) - model.state_bytes(1)) as f64 / all
        };
        let per_token = model.kv_bytes_per_token(dtype, 1) as f64;
        let windowed = model.kv_bytes(context as u64, dtype, 1) - model.state_bytes(1);
        let held = windowed as f64;
        fact!(sheet, token_bytes: BytesPerToken = per_token, "the model's", "KV of a token in all layers");
        step!(sheet, full_bytes: Bytes = token_bytes * context, "if every layer kept all tokens");
        let origin = "the model's layers at this length";
        fact!(sheet, kept_bytes: Bytes = held, origin, "full layers all tokens, windows their last");
        step!(sheet, kept: Ratio = kept_bytes / full_bytes, "share that is kept");
        let row =
            |tokens: f64| vec![cell(tokens), format!("{}%", cell(100.0 * share(tokens, dtype)))];
        let rows = [4096.0, 8192.0, 32_768.0, 131_072.0].into_iter().map(row).collect();
        sheet.compare("By length", &["tokens", "kept"], rows);
        let advice = "keep the hybrid KV manager on, and --max-num-batched-tokens small: it is added to \
                      each window while a prompt is prefilled";
        Ok(Verdict { answer: "kept", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "gemma-3-27b-it"), ("context", "32768")],
            answer: 0.187500,
            cited: Cited {
                step: "kept",
                value: 0.193,
                tolerance: 0.03,
                from: "economics 5.8: 5:1 layers, W 1024, 32 K: 19.3 % (1 in 6; the 27B has 10 in 62)",
            },
            moves: [
                Move { input: "context", to: "4096", answer: 0.370968 },
                Move { input: "context", to: "131072", answer: 0.167843 },
            ],
        }
    }
}
