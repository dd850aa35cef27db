//! KV events: routers hear which prefixes this server has, over ZMQ in vLLM's format.
//!
//! A PUB socket sends messages of three frames: topic, number (u64, big-endian, from 0 without a gap) and
//! [batch](wire). A subscriber that misses some sees it in the numbers, and asks the ROUTER socket for
//! those from a number on: they are [kept](ring) for a while. Who asks for older ones gets, under the
//! latest number, one batch that clears and stores everything there is now.
//!
//! What is told is what an `exact` request could [begin with](advertised). Nothing here holds the engine
//! up: events wait in its cache until they are taken, within a bound beyond which everything is told anew.
//!
//! Subscribers see prompts' tokens, and ZMQ asks nobody for a key: endpoints are on the loopback unless
//! the operator says otherwise, and texts of tenants with a salt are told only when asked.

pub mod advertised;
mod endpoint;
mod publisher;
mod ring;
pub mod wire;

pub use endpoint::Endpoint;
pub use publisher::{BindError, KvPublisher};
pub use wire::EventFormat;

/// What to publish, and where.
#[derive(Clone, Debug)]
pub struct KvEventSettings {
    /// The PUB socket; port 0: any free one.
    pub endpoint: Endpoint,
    /// The ROUTER socket for replays; none without.
    pub replay: Option<Endpoint>,
    /// First frame of every message; llm-d wants `kv@POD@MODEL`.
    pub topic: String,
    /// How batches are encoded.
    pub format: EventFormat,
    /// Also what tenants with a salt have computed, their names in `extra_keys`.
    pub private: bool,
}
