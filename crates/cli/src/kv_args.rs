//! What `run` may do with KV memory: the options that every generating command has.

use anyhow::{Context as _, bail};
use reef_engine::admission::Refusal;
use reef_engine::session::Rules;
use reef_engine::{EngineConfig, PrefixSettings};
use reef_kv::page::PageFormat;
use reef_kv::policy::{self, PolicyOptions};
use reef_kv::{Fidelity, Ladder, Rung, TAIL_TOKENS};
use reef_model::gguf::Gguf;
use reef_model::runner::ModelRunner;

use crate::load::{ModelArgs, parse_kv_format};
use crate::output::{WrongArguments, note};
use crate::{memory, profiles, sizes};

/// Rungs that always stand before or behind those of a ladder: what they are used for is estimated each
/// time, not chosen.
const SERVING_RUNGS: [&str; 4] = ["drop_prefix", "swap", "recompute", "wait"];

/// KV memory: how much, and how it gives way.
#[derive(clap::Args, Clone, Debug)]
pub struct KvArgs {
    /// KV memory, such as 24MiB [default: what the trained context needs, at most half of what is free]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    kv_memory: Option<u64>,
    /// What may be done to the KV memory: exact, int8, int4 or evict; each permits those before it [default:
    /// evict, of serve int4]
    #[arg(long, value_name = "CONTRACT")]
    fidelity: Option<Fidelity>,
    /// Format of every sealed block from the start
    #[arg(long, value_name = "FORMAT", default_value = "f16", value_parser = parse_kv_format)]
    kv_format: PageFormat,
    /// What gives way, in this order: a list of int8, k8v4, int4 and evict, or none
    #[arg(long, value_name = "LIST", value_parser = parse_ladder)]
    ladder: Option<Ladder>,
    /// Which blocks are dropped first: sinks, window, h2o, tova, keydiff or random [default: sinks]
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Layers whose KV stays f16 whatever happens, such as 0,1,29
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pin_layers: Vec<usize>,
    /// Commit all KV memory at start
    #[arg(long)]
    prefault: bool,
}

fn parse_ladder(list: &str) -> Result<Ladder, String> {
    if let Some(rung) =
        SERVING_RUNGS.iter().find(|rung| list.split(',').any(|n| n.trim() == **rung))
    {
        let names = Rung::ALL.map(Rung::name).join(", ");
        return Err(format!(
            "`{rung}` is not chosen here: unused prefixes go first, and who has to stand still waits, is \
             swapped (--spill) or computed again, whichever costs least; use {names}"
        ));
    }
    Ladder::parse(list).map_err(|error| error.to_string())
}

impl KvArgs {
    /// The contract.
    pub fn fidelity(&self) -> Fidelity {
        self.fidelity.unwrap_or(Fidelity::Evict)
    }

    /// Takes `fidelity` for the contract where none was asked for.
    pub fn set_default_fidelity(&mut self, fidelity: Fidelity) {
        self.fidelity.get_or_insert(fidelity);
    }

    /// Refuses what does not go together, before anything is loaded.
    pub fn check(&self) -> anyhow::Result<()> {
        if !self.fidelity().permits_format(self.kv_format) {
            let format = self.kv_format.name();
            let wanted = Fidelity::ALL.into_iter().find(|f| f.permits_format(self.kv_format));
            bail!(WrongArguments(format!(
                "--kv-format {format} goes not with --fidelity {}: permit {} or keep f16",
                self.fidelity().name(),
                wanted.map_or("evict", Fidelity::name),
            )));
        }
        if let Some(ignored) = self.ignored_policy() {
            note(&ignored);
        }
        self.policy().map(drop)
    }

    /// What to say of a policy that never gets to choose.
    fn ignored_policy(&self) -> Option<String> {
        let policy = self.policy.as_ref()?;
        let ladder = self.ladder.clone().unwrap_or_default();
        let what = match self.fidelity().permits(Rung::Evict) {
            true if ladder.permits(self.fidelity(), Rung::Evict) => return None,
            true => "this --ladder".to_string(),
            false => format!("--fidelity {}", self.fidelity().name()),
        };
        Some(format!("--policy {policy} has no effect: {what} drops nothing (evict would)"))
    }

    fn policy(&self) -> anyhow::Result<Box<dyn policy::EvictionPolicy>> {
        let options = PolicyOptions { tail_tokens: TAIL_TOKENS, ..PolicyOptions::default() };
        let name = self.policy.as_deref().unwrap_or(policy::NAMES[0]);
        policy::by_name(name, &options).map_err(|error| WrongArguments(error.to_string()).into())
    }

