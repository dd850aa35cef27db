//! E3: what does a block size waste, and what does it save?

use super::prelude::*;
use crate::ask::report::cell;

pub struct BlockSize;

impl Question for BlockSize {
    fn about(&self) -> About {
        About {
            name: "block-size",
            aliases: &[],
            covers: &["E3"],
            asks: "Which share of KV memory does this block size waste?",
            explanation: "The last block of a sequence is on average half empty: (B - 1) / 2 tokens, at most \
                B - 1. A prefix is shared by whole blocks, so as many tokens of a match are lost. Against \
                that stand table entries and tiles per token, which fall with B. Quantization tiles of 128 \
                tokens should be several blocks, not a block. Hybrid models raise B by themselves (recurrent).",
            source: "PagedAttention (SOSP 2023) reports under 4 % waste",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::block_size(16.0),
            Input::number("length", Unit::Tokens, 1000.0, "tokens of a sequence"),
            Input::number("sequences", Unit::Sequences, 256.0, "sequences at once"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, block_size, length, sequences);
        step!(sheet, idle: Tokens = (block_size - 1.0) / 2.0, "mean idle slots of the last block");
        step!(sheet, worst_share: Ratio = (block_size - 1.0) / (length + block_size - 1.0), "at worst");
        step!(sheet, wasted_bytes: Bytes = sequences * idle * kv_bytes, "idle memory of all sequences");
        step!(sheet, mean_share: Ratio = idle / (length + idle), "share of a sequence's memory that is idle");
        let row = |block: f64| {
            let share = |idle: f64| format!("{}%", cell(100.0 * idle / (length + idle)));
            let tables = 4.0 * (length / block).ceil();
            vec![cell(block), share((block - 1.0) / 2.0), share(block - 1.0), cell(tables)]
        };
        let rows = [8.0, 16.0, 32.0, 64.0, 128.0, 256.0].into_iter().map(row).collect();
        let columns = ["block size", "mean waste", "worst", "table bytes a sequence"];
        sheet.compare("Other block sizes", &columns, rows);
        let advice = "16 or 32 keep waste under 4 % from 200 tokens on; go to --block-size 64 or 128 only \
                      where the kernel asks for it or sequences are long";
        Ok(Verdict { answer: "mean_share", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("block-size", "16"), ("length", "1000")],
            answer: 0.0074442,
            cited: Cited {
                step: "mean_share",
                value: 0.0074,
                tolerance: 0.01,
                from: "economics 5.3: B 16 at 1,000 tokens: 1.5 % worst, 0.74 % mean",
            },
            moves: [
                Move { input: "block_size", to: "128", answer: 0.059708 },
                Move { input: "length", to: "200", answer: 0.036145 },
            ],
        }
    }
}
