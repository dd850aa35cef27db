//! E5: what does an FP8 KV cache save, and does it clip or round?

use super::prelude::*;

pub struct Fp8;

impl Question for Fp8 {
    fn about(&self) -> About {
        About {
            name: "fp8",
            aliases: &[],
            covers: &["E5"],
            asks: "What does an FP8 KV cache save, and do its values clip or only round?",
            explanation: "E4M3 halves KV bytes. Values above 448 × scale clip: wrong by any amount. Below, \
                they round by at most half a step, 2^-4 of the value (2.7 % RMS), whatever the scale, down \
                to 2^-6 × scale where steps stop shrinking. So a scale matters only for the two ends: \
                calibrate it where the largest value exceeds 448, leave 1.0 otherwise.",
            source: "OCP FP8 (E4M3FN) specification",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            Input::number("absmax", Unit::Count, 20.0, "largest size of a key or value")
                .within(1e-6, 1e9),
            Input::number("scale", Unit::Count, 1.0, "scale the engine uses (vLLM default 1.0)")
                .within(1e-9, 1e9),
            Input::number("pool", Unit::Bytes, 5.722e10, "KV memory of one rank"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; absmax, scale, pool);
        let model = sheet.model()?;
        let bf16 = model.kv_bytes_per_token(crate::dtype::KvDtype::Bf16, 1) as f64;
        let fp8 = model.kv_bytes_per_token(crate::dtype::KvDtype::Fp8, 1) as f64;
        fact!(sheet, bf16_bytes: BytesPerToken = bf16, "the model's", "KV of a token in bf16");
        fact!(sheet, fp8_bytes: BytesPerToken = fp8, "the model's", "KV of a token in fp8");
        step!(sheet, tokens_gained: Tokens = pool / fp8_bytes - pool / bf16_bytes, "more tokens in the pool");
        step!(sheet, clips_above: Count = 448.0 * scale, "largest value that survives");
        step!(sheet, rounds_by: Ratio = pow(2.0, -4.0), "largest relative error of a rounded value");
        step!(sheet, coarse_below: Count = pow(2.0, -6.0) * scale, "below this the error stops shrinking");
        step!(sheet, scale_needed: Count = absmax / 448.0, "smallest scale that clips nothing");
        let does_clip = scale_needed > scale;
        let advice = match does_clip {
            true => "calibrate k_scale and v_scale (or --calculate-kv-scales): this scale clips",
            false => {
                "--kv-cache-dtype fp8 with this scale clips nothing; rounding is the only error"
            }
        };
        let decision = Some(if does_clip { "clips" } else { "rounds only" }.to_string());
        Ok(Verdict { answer: "scale_needed", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "Llama-3.1-8B"), ("absmax", "20")],
            answer: 0.0446429,
            cited: Cited {
                step: "scale_needed",
                value: 20.0 / 448.0,
                tolerance: 1e-9,
                from: "economics 5.14: a key absmax of 20 uses scale 20/448",
            },
            moves: [
                Move { input: "absmax", to: "600", answer: 1.339286 },
                Move { input: "absmax", to: "10", answer: 0.0223214 },
            ],
        }
    }
}
