//! E35: what do beams (or samples) cost apart and shared?

use super::prelude::*;

pub struct Beams;

impl Question for Beams {
    fn about(&self) -> About {
        About {
            name: "beams",
            aliases: &["beam-search"],
            covers: &["E35"],
            asks: "What do the beams of one search cost, kept apart and sharing blocks?",
            explanation: "Beams that part late share all blocks before the fork; each owns the blocks since. \
                Kept apart, every beam holds its whole text, and every reordering copies it. The worst case \
                is a fork at the start: then sharing saves nothing but the prompt.",
            source: "PagedAttention (SOSP 2023) section 4.4: beam search",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::block_size(16.0),
            Input::number("beams", Unit::Sequences, 4.0, "beams").whole(),
            Input::number("tokens", Unit::Tokens, 1200.0, "tokens of a beam, prompt included")
                .whole(),
            Input::number("own_blocks", Unit::Blocks, 1.0, "blocks each beam has for itself")
                .whole(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, block_size, beams, tokens, own_blocks);
        step!(sheet, blocks: Blocks = ceil(tokens / block_size), "blocks of a beam");
        step!(sheet, block_bytes: Bytes = block_size * kv_bytes, "bytes of a block");
        step!(sheet, owned: Blocks = min(own_blocks, blocks), "blocks of its own");
        step!(sheet, apart: Bytes = beams * blocks * block_bytes, "kept apart");
        step!(
            sheet,
            shared: Bytes = (blocks - owned + beams * owned) * block_bytes,
            "sharing all but their own"
        );
        step!(sheet, ratio: Ratio = apart / shared, "times less");
        let advice = "run beams where blocks are shared by reference (Reef, SGLang, TensorRT-LLM V1); as \
                      separate requests they cost what `apart` says unless the prefix cache catches them";
        Ok(Verdict { answer: "shared", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("kv-bytes", "128KiB"),
                ("beams", "4"),
                ("tokens", "1200"),
                ("block-size", "16"),
            ],
            answer: 163_577_856.0,
            cited: Cited {
                step: "apart",
                value: 600.0 * 1_048_576.0,
                tolerance: 0.0,
                from: "four beams of 1,200 tokens at 128 KiB: 600 MiB apart, 156 MiB sharing all but the last",
            },
            moves: [
                Move { input: "beams", to: "8", answer: 171_966_464.0 },
                Move { input: "own_blocks", to: "75", answer: 629_145_600.0 },
            ],
        }
    }
}
