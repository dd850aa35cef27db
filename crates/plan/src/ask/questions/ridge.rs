//! E1: from which batch on is decode bound by arithmetic?

use super::prelude::*;

pub struct Ridge;

impl Question for Ridge {
    fn about(&self) -> About {
        About {
            name: "ridge",
            aliases: &[],
            covers: &["E1"],
            asks: "From which batch on is decode bound by arithmetic instead of memory?",
            explanation: "A weight of b bytes is read once a step and multiplied once (2 operations) a \
                sequence: batch × 2 / b operations a byte. At the device's ridge, peak over bandwidth, \
                arithmetic takes as long as reading. Attention over the KV cache stays far below the \
                ridge whatever the batch (see packed-gqa).",
            source: "Williams et al., Roofline (CACM 2009)",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let width = |facts: &Facts| standard::weight_width(facts.word("weights")?);
        let count = Unit::Count;
        vec![
            standard::gpu("H100"),
            standard::weights(),
            Input::worked("weight_width", count, "of that format", width, "bytes of a weight")
                .within(0.1, 8.0)
                .fixed(),
            standard::peak(),
            standard::bandwidth(),
            Input::number(
                "efficiency",
                Unit::Ratio,
                1.0,
                "reached share of peak over that of bandwidth",
            )
            .within(0.01, 10.0),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; weight_width, peak, bandwidth, efficiency);
        step!(sheet, ridge: FlopPerByte = efficiency * peak / bandwidth, "operations a byte at the ridge");
        step!(sheet, batch: Sequences = ridge * weight_width / 2.0, "batch where weights reach the ridge");
        let advice = format!(
            "a --max-num-seqs above {batch:.0} buys latency, not throughput; below it, verify drafts \
             (spec) or admit more"
        );
        Ok(Verdict { answer: "batch", decision: None, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("gpu", "H100")],
            answer: 295.22,
            cited: Cited {
                step: "batch",
                value: 295.0,
                tolerance: 0.005,
                from: "economics 5.5: H100 295 (A100 153, H200 206)",
            },
            moves: [
                Move { input: "gpu", to: "A100", answer: 153.02 },
                Move { input: "gpu", to: "H200", answer: 206.04 },
            ],
        }
    }
}
