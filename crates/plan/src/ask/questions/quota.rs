//! E32: which request rate does a tenant's share pay for?

use super::prelude::*;

pub struct Quota;

impl Question for Quota {
    fn about(&self) -> About {
        About {
            name: "quota",
            aliases: &["tenants"],
            covers: &["E32"],
            asks: "Which request rate does a tenant's share of memory and arithmetic pay for?",
            explanation: "Requests a second say little: a request costs KV bytes × seconds, tokens held over the \
                time they are held, and prefill arithmetic. A share of the pool pays share × pool byte-seconds \
                each second, a share of the arithmetic share × prefill rate tokens. The scarcer of the two is \
                the quota. Give it as a rate with a burst of one request's cost, so that a long prompt can run.",
            source: "Little's law for byte-seconds",
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
            Input::number("pool", Unit::Bytes, 5.722e10, "KV memory"),
            Input::number("share", Unit::Ratio, 0.25, "the tenant's share").within(1e-6, 1.0),
            Input::number("prompt", Unit::Tokens, 1000.0, "tokens of a prompt"),
            Input::number("output", Unit::Tokens, 256.0, "tokens of a reply"),
            Input::number("tpot", Unit::Seconds, 0.0156, "time per output token"),
            Input::number(
                "prefill_share",
                Unit::Ratio,
                0.5,
                "share of arithmetic time left for prefill",
            ),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, active_parameters, peak, mfu, pool, share, prompt, output, tpot);
        inputs!(sheet; prefill_share);
        step!(sheet, stay: Seconds = output * tpot, "time a request holds memory");
        step!(
            sheet,
            byte_seconds: Count = (prompt + output / 2.0) * kv_bytes * stay,
            "KV bytes × seconds of a request"
        );
        step!(sheet, by_memory: RequestsPerSecond = share * pool / byte_seconds, "that memory pays for");
        step!(
            sheet,
            by_arithmetic: RequestsPerSecond =
                share * prefill_share * peak * mfu / (2.0 * active_parameters * prompt),
            "that prefill pays for"
        );
        step!(sheet, rate: RequestsPerSecond = min(by_memory, by_arithmetic), "the scarcer");
        let is_memory = by_memory <= by_arithmetic;
        let advice = format!(
            "limit the tenant to {:.3e} KV byte-seconds and {:.0} prompt tokens a second",
            share * pool,
            by_arithmetic * prompt
        );
        let decision = Some(if is_memory { "KV memory" } else { "arithmetic" }.to_string());
        Ok(Verdict { answer: "rate", decision, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("gpu", "A100"),
                ("active-parameters", "8.03e9"),
                ("pool", "15_728_640_000"),
                ("share", "100%"),
                ("prompt", "1872"),
                ("output", "256"),
                ("prefill-share", "100%"),
            ],
            answer: 5.188_875,
            cited: Cited {
                step: "by_memory",
                value: 15.0,
                tolerance: 0.005,
                from: "economics 5.4 turned round: 60 sequences of 2,000 tokens at 15.6 ms: 15 req/s",
            },
            moves: [
                Move { input: "prompt", to: "400", answer: 24.283_935 },
                Move { input: "output", to: "2560", answer: 0.953_302 },
            ],
        }
    }
}
