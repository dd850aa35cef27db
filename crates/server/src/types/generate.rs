//! The request of `/inference/v1/generate`: vLLM's door for token ids.

use serde::Deserialize;

use super::StreamOptions;
use super::kv::KvFields;
use super::sampling::SamplingFields;

/// Token ids in, token ids out.
#[derive(Clone, Debug, Deserialize)]
pub struct GenerateRequest {
    /// Told again in the answer.
    pub request_id: Option<String>,
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// vLLM's `SamplingParams`.
    pub sampling_params: Option<GenerateSampling>,
    /// Which model.
    pub model: Option<String>,
    /// The answer comes in events.
    pub stream: Option<bool>,
    /// What a stream also tells.
    pub stream_options: Option<StreamOptions>,
    /// Lower goes first (vLLM); `kv.priority` wins.
    pub priority: Option<i32>,
    /// Reef's own.
    pub kv: Option<KvFields>,
}

/// vLLM's `SamplingParams`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct GenerateSampling {
    /// Tokens to generate at most; vLLM's default is 16.
    pub max_tokens: Option<usize>,
    /// Report each token's log-probability and so many alternatives.
    pub logprobs: Option<usize>,
    /// The same of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// How tokens are chosen and when text ends.
    #[serde(flatten)]
    pub fields: SamplingFields,
}
