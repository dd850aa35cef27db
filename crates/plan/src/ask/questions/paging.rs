//! E36: what does the block table's indirection cost?

use super::prelude::*;

pub struct Paging;

impl Question for Paging {
    fn about(&self) -> About {
        About {
            name: "paging",
            aliases: &["indirection"],
            covers: &["E36"],
            asks: "What does reading KV through a block table cost?",
            explanation: "A table entry of 4 bytes names a page of tens of KiB: bytes are nothing. The load of \
                the page depends on the load of its entry, so each page starts one memory latency late; with \
                latency × bandwidth bytes in flight that hides, as long as several pages are fetched ahead. \
                A tile larger than a block spans several pages and needs one entry each: keep tiles a \
                multiple of the block. Small pages of few heads (TP, MQA) are where it shows.",
            source: "PagedAttention (SOSP 2023) section 7.1 (20-26 % then, for tiny blocks)",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let layer = |facts: &Facts| {
            let model = facts.model()?;
            let dtype = standard::dtype(facts.word("kv_cache_dtype")?)?;
            let tp = facts.number("tp")? as u64;
            let bytes = model.layers.iter().map(|layer| layer.token_bytes(dtype, tp)).max();
            Ok(bytes.unwrap_or(0) as f64)
        };
        let meaning = "KV of a token in one layer, one rank";
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("H100"),
            standard::tp(1.0),
            standard::kv_cache_dtype(),
            Input::worked("layer_bytes", Unit::BytesPerToken, "the model's", layer, meaning),
            Input { is_fixed: false, ..standard::block_size(16.0) },
            Input::number("entry", Unit::Bytes, 4.0, "bytes of a table entry").fixed(),
            Input::number("tile", Unit::Tokens, 128.0, "tokens a kernel tile reads").whole(),
            Input::number("latency", Unit::Seconds, 600e-9, "latency of a load from memory"),
            standard::bandwidth(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; layer_bytes, block_size, entry, tile, latency, bandwidth);
        step!(sheet, page: Bytes = block_size * layer_bytes, "a block in one layer");
        step!(sheet, overhead: Ratio = entry / page, "table bytes read for each byte of KV");
        step!(sheet, pages_a_tile: Count = ceil(tile / block_size), "entries a tile depends on");
        step!(sheet, in_flight: Bytes = latency * bandwidth, "bytes in flight that hide the latency");
        step!(sheet, pages_ahead: Count = ceil(in_flight / page), "pages that must be fetched ahead");
        let advice = match pages_ahead > 64.0 {
            true => "pages are small: raise --block-size so that fewer must be in flight",
            false => {
                "no concern: the kernel must only fetch a few table entries ahead of their pages"
            }
        };
        Ok(Verdict { answer: "overhead", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("model", "Llama-3.1-8B"), ("block-size", "16")],
            answer: 6.103_516e-5,
            cited: Cited {
                step: "page",
                value: 65_536.0,
                tolerance: 0.0,
                from: "an entry of 4 bytes per page of 64 KiB (vLLM, 16 tokens, 8 heads of 128)",
            },
            moves: [
                Move { input: "tp", to: "8", answer: 4.882_813e-4 },
                Move { input: "block_size", to: "64", answer: 1.525_879e-5 },
            ],
        }
    }
}
