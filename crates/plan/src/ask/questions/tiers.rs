//! E16: how long does an SSD tier last, and how fast may it be written?

use super::prelude::*;

pub struct Tiers;

impl Question for Tiers {
    fn about(&self) -> About {
        About {
            name: "tiers",
            aliases: &["ssd"],
            covers: &["E16"],
            asks: "How long does an SSD live as a KV tier, and is a write worth its wear?",
            explanation: "A drive is sold with drive writes a day over its warranty: that many bytes, less \
                write amplification, is its budget. Written at the rate at which KV is evicted it is spent \
                in budget / rate. A spilled sequence is worth its wear if it is read back often enough: \
                each read saves a prefill. Write only what was hit before, and cap the rate at what lasts \
                the warranty.",
            source: "definition of drive writes a day; data sheets of 7.68 TB drives",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let count = Unit::Count;
        vec![
            standard::model("Llama-3.1-8B"),
            standard::kv_cache_dtype(),
            standard::context(8192.0),
            standard::kv_bytes(),
            Input::number("capacity", Unit::Bytes, 7.68e12, "bytes of the drive"),
            Input::number("dwpd", count, 1.0, "drive writes a day").within(0.01, 100.0),
            Input::number(
                "warranty",
                Unit::Seconds,
                5.0 * 365.0 * 86_400.0,
                "warranty of the drive",
            ),
            Input::number("amplification", count, 1.0, "flash bytes written per byte")
                .within(1.0, 20.0),
            Input::number("write_rate", Unit::BytesPerSecond, 1e9, "KV written a second"),
            Input::number("price", count, 900.0, "price of the drive, in any currency"),
            standard::gpu("H100"),
            standard::active_parameters(),
            standard::peak(),
            standard::mfu(),
            Input::number(
                "gpu_price",
                count,
                2.5,
                "price of the GPU an hour, in the same currency",
            ),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, capacity, dwpd, warranty, amplification, write_rate, context, price);
        inputs!(sheet; active_parameters, peak, mfu, gpu_price);
        step!(
            sheet,
            budget: Bytes = capacity * dwpd * (warranty / 86400.0) / amplification,
            "bytes it may be written"
        );
        step!(sheet, sustainable: BytesPerSecond = budget / warranty, "rate that lasts the warranty");
        step!(sheet, spills: Count = budget / (context * kv_bytes), "sequences spilled in its life");
        step!(sheet, price_per_million: Count = 1e6 * price / spills, "price of a million spills");
        step!(
            sheet,
            saved_per_million: Count =
                1e6 * context * 2.0 * active_parameters / (peak * mfu) * gpu_price / 3600.0,
            "price of the GPU time that a million reads save"
        );
        step!(
            sheet,
            reads_to_repay: Count = price_per_million / saved_per_million,
            "reads that repay the wear of a spill"
        );
        step!(sheet, life: Seconds = budget / write_rate, "life at that rate");
        let lasts = life >= warranty;
        let sustained = crate::ask::quantity::display(sustainable, Unit::BytesPerSecond);
        let advice = format!(
            "cap writes at {sustained}, and write what will be read {reads_to_repay:.2} times or more (on second \
             use, not on every eviction)"
        );
        let decision = Some(if lasts { "lasts" } else { "wears out" }.to_string());
        Ok(Verdict { answer: "life", decision, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("capacity", "7.68TB"), ("dwpd", "1"), ("write-rate", "1GB/s")],
            answer: 14_016_000.0,
            cited: Cited {
                step: "sustainable",
                value: 89e6,
                tolerance: 0.005,
                from: "economics 5.12: 14.0 PB: 162 days at 1 GB/s, 5 years at 89 MB/s",
            },
            moves: [
                Move { input: "dwpd", to: "3", answer: 42_048_000.0 },
                Move { input: "write_rate", to: "89MB/s", answer: 157_483_146.0 },
            ],
        }
    }
}
