//! E12: wait, swap or recompute, for a given victim?

use super::prelude::*;
use crate::ask::report::cell;

pub struct Preempt;

impl Question for Preempt {
    fn about(&self) -> About {
        About {
            name: "preempt",
            aliases: &["victim"],
            covers: &["E12"],
            asks: "Which of the three preemptions costs the least for this victim, and what?",
            explanation: "Waiting costs the time until enough running sequences end: the blocks that are \
                short over the rate at which others give blocks back. Swapping costs a copy out and one \
                back, on the victim's path both. Recomputing costs a prefill of all its tokens, less what \
                the prefix cache still holds, and takes arithmetic from the others. Swap preserves KV that \
                was quantized or evicted, recompute undoes it.",
            source: "PagedAttention (SOSP 2023) section 7.3",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("A100"),
            standard::kv_cache_dtype(),
            Input::number("victim", Unit::Tokens, 4000.0, "tokens the victim has").whole(),
            standard::kv_bytes(),
            standard::active_parameters(),
            standard::peak(),
            standard::mfu(),
            standard::host_link(),
            standard::link_efficiency(),
            Input::number("cached", Unit::Ratio, 0.0, "share the prefix cache keeps of it"),
            Input::number("short", Unit::Tokens, 2000.0, "tokens of memory that are missing"),
            Input::number(
                "release",
                Unit::TokensPerSecond,
                2000.0,
                "tokens others give back a second",
            ),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, active_parameters, peak, mfu, link, link_efficiency);
        inputs!(sheet; victim, cached, short, release);
        step!(sheet, prefill_rate: TokensPerSecond = peak * mfu / (2.0 * active_parameters), "prefill");
        step!(sheet, wait_s: Seconds = short / release, "until others give the memory back");
        step!(
            sheet,
            swap_s: Seconds = 2.0 * victim * kv_bytes / (link * link_efficiency),
            "copy out and back"
        );
        step!(sheet, recompute_s: Seconds = victim * (1.0 - cached) / prefill_rate, "prefill again");
        step!(sheet, cheapest_s: Seconds = min(wait_s, min(swap_s, recompute_s)), "the cheapest");
        let mut ways = [("wait", wait_s), ("swap", swap_s), ("recompute", recompute_s)];
        let row =
            |(way, cost): &(&str, f64)| vec![way.to_string(), format!("{} ms", cell(1e3 * cost))];
        sheet.compare("Cost to the victim", &["way", "time"], ways.iter().map(row).collect());
        ways.sort_by(|a, b| a.1.total_cmp(&b.1));
        let advice = match ways[0].0 {
            "swap" => {
                "swap where the engine can (Reef, TensorRT-LLM V2 with host_cache_size); vLLM v1 \
                       only recomputes, so give it --kv-transfer-config offloading or more KV memory"
            }
            "recompute" => {
                "recompute, with prefix caching on so that the victim's blocks may still hit"
            }
            _ => "wait: admit less (--max-num-seqs) so that nobody has to be preempted",
        };
        let decision = Some(ways[0].0.to_string());
        Ok(Verdict { answer: "cheapest_s", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("gpu", "A100"),
                ("active-parameters", "8.03e9"),
                ("link", "25GB/s"),
                ("link-efficiency", "1"),
            ],
            answer: 0.0419430,
            cited: Cited {
                step: "prefill_rate",
                value: 9714.0,
                tolerance: 0.0005,
                from: "economics 5.2: 8B on an A100 at 50 % of peak: 9,714 tok/s",
            },
            moves: [
                Move { input: "link", to: "1GB/s", answer: 0.411_795 },
                Move { input: "release", to: "100000", answer: 0.02 },
            ],
        }
    }
}
