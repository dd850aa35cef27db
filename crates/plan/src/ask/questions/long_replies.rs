//! E29: what do long (reasoning) replies do to batch, preemption and speed?

use super::prelude::*;

pub struct LongReplies;

impl Question for LongReplies {
    fn about(&self) -> About {
        About {
            name: "long-replies",
            aliases: &["reasoning"],
            covers: &["E29"],
            asks: "Which batch, speed and preemption price follow from long replies?",
            explanation: "A reply of thousands of tokens grows the sequence while it runs: on average it holds \
                prompt + half of the reply, at the end all. The pool over the mean is the batch it sustains; \
                each user's speed is 1 / (alpha + beta × batch). A preempted sequence recomputes everything \
                it generated, which no other request's prefix can give back, so preemption gets dearer the \
                longer replies are.",
            source: "linear TPOT as in Sarathi and Vidur; recomputation as in PagedAttention (SOSP 2023)",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("H100"),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::active_parameters(),
            standard::peak(),
            standard::mfu(),
            standard::bandwidth(),
            Input::number("pool", Unit::Bytes, 5.722e10, "KV memory"),
            Input::number("prompt", Unit::Tokens, 500.0, "tokens of a prompt"),
            Input::number("output", Unit::Tokens, 8000.0, "tokens of a reply"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; weight_bytes, kv_bytes, active_parameters, peak, mfu, bandwidth, pool, prompt, output);
        step!(sheet, held: Tokens = prompt + output / 2.0, "tokens a sequence holds on average");
        step!(sheet, batch: Sequences = pool / (held * kv_bytes), "sequences that the pool sustains");
        step!(
            sheet,
            batch_at_end: Sequences = pool / ((prompt + output) * kv_bytes),
            "if all were at their end: no preemption ever"
        );
        step!(
            sheet,
            tpot: Seconds = weight_bytes / bandwidth + batch * held * kv_bytes / bandwidth,
            "time per output token then"
        );
        step!(sheet, speed: TokensPerSecond = 1.0 / tpot, "of one user");
        step!(sheet, throughput: TokensPerSecond = batch / tpot, "of all");
        step!(sheet, reply_s: Seconds = output * tpot, "a whole reply");
        step!(
            sheet,
            preemption_s: Seconds = held * 2.0 * active_parameters / (peak * mfu),
            "prefill again after a preemption"
        );
        let advice = format!(
            "--max-num-seqs {:.0} runs without preemption, up to {batch:.0} with few; fp8 KV doubles both",
            batch_at_end.floor().max(1.0)
        );
        Ok(Verdict { answer: "batch", decision: None, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("gpu", "H100"),
                ("weight-bytes", "16.06GB"),
                ("active-parameters", "8.03e9"),
                ("output", "8000"),
            ],
            answer: 97.0120,
            cited: Cited {
                step: "preemption_s",
                value: 4500.0 / 30_790.0,
                tolerance: 0.001,
                from: "economics 5.10: an H100 prefills an 8B at 30,790 tok/s",
            },
            moves: [
                Move { input: "output", to: "32000", answer: 26.4578 },
                Move { input: "kv_cache_dtype", to: "fp8", answer: 194.024 },
            ],
        }
    }
}
