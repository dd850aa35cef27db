//! Who runs when: the options that only a server needs.

use anyhow::bail;
use clap::ValueEnum;
use reef_engine::{AdmissionPolicy, Scheduling};

use crate::output::WrongArguments;

/// Who runs when.
#[derive(clap::Args, Clone, Debug)]
pub struct EngineArgs {
    /// When a request is let in: when all fit to their ends under their lowest permitted rungs (nobody has
    /// to stand still), or when all fit for the near future (more at once, at the price of pauses)
    #[arg(long, value_enum, default_value_t = AdmissionArg::Reserve)]
    admission: AdmissionArg,
    /// Sequences running at once at most; memory and arithmetic may set lower limits
    #[arg(long, value_name = "N", default_value_t = Scheduling::default().max_running)]
    max_running: usize,
    /// Requests waiting at most; one more is answered with 429
    #[arg(long, value_name = "N", default_value_t = Scheduling::default().max_waiting)]
    max_waiting: usize,
    /// Prompt tokens of one sequence in a step at most
    #[arg(long, value_name = "N", default_value_t = Scheduling::default().chunk_tokens)]
    max_batch_tokens: usize,
    /// Milliseconds between two tokens of a stream that are aimed at; limits how many run at once
    #[arg(long, value_name = "MS")]
    latency_target_ms: Option<f64>,
    /// Share of the KV memory that batch requests (of negative priority) may hold, from 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = Scheduling::default().batch_share)]
    batch_share: f64,
}

/// Values of `--admission`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AdmissionArg {
    /// All fit to their ends
    Reserve,
    /// All fit for the near future
    Utilize,
}

impl EngineArgs {
    /// The engine's settings.
    pub fn scheduling(&self) -> anyhow::Result<Scheduling> {
        at_least_one("--max-running", self.max_running)?;
        at_least_one("--max-batch-tokens", self.max_batch_tokens)?;
        let share = self.batch_share;
        if !(0.0..=1.0).contains(&share) {
            bail!(WrongArguments(format!("--batch-share is {share}: give a share from 0 to 1")));
        }
        let latency_target_us = match self.latency_target_ms {
            None => None,
            Some(ms) if ms > 0.0 && ms.is_finite() => Some((ms * 1e3) as u64),
            Some(ms) => {
                bail!(WrongArguments(format!("--latency-target-ms is {ms}: give more than 0")))
            }
        };
        Ok(Scheduling {
            admission: match self.admission {
                AdmissionArg::Reserve => AdmissionPolicy::Reserve,
                AdmissionArg::Utilize => AdmissionPolicy::Utilize,
            },
            max_running: self.max_running,
            max_waiting: self.max_waiting,
            chunk_tokens: self.max_batch_tokens,
            latency_target_us,
            batch_share: self.batch_share,
            ..Scheduling::default()
        })
    }
}

fn at_least_one(option: &str, value: usize) -> anyhow::Result<()> {
    match value {
        0 => bail!(WrongArguments(format!("{option} is 0: give at least 1"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        engine: EngineArgs,
    }

    #[test]
    fn what_is_out_of_range_is_told_by_its_option() {
        let refusal = |option: &str, value: &str| {
            let words = Words::parse_from(["serve", &format!("{option}={value}")]);
            words.engine.scheduling().err().map(|error| error.to_string())
        };
        for (option, value) in [
            ("--max-running", "0"),
            ("--max-batch-tokens", "0"),
            ("--batch-share", "1.5"),
            ("--batch-share", "NaN"),
            ("--latency-target-ms", "0"),
        ] {
            let text = refusal(option, value).expect(value);
            assert!(text.starts_with(&format!("{option} is {value}: give")), "{text}");
        }
        assert_eq!(refusal("--batch-share", "0.5"), None);
        assert_eq!(refusal("--max-waiting", "0"), None);
    }
}
