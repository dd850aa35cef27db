//! E11: what does copy-on-write save for parallel samples?

use super::prelude::*;

pub struct CopyOnWrite;

impl Question for CopyOnWrite {
    fn about(&self) -> About {
        About {
            name: "copy-on-write",
            aliases: &["parallel-samples"],
            covers: &["E11"],
            asks: "What do n samples of one prompt save by sharing its blocks?",
            explanation: "Full prompt blocks are kept once, by reference count. The partly filled last block \
                is shared until a sample writes to it, then copied; so each sample owns the blocks from that \
                one on. Engines that run n samples as separate requests share through the prefix cache \
                instead: full blocks only, and none if it is off.",
            source: "PagedAttention (SOSP 2023) section 4.4: parallel sampling",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::block_size(16.0),
            Input::number("samples", Unit::Sequences, 4.0, "samples of the prompt (n)").whole(),
            Input::number("prompt", Unit::Tokens, 1000.0, "tokens of the prompt").whole(),
            Input::number("output", Unit::Tokens, 200.0, "tokens of each sample").whole(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, block_size, samples, prompt, output);
        step!(sheet, own: Blocks = ceil((prompt + output) / block_size), "blocks of a sample alone");
        step!(sheet, shared: Blocks = floor(prompt / block_size), "full prompt blocks, kept once");
        step!(sheet, apart: Bytes = samples * own * block_size * kv_bytes, "without sharing");
        step!(
            sheet,
            together: Bytes = (shared + samples * (own - shared)) * block_size * kv_bytes,
            "with sharing and one copy of the partial block each"
        );
        step!(sheet, saved_share: Ratio = 1.0 - together / apart, "share saved");
        step!(sheet, saved: Bytes = apart - together, "saved");
        let advice = "ask for samples in one request (n, not n requests) and keep prefix caching on; the \
                      saving grows with the prompt's share of the text";
        Ok(Verdict { answer: "saved", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("model", "Llama-3.1-8B"),
                ("samples", "4"),
                ("prompt", "1000"),
                ("output", "200"),
            ],
            answer: 390_070_272.0,
            cited: Cited {
                step: "saved_share",
                value: 0.62,
                tolerance: 1e-9,
                from: "counted: 4 x 75 blocks apart, 62 shared + 4 x 13 together",
            },
            moves: [
                Move { input: "samples", to: "2", answer: 130_023_424.0 },
                Move { input: "prompt", to: "2000", answer: 786_432_000.0 },
            ],
        }
    }
}
