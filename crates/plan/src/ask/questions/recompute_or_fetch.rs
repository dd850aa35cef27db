//! E8: is it cheaper to compute a prefix again or to fetch its KV?

use super::prelude::*;

pub struct RecomputeOrFetch;

impl Question for RecomputeOrFetch {
    fn about(&self) -> About {
        About {
            name: "recompute-or-fetch",
            aliases: &[],
            covers: &["E8"],
            asks: "How fast must a tier be so that fetching a cached prefix beats computing it again?",
            explanation: "Prefill makes KV at kv_bytes × tokens a second; a tier that delivers faster wins. A \
                token costs 2 operations a parameter and, in attention, 4 a channel, head and layer for \
                every token before it (half the prefix on average), so long prefixes favor fetching. \
                Fetching also leaves the arithmetic units to other requests, and adds the tier's latency.",
            source: "Mooncake (FAST 2025) equations 1-2",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let attention = |facts: &Facts| {
            let model = facts.model()?;
            let width = model.heads.unwrap_or(0) * model.head_dim().unwrap_or(0);
            let layers = model.layers.iter().filter(|layer| layer.heads().is_some()).count();
            Ok(4.0 * (width * layers as u64) as f64)
        };
        vec![
            standard::model("Llama-3.1-70B"),
            standard::gpu("A100"),
            standard::count(8.0),
            standard::kv_cache_dtype(),
            Input::number("prefix", Unit::Tokens, 8192.0, "tokens of the prefix").whole(),
            standard::kv_bytes(),
            standard::active_parameters(),
            Input::worked(
                "attention_flops",
                Unit::Count,
                "4 × heads × head_dim × layers",
                attention,
                "operations a token spends on each token before it",
            )
            .within(0.0, 1e12),
            standard::peak(),
            standard::mfu(),
            standard::host_link(),
            standard::link_efficiency(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; count, kv_bytes, active_parameters, attention_flops, peak, mfu, prefix, link);
        inputs!(sheet; link_efficiency);
        step!(
            sheet,
            token_flops: Count = 2.0 * active_parameters + attention_flops * prefix / 2.0,
            "operations a token costs on average"
        );
        step!(sheet, prefill_rate: TokensPerSecond = count * peak * mfu / token_flops, "prefill");
        step!(sheet, recompute_s: Seconds = prefix / prefill_rate, "computing the prefix again");
        step!(sheet, fetch_s: Seconds = prefix * kv_bytes / (link * link_efficiency), "fetching it");
        step!(sheet, break_even: BytesPerSecond = kv_bytes * prefill_rate, "rate at which both take as long");
        let does_fetch = fetch_s < recompute_s;
        let advice = match does_fetch {
            true => {
                "offload to this tier (--kv-transfer-config, HiCache, host_cache_size): fetching wins"
            }
            false => "do not offload to this tier: computing again is faster than its link",
        };
        let decision = Some(if does_fetch { "fetch" } else { "recompute" }.to_string());
        Ok(Verdict { answer: "break_even", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "Llama-3.1-70B"), ("gpu", "A100"), ("count", "8"), ("mfu", "1")],
            answer: 5.461_936e9,
            cited: Cited {
                step: "break_even",
                value: 5.9e9,
                tolerance: 0.08,
                from: "Mooncake: 70B, 8,192 tokens, 8 x A800: about 6 GB/s (5.9 by economics 5.1); it \
                       counts 22 d² a layer and attention over the whole square",
            },
            moves: [
                Move { input: "gpu", to: "H100", answer: 1.731_364e10 },
                Move { input: "mfu", to: "0.5", answer: 2.730_968e9 },
            ],
        }
    }
}
