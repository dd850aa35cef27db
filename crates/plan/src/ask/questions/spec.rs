//! E22: how many draft tokens pay?

use super::prelude::*;
use crate::ask::report::cell;

pub struct Spec;

/// Expected tokens of a verified step with acceptance `a` and `g` drafts (Leviathan et al., equation 1).
fn expected_tokens(a: f64, g: f64) -> f64 {
    if a >= 1.0 { g + 1.0 } else { (1.0 - a.powf(g + 1.0)) / (1.0 - a) }
}

impl Question for Spec {
    fn about(&self) -> About {
        About {
            name: "spec",
            aliases: &["speculation"],
            covers: &["E22"],
            asks: "How much faster is decode with this many draft tokens, at this batch?",
            explanation: "A step that verifies g drafts yields (1 - a^(g+1)) / (1 - a) tokens at acceptance a \
                and costs g draft steps more. Verifying is free only while batch × (g + 1) stays below the \
                ridge; beyond, a step takes as much longer as it verifies more, and speculation loses. \
                Attention reads KV once for all g + 1, so long contexts favor it.",
            source: "Leviathan et al. (ICML 2023); vLLM adaptive-verification docs",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let width = |facts: &Facts| standard::weight_width(facts.word("weights")?);
        vec![
            standard::gpu("H100"),
            standard::weights(),
            Input::worked(
                "weight_width",
                Unit::Count,
                "of that format",
                width,
                "bytes of a weight",
            )
            .within(0.1, 8.0)
            .fixed(),
            standard::peak(),
            standard::bandwidth(),
            Input::number("acceptance", Unit::Ratio, 0.8, "chance that a draft token is accepted")
                .within(0.0, 0.999),
            Input::number("drafts", Unit::Tokens, 4.0, "draft tokens a step")
                .whole()
                .within(1.0, 64.0),
            Input::number("draft_cost", Unit::Ratio, 0.05, "a draft step over a step of the model"),
            Input::number("batch", Unit::Sequences, 8.0, "running sequences").whole(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; weight_width, peak, bandwidth, acceptance, drafts, draft_cost, batch);
        step!(sheet, ridge: Sequences = peak / bandwidth * weight_width / 2.0, "rows up to the ridge");
        step!(
            sheet,
            expected: Tokens = (1.0 - pow(acceptance, drafts + 1.0)) / (1.0 - acceptance),
            "tokens a verified step yields"
        );
        step!(sheet, batch_limit: Sequences = ridge / (drafts + 1.0), "batch up to which verifying is free");
        step!(
            sheet,
            slowdown: Ratio = max(1.0, batch * (drafts + 1.0) / ridge) / max(1.0, batch / ridge),
            "a verifying step over a plain one"
        );
        step!(sheet, speedup: Ratio = expected / (drafts * draft_cost + slowdown), "tokens a second, times");
        let row = |g: f64| {
            let slow = (batch * (g + 1.0) / ridge).max(1.0) / (batch / ridge).max(1.0);
            let speed = expected_tokens(acceptance, g) / (g * draft_cost + slow);
            vec![cell(g), cell(expected_tokens(acceptance, g)), cell(speed)]
        };
        let rows = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0].into_iter().map(row).collect();
        sheet.compare("Other budgets", &["drafts", "tokens a step", "speedup"], rows);
        let pays = speedup > 1.0;
        let advice = match pays {
            true => format!("speculate while fewer than {batch_limit:.0} sequences run"),
            false => format!(
                "turn speculation off above a batch of {batch_limit:.0}, or use fewer drafts"
            ),
        };
        Ok(Verdict {
            answer: "speedup",
            decision: Some(if pays { "on" } else { "off" }.into()),
            advice,
        })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("gpu", "H100"), ("acceptance", "0.8"), ("drafts", "4"), ("batch", "8")],
            answer: 2.801_333,
            cited: Cited {
                step: "expected",
                value: 3.36,
                tolerance: 0.001,
                from: "economics 5.9: a 0.8, g 4: 3.36 tokens; H100: batch < 59 at g 4",
            },
            moves: [
                Move { input: "acceptance", to: "0.6", answer: 1.921_333 },
                Move { input: "batch", to: "400", answer: 0.646_462 },
            ],
        }
    }
}
