//! The request of `/v1/completions`.

use serde::Deserialize;

use super::StreamOptions;
use super::kv::KvFields;

/// The request of `/v1/completions`, without its [`SamplingFields`](super::sampling::SamplingFields).
#[derive(Clone, Debug, Deserialize)]
pub struct CompletionRequest {
    /// Which model.
    pub model: Option<String>,
    /// One or several texts, or token ids.
    pub prompt: Prompt,
    /// Tokens to generate at most; OpenAI's default is 16.
    pub max_tokens: Option<usize>,
    /// The answer comes in events.
    pub stream: Option<bool>,
    /// What a stream also tells.
    pub stream_options: Option<StreamOptions>,
    /// The answer begins with the prompt.
    pub echo: Option<bool>,
    /// Report each token's log-probability and so many alternatives.
    pub logprobs: Option<usize>,
    /// The same of the prompt (vLLM).
    pub prompt_logprobs: Option<usize>,
    /// Tokens in log-probabilities are named by id (vLLM).
    pub return_tokens_as_token_ids: Option<bool>,
    /// Text that follows; not supported.
    pub suffix: Option<String>,
    /// The model's BOS token goes before a text (vLLM).
    pub add_special_tokens: Option<bool>,
    /// Lower goes first (vLLM); `kv.priority` wins.
    pub priority: Option<i32>,
    /// Reef's own.
    pub kv: Option<KvFields>,
}

impl CompletionRequest {
    /// Nothing is to be generated: only the prompt is looked at.
    pub fn is_echo_only(&self) -> bool {
        self.max_tokens == Some(0) && self.echo.unwrap_or(false)
    }
}

/// One or several prompts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "want a text, token ids (whole numbers from 0), or a list of either")]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
    /// Texts.
    Texts(Vec<String>),
    /// Several times token ids.
    ManyIds(Vec<Vec<u32>>),
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnePrompt {
    /// A text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
}

impl Prompt {
    /// Each of them; `[]` is none.
    pub fn into_each(self) -> Vec<OnePrompt> {
        match self {
            Prompt::Text(text) => vec![OnePrompt::Text(text)],
            Prompt::Ids(ids) if ids.is_empty() => Vec::new(),
            Prompt::Ids(ids) => vec![OnePrompt::Ids(ids)],
            Prompt::Texts(texts) => texts.into_iter().map(OnePrompt::Text).collect(),
            Prompt::ManyIds(many) => many.into_iter().map(OnePrompt::Ids).collect(),
        }
    }
}
