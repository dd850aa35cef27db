//! Where routers hear what the prefix cache holds.

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use reef_engine::Engine;
use reef_server::kv_events::{Endpoint, EventFormat, KvEventSettings, KvPublisher};

use crate::output::{WrongArguments, note};

/// KV events.
#[derive(clap::Args, Clone, Debug)]
pub struct KvEventArgs {
    /// Tell routers over ZMQ, as vLLM does, which prefixes are cached: tcp://HOST:PORT. Subscribers see the
    /// prompts' tokens and need no key
    #[arg(long = "kv-events", value_name = "ENDPOINT", env = "REEF_KV_EVENTS")]
    endpoint: Option<Endpoint>,
    /// Where subscribers that have missed some ask for past ones: tcp://HOST:PORT
    #[arg(long = "kv-events-replay", value_name = "ENDPOINT", requires = "endpoint")]
    replay: Option<Endpoint>,
    /// First frame of every message; llm-d wants kv@POD@MODEL
    #[arg(
        long = "kv-events-topic",
        value_name = "TOPIC",
        default_value = "",
        requires = "endpoint"
    )]
    topic: String,
    /// How KV events are encoded
    #[arg(long = "kv-event-format", value_enum, default_value_t = FormatArg::Map, requires = "endpoint")]
    format: FormatArg,
    /// Also tell what tenants with a salt have computed, marked with their names
    #[arg(long = "kv-events-private", requires = "endpoint")]
    private: bool,
}

/// Values of `--kv-event-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FormatArg {
    /// As vLLM 0.26 and later
    Map,
    /// As vLLM before 0.26
    Array,
}

impl KvEventArgs {
    /// Refuses endpoints that other machines can reach, unless `insecure`: ZMQ asks nobody for a key.
    ///
    /// # Errors
    /// Such an endpoint.
    pub fn check(&self, insecure: bool) -> anyhow::Result<()> {
        let named = [("--kv-events", self.endpoint), ("--kv-events-replay", self.replay)];
        for (flag, endpoint) in named {
            if let Some(endpoint) = endpoint.filter(|at| !insecure && !at.is_loopback()) {
                bail!(WrongArguments(format!(
                    "{flag} {endpoint}: others would read the prompts' tokens without a key: use \
                     tcp://127.0.0.1:PORT, or --insecure where something else guards the port"
                )));
            }
        }
        Ok(())
    }

    /// Publishes what the prefix cache of `engine` holds, until the answer is dropped; nothing where it was
    /// not asked for.
    ///
    /// # Errors
    /// An endpoint that cannot be had.
    pub fn attach(&self, engine: &mut Engine) -> anyhow::Result<Option<KvPublisher>> {
        let Some(endpoint) = self.endpoint else { return Ok(None) };
        let settings = KvEventSettings {
            endpoint,
            replay: self.replay,
            topic: self.topic.clone(),
            format: match self.format {
                FormatArg::Map => EventFormat::Map,
                FormatArg::Array => EventFormat::Array,
            },
            private: self.private,
        };
        let publisher = KvPublisher::attach(&settings, engine).context("--kv-events")?;
        let replay = publisher.replay_endpoint();
        let replay = replay.map(|at| format!(", replays at {at}")).unwrap_or_default();
        note(&format!("KV events at {}{replay}", publisher.endpoint()));
        Ok(Some(publisher))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_hears_of_prompts_unless_asked() {
        let args = |endpoint: &str, replay: Option<&str>| KvEventArgs {
            endpoint: Some(endpoint.parse().unwrap()),
            replay: replay.map(|at| at.parse().unwrap()),
            topic: String::new(),
            format: FormatArg::Map,
            private: false,
        };
        let (near, far) = ("tcp://127.0.0.1:5557", "tcp://*:5557");
        args(near, Some(near)).check(false).unwrap();
        args(far, Some(far)).check(true).unwrap();
        let error = args(far, None).check(false).unwrap_err().to_string();
        assert!(error.contains("--kv-events tcp://0.0.0.0:5557"), "{error}");
        let error = args(near, Some(far)).check(false).unwrap_err().to_string();
        assert!(error.contains("--kv-events-replay") && error.contains("--insecure"), "{error}");
    }
}
