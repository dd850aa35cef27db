//! E4: where do the gigabytes of a device go?

use super::prelude::*;
use crate::engines::Ledger;
use crate::figure::Figure;

pub struct MemoryLedger;

/// A line of vLLM's ledger as `reef plan fit` estimates it, in bytes.
fn part(facts: &Facts, pick: fn(Ledger) -> Option<Figure>) -> Result<f64, AskError> {
    let ledger = start::plan(facts, None).map(|plan| plan.ledger);
    let unknown =
        "vLLM's ledger of this model is not known: give --activations --non-torch --graphs";
    match ledger.and_then(pick) {
        Some(figure) => Ok(figure.value),
        None => Err(AskError::NoAnswer(unknown.into())),
    }
}

impl Question for MemoryLedger {
    fn about(&self) -> About {
        About {
            name: "ledger",
            aliases: &[],
            covers: &["E4"],
            asks: "Where does a device's memory go, and what is left for KV?",
            explanation: "The engine may use utilization of the device. From that it takes what it measured: \
                weights, the activation peak of a profiling run, memory outside the allocator (CUDA \
                context, NCCL, other processes) and, since vLLM 0.21, an estimate of its CUDA graphs; KV \
                gets the rest. Graphs captured outside the ledger come on top of the budget. Put measured \
                lines of your log in place of the defaults; `reef plan fit` estimates them per engine and \
                version, `reef plan read` takes them from a log.",
            source: "vLLM gpu_worker.py; start-up logs C005 and C024 of crates/plan/tests/data/cases.csv",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let origin = "as `reef plan fit` estimates it for vLLM";
        let activations = |facts: &Facts| part(facts, |ledger| ledger.activation);
        let non_torch = |facts: &Facts| part(facts, |ledger| ledger.non_torch);
        let graphs = |facts: &Facts| part(facts, |ledger| ledger.graphs);
        let bytes = Unit::Bytes;
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("H100"),
            standard::tp(1.0),
            standard::weights(),
            standard::weight_bytes(),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            standard::memory(),
            standard::utilization(0.9),
            Input::worked("activations", bytes, origin, activations, "peak of the profiling run"),
            Input::worked(
                "non_torch",
                bytes,
                origin,
                non_torch,
                "CUDA context, NCCL, other processes",
            ),
            Input::worked("graphs", bytes, origin, graphs, "CUDA graphs").within(0.0, 1e13),
            Input::choice("graphs_in_budget", "yes", &["yes", "no"], "subtracted (vLLM 0.21 on)"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; tp, weight_bytes, kv_bytes, memory, utilization, activations, non_torch, graphs);
        let inside = if sheet.word("graphs_in_budget")? == "yes" { 1.0 } else { 0.0 };
        fact!(sheet, inside: Count = inside, "1 where graphs are in the budget", "share of the graphs counted");
        step!(sheet, budget: Bytes = memory * utilization, "what the engine may use");
        step!(sheet, rank_weights: Bytes = weight_bytes / tp, "weights of a rank");
        step!(sheet, graphs_counted: Bytes = graphs * inside, "graphs inside the budget");
        step!(
            sheet,
            kv_pool: Bytes = budget - rank_weights - activations - non_torch - graphs_counted,
            "left for KV"
        );
        step!(sheet, tokens: Tokens = max(0.0, kv_pool) / kv_bytes, "tokens it holds");
        step!(
            sheet,
            spare: Bytes = memory - budget - (graphs - graphs_counted),
            "of the device outside everything"
        );
        let advice = if kv_pool <= 0.0 {
            "nothing is left for KV: more ranks, smaller weights or a higher --gpu-memory-utilization"
        } else if spare < 0.0 {
            "graphs outside the budget exceed the device: lower --gpu-memory-utilization or set \
             --enforce-eager"
        } else {
            "--gpu-memory-utilization moves most: raise it while `spare` stays positive"
        };
        let decision = standard::fits(kv_pool > 0.0 && spare >= 0.0);
        Ok(Verdict { answer: "kv_pool", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("memory", "79.22GiB"),
                ("weight-bytes", "14.96GiB"),
                ("activations", "1.26GiB"),
                ("non-torch", "1.79GiB"),
                ("graphs", "0.5GiB"),
                ("graphs-in-budget", "no"),
            ],
            answer: 5.721_670e10,
            cited: Cited {
                step: "kv_pool",
                value: 53.29 * 1_073_741_824.0,
                tolerance: 0.0005,
                from: "cases.csv C005: 71.29 - 14.96 - 1.79 - 1.26 = 53.29 GiB as printed",
            },
            moves: [
                Move { input: "utilization", to: "0.95", answer: 6.146_979e10 },
                Move { input: "graphs_in_budget", to: "yes", answer: 5.667_983e10 },
            ],
        }
    }
}
