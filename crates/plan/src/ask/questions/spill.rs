//! E31: when should a router leave the warm replica?

use super::prelude::*;

pub struct Spill;

impl Question for Spill {
    fn about(&self) -> About {
        About {
            name: "spill",
            aliases: &["affinity"],
            covers: &["E31"],
            asks: "Which queue gap makes a cold replica better than the one that holds the prefix?",
            explanation: "A hit saves matched tokens / prefill rate. A warm replica is worth its queue as long \
                as it is at most that much longer than the cold one's. Count queues in milliseconds of work, \
                not in requests: a threshold in requests is right for one prompt length only. After a spill \
                the prefix is warm on both, so hot prefixes spread by themselves.",
            source: "Mooncake (FAST 2025) scheduling; SGLang router defaults",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("H100"),
            standard::count(1.0),
            standard::active_parameters(),
            standard::peak(),
            standard::mfu(),
            Input::number("matched", Unit::Tokens, 2000.0, "tokens that hit on the warm replica"),
            Input::number("prompt", Unit::Tokens, 3000.0, "tokens of a typical prompt"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; count, active_parameters, peak, mfu, matched, prompt);
        step!(
            sheet,
            prefill_rate: TokensPerSecond = count * peak * mfu / (2.0 * active_parameters),
            "prefill of a replica"
        );
        step!(sheet, gap: Seconds = matched / prefill_rate, "queue gap up to which the warm one wins");
        step!(sheet, gap_requests: Sequences = matched / prompt, "the same in waiting prompts");
        let advice = format!(
            "route to the warm replica until its queue is {:.0} ms longer than the shortest",
            1e3 * gap
        );
        Ok(Verdict { answer: "gap", decision: None, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("gpu", "H100"), ("active-parameters", "8.03e9"), ("matched", "2000")],
            answer: 0.0649545,
            cited: Cited {
                step: "gap",
                value: 0.065,
                tolerance: 0.005,
                from: "economics 5.10: 2,000 tokens, 8B on an H100 at 30,790 tok/s: 65 ms",
            },
            moves: [
                Move { input: "matched", to: "8000", answer: 0.259_818 },
                Move { input: "gpu", to: "A100", answer: 0.205_897 },
            ],
        }
    }
}
