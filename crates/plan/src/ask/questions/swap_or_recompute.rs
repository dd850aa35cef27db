//! E19: from which link on does swapping a victim beat recomputing it?

use super::prelude::*;

pub struct SwapOrRecompute;

impl Question for SwapOrRecompute {
    fn about(&self) -> About {
        About {
            name: "swap-or-recompute",
            aliases: &[],
            covers: &["E19"],
            asks: "From which link rate on does swapping a preempted sequence beat recomputing it?",
            explanation: "Out and back moves 2 × KV over the link; recomputing costs tokens / prefill rate. \
                Both grow with the tokens, so the break-even is a rate: 2 × kv_bytes × prefill rate, half of \
                it if the copy out hides behind running steps. Blocks moved one by one starve the link: \
                copy layers or chunks in bulk. On a CPU prefill is so slow that even a disk wins.",
            source: "PagedAttention (SOSP 2023) section 7.3",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("A100"),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::active_parameters(),
            standard::peak(),
            standard::mfu(),
            standard::host_link(),
            standard::link_efficiency(),
            Input::number(
                "trips",
                Unit::Count,
                2.0,
                "copies on the path: 2, or 1 if the out is hidden",
            )
            .within(1.0, 2.0)
            .fixed(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, active_parameters, peak, mfu, link, link_efficiency, trips);
        step!(sheet, prefill_rate: TokensPerSecond = peak * mfu / (2.0 * active_parameters), "prefill");
        step!(sheet, break_even: BytesPerSecond = trips * kv_bytes * prefill_rate, "rate where both cost alike");
        step!(sheet, margin: Ratio = link * link_efficiency / break_even, "the link over that");
        let does_swap = margin >= 1.0;
        let advice = match does_swap {
            true => {
                "swap, in bulk copies; with vLLM v1, which only recomputes, avoid preemption instead"
            }
            false => "recompute, and keep prefix caching on: the link is slower than prefill",
        };
        let decision = Some(if does_swap { "swap" } else { "recompute" }.to_string());
        Ok(Verdict { answer: "break_even", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("gpu", "A100"), ("active-parameters", "8.03e9")],
            answer: 2.546_381e9,
            cited: Cited {
                step: "break_even",
                value: 2.5e9,
                tolerance: 0.02,
                from: "economics 5.2: 8B on an A100 at 50 % of peak: 2.5 GB/s",
            },
            moves: [
                Move { input: "trips", to: "1", answer: 1.273_191e9 },
                Move { input: "gpu", to: "CPU-2-core-VM", answer: 816_148.0 },
            ],
        }
    }
}