    /// The engine's configuration for the model in `gguf`, loaded as `runner`. `tokens`: what a request
    /// will hold at most, if that is known. A profile measured on the way decides the runner's rotation
    /// of keys, as it will for later runs.
    pub fn engine_config(
        &self,
        gguf: &Gguf,
        runner: &mut ModelRunner,
        model: &ModelArgs,
        tokens: Option<usize>,
    ) -> anyhow::Result<EngineConfig> {
        let block_size = model.block_size;
        let spec = runner.spec();
        let layers = spec.layers;
        if let Some(&layer) = self.pin_layers.iter().find(|layer| **layer >= layers) {
            bail!(WrongArguments(Refusal::PinnedLayer { layer, layers }.to_string()));
        }
        let context = spec.trained_context;
        let per_token = spec.bytes_per_token(PageFormat::F16, block_size);
        // A twentieth more than the context's pages: tables, the reserve, and spans partly filled.
        let context_bytes = (context as f64 * per_token * 1.05) as u64 + (4 << 20);
        let budget = memory::kv_budget(self.kv_memory, context_bytes, gguf.file_size() as u64)?;
        if self.kv_memory.is_none() {
            note(&format!("KV memory: {} (--kv-memory changes it)", sizes::display(budget)));
        }
        let ladder = self.ladder_for(gguf, runner, model, (tokens.unwrap_or(context), budget))?;
        let rules =
            Rules { policy: self.policy()?, format_at_seal: self.kv_format, ..Rules::default() };
        Ok(EngineConfig {
            budget_bytes: usize::try_from(budget).context("--kv-memory is too large")?,
            prefault: self.prefault,
            block_size,
            rules,
            ladder,
            pinned_layers: self.pin_layers.clone(),
            prefix: Some(PrefixSettings {
                fingerprint: profiles::fingerprint(gguf),
                rotation: runner.key_rotation().name().into(),
                ..PrefixSettings::default()
            }),
            ..EngineConfig::new(0)
        })
    }

    /// The ladder asked for, with what is known of the model. Whether its keys bear 4 bits is measured
    /// now if it is unknown and may matter: where `tokens` do not fit `budget` bytes with 8-bit keys.
    fn ladder_for(
        &self,
        gguf: &Gguf,
        runner: &mut ModelRunner,
        model: &ModelArgs,
        (tokens, budget): (usize, u64),
    ) -> anyhow::Result<Ladder> {
        let block_size = model.block_size;
        let asked = self.ladder.clone().unwrap_or_default();
        let with_8_bit_keys =
            runner.spec().bytes_per_token(PageFormat::K8V4, block_size) * tokens as f64;
        let matters = asked.permits(self.fidelity(), Rung::Int4) && with_8_bit_keys > budget as f64;
        let profile = match matters {
            true => profiles::known_or_measured(gguf, runner, block_size)?,
            false => profiles::known(gguf),
        };
        // The harm and the guard of keys hold under this rotation.
        if let Some(profile) = profile.filter(|_| model.rotation_is_auto()) {
            runner.set_key_rotation(profile.key_rotation);
        }
        let unknown = Ladder { four_bit_keys: false, ..Ladder::default() };
        let measured = profile.map_or(unknown, |profile| profile.ladder());
        Ok(Ladder { rungs: asked.rungs, ..measured })
    }
}

#[cfg(test)]
mod tests {
    use super::{KvArgs, parse_ladder};
    use clap::Parser as _;
    use reef_kv::Rung;

    #[derive(clap::Parser)]
    struct Options {
        #[command(flatten)]
        kv: KvArgs,
    }

    #[test]
    fn a_policy_that_never_gets_to_choose_is_said_so() {
        let said = |options: &str| {
            let words = ["reef"].into_iter().chain(options.split_whitespace());
            Options::try_parse_from(words).unwrap().kv.ignored_policy()
        };
        assert_eq!(said("--policy h2o"), None);
        assert_eq!(said("--fidelity exact"), None);
        assert!(said("--policy h2o --fidelity int4").unwrap().contains("--fidelity int4 drops"));
        assert!(said("--policy h2o --ladder int8").unwrap().contains("--ladder drops"));
        let kv = Options::try_parse_from(["reef"]).unwrap().kv;
        assert_eq!(kv.policy().unwrap().name(), "sinks");
    }

    #[test]
    fn rungs_of_serving_are_refused_by_name() {
        assert_eq!(parse_ladder("int8,evict").unwrap().rungs, [Rung::Int8, Rung::Evict]);
        assert!(parse_ladder("int8,swap").unwrap_err().contains("`swap` is not chosen here"));
        assert!(parse_ladder("int9").unwrap_err().contains("int8, k8v4, int4 and evict"));
    }
}
