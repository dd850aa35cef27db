//! E25: E4M3 or E5M2?

use super::prelude::*;

pub struct Fp8Range;

impl Question for Fp8Range {
    fn about(&self) -> About {
        About {
            name: "fp8-range",
            aliases: &["e4m3-or-e5m2"],
            covers: &["E25"],
            asks: "How large are the values an 8-bit float holds, and how fine?",
            explanation: "With e exponent and m mantissa bits the bias is 2^(e-1) - 1. E5M2 keeps IEEE's \
                infinities, so its top exponent is lost: (2 - 2^-2) × 2^15 = 57,344. E4M3FN spends only the \
                all-ones code on NaN: the top exponent keeps all but one mantissa, (2 - 2^-2) × 2^8 = 448. \
                Steps near 1 are 2^-m: E4M3 is twice as fine. KV wants E4M3, with a scale if 448 is exceeded; \
                E5M2 needs no scale and costs a bit of precision.",
            source: "OCP 8-bit floating point specification",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let exponent = |facts: &Facts| Ok(if facts.word("format")? == "e4m3" { 4.0 } else { 5.0 });
        let mantissa = |facts: &Facts| Ok(if facts.word("format")? == "e4m3" { 3.0 } else { 2.0 });
        let origin = "of the format";
        vec![
            Input::choice(
                "format",
                "e4m3",
                &["e4m3", "e5m2"],
                "E4M3 (finite, FN) or E5M2 (IEEE-like)",
            ),
            Input::worked("exponent", Unit::Count, origin, exponent, "exponent bits")
                .whole()
                .fixed(),
            Input::worked("mantissa", Unit::Count, origin, mantissa, "mantissa bits")
                .whole()
                .fixed(),
            Input::number("absmax", Unit::Count, 20.0, "largest size of a key or value")
                .within(1e-6, 1e9),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; exponent, mantissa, absmax);
        let is_finite = sheet.word("format")? == "e4m3";
        step!(sheet, bias: Count = pow(2.0, exponent - 1.0) - 1.0, "exponent bias");
        let top = if is_finite { 1.0 } else { 2.0 };
        let lost = if is_finite { 2.0 } else { 1.0 };
        let origin = "the format's";
        fact!(sheet, codes_lost: Count = top, origin, "exponent codes above the largest, plus one");
        fact!(sheet, mantissas_lost: Count = lost, origin, "mantissa steps below 2 of the largest");
        step!(sheet, top_exponent: Count = pow(2.0, exponent) - codes_lost - bias, "largest exponent");
        step!(
            sheet,
            largest: Count = (2.0 - mantissas_lost * pow(2.0, -mantissa)) * pow(2.0, top_exponent),
            "largest finite value"
        );
        step!(sheet, smallest_normal: Count = pow(2.0, 1.0 - bias), "below it steps stop shrinking");
        step!(sheet, step_at_one: Ratio = pow(2.0, -mantissa), "distance of values just above 1");
        step!(sheet, headroom: Ratio = largest / absmax, "the largest value over yours");
        let clips = headroom < 1.0;
        let advice = match (is_finite, clips) {
            (true, false) => {
                "--kv-cache-dtype fp8_e4m3: nothing clips, and it is the finer of the two"
            }
            (true, true) => {
                "fp8_e4m3 with calibrated scales; fp8_e5m2 only where no scale can be had"
            }
            (false, _) => {
                "fp8_e5m2 only where values exceed 448 and no scale can be had: e4m3 is twice as fine"
            }
        };
        let decision = Some(if clips { "clips" } else { "no clipping" }.to_string());
        Ok(Verdict { answer: "largest", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("format", "e4m3"), ("absmax", "20")],
            answer: 448.0,
            cited: Cited {
                step: "smallest_normal",
                value: 0.015625,
                tolerance: 0.0,
                from: "OCP FP8: E4M3FN max 448, min normal 2^-6; E5M2 57,344 and 2^-14",
            },
            moves: [
                Move { input: "format", to: "e5m2", answer: 57_344.0 },
                Move { input: "absmax", to: "1000", answer: 448.0 },
            ],
        }
    }
}
