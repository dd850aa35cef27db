//! E1: when does a decode step read more KV than weights?

use super::prelude::*;

pub struct Crossover;

impl Question for Crossover {
    fn about(&self) -> About {
        About {
            name: "crossover",
            aliases: &[],
            covers: &["E1"],
            asks: "At which batch does a decode step read as much KV as weights?",
            explanation: "A decode step streams the weights once and the KV of every running sequence once. \
                Below the crossover a larger batch is nearly free and weight formats pay; above it step \
                time grows with every token in flight and KV formats pay. Both sides scale alike under \
                tensor parallelism while KV heads divide. In a mixture of experts a large batch touches \
                every expert, so all weights count.",
            source: "roofline of decode: alpha over beta of a linear step time (Sarathi, Vidur)",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            standard::context(2000.0),
            standard::kv_bytes(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; weight_bytes, kv_bytes, context);
        step!(sheet, tokens: Tokens = weight_bytes / kv_bytes, "tokens in flight whose KV equals the weights");
        step!(sheet, batch: Sequences = tokens / context, "sequences of that context");
        let advice = format!(
            "below {batch:.0} running sequences spend on --quantization of weights; above, on \
             --kv-cache-dtype and on shorter contexts"
        );
        Ok(Verdict { answer: "batch", decision: None, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "Llama-3.1-8B"), ("context", "2000")],
            answer: 61.267,
            cited: Cited {
                step: "batch",
                value: 7.88 / 0.129,
                tolerance: 0.01,
                from: "economics 5.4: alpha 7.88 ms, beta 0.129 ms a sequence of 2,000 tokens",
            },
            moves: [
                Move { input: "kv_cache_dtype", to: "fp8", answer: 122.53 },
                Move { input: "context", to: "8000", answer: 15.317 },
            ],
        }
    }
}
