//! E18: how many sequences run at once, given the arrivals?

use super::prelude::*;

pub struct Little;

impl Question for Little {
    fn about(&self) -> About {
        About {
            name: "little",
            aliases: &[],
            covers: &["E18"],
            asks: "How many sequences run at once at this arrival rate, and where does it run away?",
            explanation: "Running = arrivals × time in decode, and the time grows with the running: TPOT = \
                alpha + beta × batch, alpha reading the weights, beta one sequence's KV. The fixed point is \
                arrivals × output × alpha / (1 - arrivals × output × beta); it exists while arrivals stay \
                below 1 / (output × beta). Halving KV bytes halves beta and doubles that limit. Prefill is \
                left out: it takes its share of the time off both.",
            source: "Little's law; linear TPOT as in Sarathi and Vidur",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("A100"),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            standard::context(2000.0),
            standard::kv_bytes(),
            standard::bandwidth(),
            Input::number("arrivals", Unit::RequestsPerSecond, 10.0, "requests a second"),
            Input::number("output", Unit::Tokens, 256.0, "tokens of a reply"),
            Input::number("pool", Unit::Bytes, 5.722e10, "KV memory"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; weight_bytes, kv_bytes, bandwidth, arrivals, output, context, pool);
        step!(sheet, alpha: Seconds = weight_bytes / bandwidth, "a step's time for the weights");
        step!(sheet, beta: Seconds = kv_bytes * context / bandwidth, "and for one sequence's KV");
        step!(sheet, limit: RequestsPerSecond = 1.0 / (output * beta), "arrivals where it runs away");
        step!(sheet, by_memory: Sequences = pool / (context * kv_bytes), "sequences that memory holds");
        if arrivals >= limit {
            return Err(AskError::NoAnswer(format!(
                "--arrivals = {arrivals} req/s is not below the limit of {limit:.1}: the batch grows without \
                 end; halve KV bytes (--kv-cache-dtype fp8), shorten --output or --context, or add a replica"
            )));
        }
        step!(
            sheet,
            running: Sequences = arrivals * output * alpha / (1.0 - arrivals * output * beta),
            "sequences that run at once"
        );
        step!(sheet, tpot: Seconds = alpha + beta * running, "time per output token then");
        let is_held = running <= by_memory;
        let advice = match is_held {
            true => format!("--max-num-seqs {:.0} or more lets them all run", running.ceil()),
            false => format!(
                "memory holds {by_memory:.0}: requests will queue or be preempted; add KV memory"
            ),
        };
        let decision = Some(if is_held { "stable" } else { "memory-bound" }.to_string());
        Ok(Verdict { answer: "running", decision, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("gpu", "A100"), ("arrivals", "15"), ("output", "256"), ("context", "2000")],
            answer: 59.739,
            cited: Cited {
                step: "running",
                value: 60.0,
                tolerance: 0.01,
                from: "economics 5.4: 15 req/s: batch 60, TPOT 15.6 ms, limit 30.4 req/s",
            },
            moves: [
                Move { input: "arrivals", to: "5", answer: 12.0681 },
                Move { input: "kv_cache_dtype", to: "fp8", answer: 40.1596 },
            ],
        }
    }
}
