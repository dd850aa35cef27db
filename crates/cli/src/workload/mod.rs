//! `reef bench --workload`: what many requests at once experience, through the engine that serves them.

mod copying;
mod drive;
mod interactive;
mod pressure;
mod shared_prompt;

use clap::ValueEnum;
use reef_engine::{Engine, EngineConfig, Request, Sampling};
use reef_kv::Fidelity;
use reef_model::gguf::Gguf;
use serde_json::{Value, json};

use crate::load::{ModelArgs, open};
use crate::output::{print_json, print_line};
use crate::profiles;

/// A measurement with many requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    /// 64 requests in a quarter of the KV they need: exact, int4, and the ideal without pressure
    Pressure,
    /// Time to the first token of a second request with the same long prompt
    SharedPrompt,
    /// Speed on text that repeats itself, with and without drafts
    Copying,
    /// Time to the first token of interactive requests beside a flood of batch work
    Interactive,
    /// Gaps between tokens of running streams while a long prompt is computed
    PrefillGap,
}

/// As a server does at its start.
const CALIBRATION: std::time::Duration = std::time::Duration::from_millis(500);

/// The model that everything is measured with.
pub struct Setting {
    gguf: Gguf,
    model: ModelArgs,
    threads: usize,
}

impl Setting {
    /// An engine with `budget_bytes` of KV memory, as `change` configures it.
    fn engine(
        &self,
        budget_bytes: usize,
        change: impl FnOnce(&mut EngineConfig),
    ) -> anyhow::Result<Engine> {
        let runner = self.model.runner(&self.gguf, self.threads)?;
        let mut config = EngineConfig::new(budget_bytes);
        config.block_size = self.model.block_size;
        config.ladder.four_bit_keys =
            profiles::known(&self.gguf).is_some_and(|profile| profile.four_bit_keys);
        config.calibration = CALIBRATION;
        // Else the first use of each page of the pool would be part of what is measured.
        config.prefault = true;
        change(&mut config);
        Ok(Engine::new(runner, config)?)
    }

    /// Bytes of `tokens` tokens at f16.
    fn bytes(&self, tokens: usize) -> anyhow::Result<usize> {
        let spec = reef_model::spec::ModelSpec::from_gguf(&self.gguf)?;
        let format = reef_kv::page::PageFormat::F16;
        Ok((spec.bytes_per_token(format, self.model.block_size) * tokens as f64) as usize)
    }
}

/// A request of random tokens, different for each `seed`, that generates `generated` tokens.
fn request(seed: u64, prompt: usize, generated: usize, fidelity: Fidelity) -> Request {
    let token = |position: u64| {
        let mixed = (seed << 32 | position).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        1000 + (mixed >> 40) as u32 % 20_000
    };
    Request {
        max_tokens: Some(generated),
        sampling: Sampling::default(),
        ..Request::new((0..prompt as u64).map(token).collect(), fidelity)
    }
}

/// Percentile `percent` of `values`, which are sorted.
fn percentile(values: &mut [f64], percent: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    values.get((last * percent / 100.0).round() as usize).copied().unwrap_or(f64::NAN)
}

/// Runs `reef bench --workload`.
pub fn run(
    workload: Workload,
    model: &ModelArgs,
    threads: usize,
    repetitions: usize,
    as_json: bool,
) -> anyhow::Result<()> {
    let gguf = open(&model.path()?)?;
    let setting = Setting { gguf, model: model.clone(), threads };
    let mut runs = Vec::new();
    for _ in 0..repetitions {
        let found = match workload {
            Workload::Pressure => pressure::measure(&setting)?,
            Workload::SharedPrompt => shared_prompt::measure(&setting)?,
            Workload::Copying => copying::measure(&setting)?,
            Workload::Interactive => interactive::measure(&setting)?,
            Workload::PrefillGap => interactive::measure_gap(&setting)?,
        };
        if !as_json {
            print_line(&found.to_string())?;
        }
        runs.push(found);
    }
    let medians = medians(&runs);
    let name = workload.to_possible_value().map(|value| value.get_name().to_string());
    match as_json {
        true => print_json(&json!({ "workload": name, "runs": runs, "medians": medians })),
        false => print_line(&format!("medians: {medians}")),
    }
}

/// The median of each number.
fn medians(runs: &[Value]) -> Value {
    let Some(Value::Object(first)) = runs.first() else { return Value::Null };
    let median = |key: &String| {
        let mut values: Vec<f64> = runs.iter().filter_map(|run| run[key].as_f64()).collect();
        (key.clone(), json!(percentile(&mut values, 50.0)))
    };
    Value::Object(first.keys().map(median).collect())
}
