//! E9: how many cached blocks does an eviction order strand?

use super::prelude::*;

pub struct EvictionOrder;

impl Question for EvictionOrder {
    fn about(&self) -> About {
        About {
            name: "eviction-order",
            aliases: &["stranded"],
            covers: &["E9"],
            asks: "How many blocks of a cached prefix stay resident but can never hit again?",
            explanation: "A prefix hit ends at the first missing block, so blocks behind a hole hold memory \
                and serve nobody. Tail first strands none. Head first strands all that remain. In random \
                order the first hole of k among n lies at (n + 1) / (k + 1) on average, so (n - k) / (k + 1) \
                blocks before it still hit. Least recently used equals random when a chain is touched at \
                once and ties are broken by chance.",
            source: "order statistics; vLLM frees reversed(blocks) for this; llm-d-inference-sim#704",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            Input::number("blocks", Unit::Blocks, 64.0, "blocks of the chain").whole(),
            Input::number("evicted", Unit::Blocks, 8.0, "blocks evicted from it").whole(),
            Input::choice("order", "random", &["tail", "head", "random"], "which go first"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; blocks, evicted);
        if evicted > blocks {
            return Err(AskError::Wrong {
                field: "--evicted".into(),
                value: evicted.to_string(),
                mend: format!("write at most --blocks = {blocks}"),
            });
        }
        step!(sheet, resident: Blocks = blocks - evicted, "blocks that stay");
        let reachable = match sheet.word("order")?.as_str() {
            "tail" => sheet.record("reachable", Unit::Blocks, "resident", resident, "still hit"),
            "head" => sheet.record("reachable", Unit::Blocks, "0", 0.0, "still hit"),
            _ => {
                step!(sheet, reachable: Blocks = resident / (evicted + 1.0), "blocks before the first hole");
                reachable
            }
        };
        step!(sheet, stranded: Blocks = resident - reachable, "resident and never hit again");
        let advice = match stranded > 0.0 {
            true => {
                "evict leaves (tails) before their parents: vLLM v1, SGLang and TensorRT-LLM do; a \
                     router's or simulator's own index must too"
            }
            false => "tail first: nothing is stranded",
        };
        Ok(Verdict { answer: "stranded", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("blocks", "3"), ("evicted", "1"), ("order", "random")],
            answer: 1.0,
            cited: Cited {
                step: "reachable",
                // Holes at the first, second or third block leave 0, 1 or 2 before them.
                value: 1.0,
                tolerance: 1e-9,
                from: "llm-d-inference-sim#704, chain of 3, 1 evicted: the three cases counted",
            },
            moves: [
                Move { input: "order", to: "tail", answer: 0.0 },
                Move { input: "order", to: "head", answer: 2.0 },
            ],
        }
    }
}
