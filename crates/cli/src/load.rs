//! From a `MODEL` argument to a runner, with the options that every computing command has.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use reef_kernels::dispatch::Tier;
use reef_kv::page::PageFormat;
use reef_model::gguf::Gguf;
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};

use crate::output::{WrongArguments, note};
use crate::{profiles, pull};

/// Tokens of a KV block unless `--block-size` says otherwise.
pub const BLOCK_SIZE: usize = 32;

/// The model and how to compute with it.
#[derive(clap::Args, Clone, Debug)]
pub struct ModelArgs {
    /// A GGUF file, or an alias known to `reef pull` (fetched if it is not in the cache)
    #[arg(default_value = "smollm2")]
    pub model: String,
    /// Fetch nothing
    #[arg(long)]
    offline: bool,
    /// Precision of the activations that meet quantised weights [default: int8, the fast path; f32 for
    /// measures of KV memory, so that they show the cache alone]
    #[arg(long, value_enum)]
    activations: Option<ActivationsArg>,
    /// Turn keys by a Hadamard matrix when they are written, queries to match; auto: as measured best
    /// for the model (see `reef pull`), none while that is unknown
    #[arg(long, value_enum, default_value_t = KeyRotationArg::Auto)]
    key_rotation: KeyRotationArg,
    /// Tokens of a KV block
    #[arg(long, value_name = "16|32|64|128", default_value_t = BLOCK_SIZE, value_parser = parse_block_size)]
    pub block_size: usize,
}

/// Values of `--activations`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ActivationsArg {
    /// 8-bit codes
    Int8,
    /// 32-bit floats
    F32,
}

/// Values of `--key-rotation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KeyRotationArg {
    /// What the model's profile says
    Auto,
    /// As the rope left them
    None,
    /// Normalized Walsh-Hadamard matrix of each head
    Hadamard,
}

fn parse_block_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size @ (16 | 32 | 64 | 128)) => Ok(size),
        _ => Err("want 16, 32, 64 or 128".into()),
    }
}

/// Reads a KV format's name.
pub fn parse_kv_format(text: &str) -> Result<PageFormat, String> {
    let found = PageFormat::ALL.into_iter().find(|format| format.name() == text);
    found.ok_or_else(|| {
        let names = PageFormat::ALL.map(PageFormat::name);
        format!("want one of {}", names.join(", "))
    })
}

impl ModelArgs {
    /// Path of the model file, fetched if need be.
    pub fn path(&self) -> anyhow::Result<PathBuf> {
        pull::resolve_model(&self.model, self.offline)
    }

    /// Whether nothing may be fetched.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// Whether keys are rotated as the model's profile says.
    pub fn rotation_is_auto(&self) -> bool {
        matches!(self.key_rotation, KeyRotationArg::Auto)
    }

    /// Loads the weights, to compute with 8-bit activations unless asked otherwise.
    pub fn runner(&self, gguf: &Gguf, threads: usize) -> anyhow::Result<ModelRunner> {
        self.load(gguf, threads, ActivationsArg::Int8)
    }

    /// Loads the weights to measure KV memory: with activations in f32 unless asked otherwise, because the
    /// least change of the cache moves the rounding of 8-bit ones, and that would drown what is measured.
    pub fn measuring_runner(&self, gguf: &Gguf, threads: usize) -> anyhow::Result<ModelRunner> {
        self.load(gguf, threads, ActivationsArg::F32)
    }

    fn load(
        &self,
        gguf: &Gguf,
        threads: usize,
        activations: ActivationsArg,
    ) -> anyhow::Result<ModelRunner> {
        let activations = match self.activations.unwrap_or(activations) {
            ActivationsArg::Int8 => Activations::Int8,
            ActivationsArg::F32 => Activations::F32,
        };
        let options = RunnerOptions {
            threads,
            tier: cpu_tier()?,
            activations,
            block_size: self.block_size,
            key_rotation: match self.key_rotation {
                KeyRotationArg::Auto => {
                    profiles::known(gguf).map_or(KeyRotation::None, |profile| profile.key_rotation)
                }
                KeyRotationArg::None => KeyRotation::None,
                KeyRotationArg::Hadamard => KeyRotation::Hadamard,
            },
        };
        Ok(ModelRunner::load(gguf, options)?)
    }
}

/// Loads the weights of `gguf` with the defaults of every option.
pub fn default_runner(gguf: &Gguf, threads: usize) -> anyhow::Result<ModelRunner> {
    let options = RunnerOptions {
        threads,
        tier: cpu_tier()?,
        activations: Activations::Int8,
        block_size: BLOCK_SIZE,
        key_rotation: KeyRotation::None,
    };
    Ok(ModelRunner::load(gguf, options)?)
}

/// Opens a model file.
pub fn open(path: &Path) -> anyhow::Result<Gguf> {
    Ok(Gguf::open(path)?)
}

/// The CPU tier: the best of this CPU, or what `REEF_CPU_TIER` asks for. Says so where it is slow.
pub fn cpu_tier() -> anyhow::Result<Tier> {
    let best = Tier::detect();
    let tier = match std::env::var("REEF_CPU_TIER") {
        Err(_) => best,
        Ok(name) => {
            let available = Tier::available();
            let found = available.iter().find(|tier| tier.name() == name).copied();
            found.ok_or_else(|| {
                let names: Vec<&str> = available.iter().map(|tier| tier.name()).collect();
                let names = names.join(", ");
                WrongArguments(format!("REEF_CPU_TIER is `{name}`: this CPU has {names}"))
            })?
        }
    };
    if tier == Tier::Scalar {
        note(
            "warning: no SIMD kernels for this CPU; computing with plain loops, expect it to be slow",
        );
    }
    Ok(tier)
}
