//! E13: which link does disaggregated prefill need?

use super::prelude::*;

pub struct Disaggregate;

impl Question for Disaggregate {
    fn about(&self) -> About {
        About {
            name: "disaggregate",
            aliases: &["disaggregation"],
            covers: &["E13"],
            asks: "Which link between prefill and decode workers keeps up with prefill?",
            explanation: "A prefill worker makes kv_bytes × prefill rate of KV a second; the link must carry \
                that, whatever the prompt's length. Sent layer by layer behind the computation it costs no \
                time if the link keeps up; a slower link adds the difference to TTFT. Hit prefixes are not \
                computed but must be sent all the same, so the need grows with the hit ratio.",
            source: "Mooncake (FAST 2025)",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let meaning = "share of prompt tokens that hit the cache";
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("H100"),
            standard::count(1.0),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::active_parameters(),
            standard::peak(),
            standard::mfu(),
            Input::number("hit_ratio", Unit::Ratio, 0.0, meaning).within(0.0, 0.99),
            Input::number("link", Unit::BytesPerSecond, 50e9, "link between the workers"),
            standard::link_efficiency(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; count, kv_bytes, active_parameters, peak, mfu, hit_ratio, link, link_efficiency);
        step!(
            sheet,
            prefill_rate: TokensPerSecond = count * peak * mfu / (2.0 * active_parameters),
            "tokens computed a second"
        );
        step!(sheet, sent_rate: TokensPerSecond = prefill_rate / (1.0 - hit_ratio), "tokens handed on");
        step!(sheet, needed: BytesPerSecond = kv_bytes * sent_rate, "KV made a second");
        step!(sheet, link_use: Ratio = needed / (link * link_efficiency), "share of the link");
        let keeps_up = link_use <= 1.0;
        let advice = match keeps_up {
            true => format!(
                "the link keeps up with {:.0} such prefill workers",
                (1.0 / link_use).floor()
            ),
            false => {
                "the link is too slow: fp8 KV, a faster fabric, or prefill and decode on one node"
                    .into()
            }
        };
        let decision = Some(if keeps_up { "keeps up" } else { "too slow" }.to_string());
        Ok(Verdict { answer: "needed", decision, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("gpu", "H100"), ("active-parameters", "8.03e9")],
            answer: 4.035_862e9,
            cited: Cited {
                step: "needed",
                value: 4.0e9,
                tolerance: 0.01,
                from: "economics 5.11: 8B on an H100 at 50 % of peak: 4.0 GB/s",
            },
            moves: [
                Move { input: "gpu", to: "A100", answer: 1.273_191e9 },
                Move { input: "hit_ratio", to: "50%", answer: 8.071_724e9 },
            ],
        }
    }
}
