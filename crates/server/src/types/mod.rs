//! What requests say: OpenAI's fields with vLLM's beside them. Every field may be missing or null, and what
//! is not known is ignored, because routers and clients add fields of their own.

pub mod chat;
pub mod completion;
pub mod conversation;
pub mod generate;
pub mod kv;
pub mod logprobs;
pub mod sampling;

use serde::Deserialize;

/// One of something, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "want one string, or a list of them")]
pub enum OneOrMany<T> {
    /// One.
    One(T),
    /// Several.
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    /// All of them.
    pub fn into_vec(self) -> Vec<T> {
        match self {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        }
    }
}

/// What a stream also tells.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct StreamOptions {
    /// A last chunk without choices tells the usage.
    pub include_usage: Option<bool>,
    /// Every chunk does.
    pub continuous_usage_stats: Option<bool>,
}

impl StreamOptions {
    /// Whether a last chunk tells the usage.
    pub fn includes_usage(self) -> bool {
        self.include_usage.unwrap_or(false)
    }

    /// Whether every chunk tells the usage.
    pub fn is_continuous(self) -> bool {
        self.includes_usage() && self.continuous_usage_stats.unwrap_or(false)
    }
}
