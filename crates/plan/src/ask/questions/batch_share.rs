//! E20: which share of KV memory may a batch class hold?

use super::prelude::*;

pub struct BatchShare;

impl Question for BatchShare {
    fn about(&self) -> About {
        About {
            name: "batch-share",
            aliases: &[],
            covers: &["E20"],
            asks: "Which share of KV memory may batch work hold without making interactive work wait?",
            explanation: "Interactive requests arrive at random and stay a while: their number is Poisson with \
                mean arrivals × stay, and rarely exceeds mean + z × sqrt(mean). Memory for that many is \
                theirs; batch work may hold the rest. A larger share works too if batch work can be swapped \
                or recomputed within the TTFT target, at that price.",
            source: "Little's law; the number in an M/G/infinity system is Poisson",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::kv_cache_dtype(),
            standard::context(4000.0),
            standard::kv_bytes(),
            Input::number(
                "arrivals",
                Unit::RequestsPerSecond,
                5.0,
                "interactive requests a second",
            ),
            Input::number("stay", Unit::Seconds, 10.0, "time a request holds memory"),
            Input::number("z", Unit::Count, 2.326, "standard deviations: 2.326 = 1 % may wait")
                .within(0.0, 6.0),
            Input::number("pool", Unit::Bytes, 5.722e10, "KV memory"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, arrivals, stay, context, z, pool);
        step!(sheet, mean: Sequences = arrivals * stay, "interactive requests at once, on average");
        step!(sheet, peak: Sequences = mean + z * sqrt(mean), "and rarely more than");
        step!(sheet, reserved: Bytes = peak * context * kv_bytes, "memory that is theirs");
        step!(sheet, batch_share: Ratio = max(0.0, 1.0 - reserved / pool), "share batch work may hold");
        let has_room = batch_share > 0.0;
        let advice = match has_room {
            true => format!(
                "cap the batch class at {:.0} % of KV blocks, and let interactive work preempt it",
                100.0 * batch_share
            ),
            false => "interactive work alone fills the pool: batch work only where it can be preempted, or \
                      a second replica"
                .into(),
        };
        let decision = Some(if has_room { "room" } else { "no room" }.to_string());
        Ok(Verdict { answer: "batch_share", decision, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("arrivals", "5"), ("stay", "10s"), ("context", "4000")],
            answer: 0.391_163,
            cited: Cited {
                step: "peak",
                value: 67.0,
                tolerance: 0.01,
                from: "99 % quantile of a Poisson number of mean 50 (tables: 67)",
            },
            moves: [
                Move { input: "arrivals", to: "2", answer: 0.721_409 },
                Move { input: "kv_cache_dtype", to: "fp8", answer: 0.695_581 },
            ],
        }
    }
}
