//! E21: which ceiling decides max_num_seqs: memory, arithmetic or latency?

use super::prelude::*;
use crate::ask::report::cell;

pub struct Ceilings;

impl Question for Ceilings {
    fn about(&self) -> About {
        About {
            name: "ceilings",
            aliases: &[],
            covers: &["E21"],
            asks: "Which value of --max-num-seqs is right, and which ceiling sets it?",
            explanation: "Three ceilings: KV memory over a sequence's KV; the ridge, where a larger batch stops \
                being free; and the latency target, (TPOT - alpha) / beta. The lowest is the one to set. \
                Above memory, sequences are preempted; above the ridge, latency grows and throughput does \
                not; above the third, the target is missed.",
            source: "roofline; linear TPOT as in Sarathi and Vidur",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let width = |facts: &Facts| standard::weight_width(facts.word("weights")?);
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("A100"),
            standard::weights(),
            standard::weight_bytes(),
            Input::worked(
                "weight_width",
                Unit::Count,
                "of that format",
                width,
                "bytes of a weight",
            )
            .within(0.1, 8.0)
            .fixed(),
            standard::kv_cache_dtype(),
            standard::context(2000.0),
            standard::kv_bytes(),
            standard::peak(),
            standard::bandwidth(),
            Input::number("pool", Unit::Bytes, 5.722e10, "KV memory"),
            Input::number("tpot", Unit::Seconds, 0.0156, "latency target: time per output token"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; weight_bytes, weight_width, kv_bytes, peak, bandwidth, context, pool, tpot);
        step!(sheet, alpha: Seconds = weight_bytes / bandwidth, "a step's time for the weights");
        step!(sheet, beta: Seconds = kv_bytes * context / bandwidth, "and for one sequence's KV");
        step!(sheet, by_memory: Sequences = pool / (kv_bytes * context), "that memory holds");
        step!(sheet, by_arithmetic: Sequences = peak / bandwidth * weight_width / 2.0, "up to the ridge");
        step!(sheet, by_latency: Sequences = (tpot - alpha) / beta, "within the latency target");
        step!(
            sheet,
            max_num_seqs: Sequences = floor(min(by_memory, min(by_arithmetic, by_latency))),
            "the lowest"
        );
        if max_num_seqs < 1.0 {
            return Err(AskError::NoAnswer(format!(
                "not one sequence: memory holds {by_memory:.2}, the latency target {by_latency:.2}; raise \
                 --pool or --tpot, or shrink --weights"
            )));
        }
        let mut ceilings = [
            ("KV memory", by_memory, "--kv-cache-dtype fp8 or more memory raises it"),
            (
                "arithmetic",
                by_arithmetic,
                "a device with a higher ridge raises it; more sequences only wait",
            ),
            (
                "latency",
                by_latency,
                "smaller weights, fp8 KV, shorter contexts or a slower target raise it",
            ),
        ];
        let row = |(name, value, _): &(&str, f64, &str)| vec![name.to_string(), cell(*value)];
        sheet.compare("Ceilings", &["by", "sequences"], ceilings.iter().map(row).collect());
        ceilings.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (name, _, mend) = ceilings[0];
        let advice = format!("--max-num-seqs {max_num_seqs}: {mend}");
        Ok(Verdict { answer: "max_num_seqs", decision: Some(name.to_string()), advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("gpu", "A100"),
                ("context", "2000"),
                ("tpot", "15.6ms"),
                ("weight-bytes", "16.06GB"),
            ],
            answer: 60.0,
            cited: Cited {
                step: "by_latency",
                value: 60.0,
                tolerance: 0.01,
                from: "economics 5.4: batch 60 at TPOT 15.6 ms; ridge 153 (5.5)",
            },
            moves: [
                Move { input: "tpot", to: "40ms", answer: 153.0 },
                Move { input: "context", to: "16000", answer: 7.0 },
            ],
        }
    }
}
