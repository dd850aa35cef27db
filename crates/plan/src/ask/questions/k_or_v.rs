//! E15: do keys or values need the bits?

use super::prelude::*;

pub struct KOrV;

impl Question for KOrV {
    fn about(&self) -> About {
        About {
            name: "k-or-v",
            aliases: &[],
            covers: &["E15"],
            asks: "How many more bits do keys need than values for the same harm?",
            explanation: "Errors take two routes. A value's error reaches the output divided by the root of \
                the tokens attended: it averages out. A key's error moves a score by |q| times itself and \
                passes through the exponential, where outlier channels stretch the range and no averaging \
                helps. Loss grows with the square of the error and a bit halves the error, so the losses of \
                the two mirrored formats tell the difference: bits = log4(loss of keys / loss of values). \
                The analytic route, q_rms × key range × value spread / value range, is beside it.",
            source: "KVSplit and mlx measurements (K8V4 +0.86 % PPL, K4V8 +6.06 %)",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let loss = |name, default, meaning| {
            Input::number(name, Unit::Ratio, default, meaning).within(1e-6, 100.0)
        };
        let size = |name, default, meaning| {
            Input::number(name, Unit::Count, default, meaning).within(1e-6, 1e6)
        };
        vec![
            loss("key_loss", 0.0606, "rise of perplexity with 4-bit keys, 8-bit values"),
            loss("value_loss", 0.0086, "rise of perplexity with 8-bit keys, 4-bit values"),
            size("query_rms", 1.0, "RMS of a query's channels after scaling by 1/sqrt(d)"),
            size("key_range", 16.0, "range of a key channel group"),
            size("value_range", 4.0, "range of a value group"),
            size("value_rms", 0.7, "spread of values over tokens"),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; key_loss, value_loss, query_rms, key_range, value_range, value_rms);
        step!(sheet, loss_ratio: Ratio = key_loss / value_loss, "how much worse 4-bit keys are");
        step!(sheet, error_ratio: Ratio = sqrt(loss_ratio), "ratio of the errors behind the losses");
        step!(
            sheet,
            route_ratio: Ratio = query_rms * key_range * value_rms / value_range,
            "the same from the sizes of queries, keys and values"
        );
        step!(sheet, extra_bits: Count = log2(loss_ratio) / 2.0, "more bits for keys");
        let keys_first = extra_bits > 0.0;
        let advice = match keys_first {
            true => {
                "shrink values first: K8V4 is the rung between int8 and int4; rotate keys (Hadamard) or \
                     scale them per channel before giving them 4 bits"
            }
            false => "keys are no worse than values here: shrink both alike",
        };
        let decision = Some(if keys_first { "keys" } else { "values" }.to_string());
        Ok(Verdict { answer: "extra_bits", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("key-loss", "6.06%"), ("value-loss", "0.86%")],
            answer: 1.408456,
            cited: Cited {
                step: "loss_ratio",
                value: 7.0,
                tolerance: 0.01,
                from: "KVSplit: K8V4 +0.86 % PPL against K4V8 +6.06 %",
            },
            moves: [
                Move { input: "key_loss", to: "24.24%", answer: 2.408456 },
                Move { input: "value_loss", to: "6.06%", answer: 0.0 },
            ],
        }
    }
}
