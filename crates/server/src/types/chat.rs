//! The request of `/v1/chat/completions`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::StreamOptions;
use super::kv::KvFields;
use crate::error::ApiError;
use crate::tools::ToolFields;

/// The request of `/v1/chat/completions`, without its [`SamplingFields`](super::sampling::SamplingFields)
/// and [`StructureFields`](crate::grammar::StructureFields).
#[derive(Clone, Debug, Deserialize)]
pub struct ChatRequest {
    /// Which model.
    pub model: Option<String>,
    /// What was said; see [`conversation`](super::conversation).
    #[serde(default)]
    pub messages: Vec<Value>,
    /// Tokens to generate at most; what fits where missing.
    pub max_tokens: Option<usize>,
    /// The same by its new name, which wins.
    pub max_completion_tokens: Option<usize>,
    /// The answer comes in events.
    pub stream: Option<bool>,
    /// What a stream also tells.
    pub stream_options: Option<StreamOptions>,
    /// Report each token's log-probability.
    pub logprobs: Option<bool>,
    /// And so many alternatives.
    pub top_logprobs: Option<usize>,
    /// The same of the prompt (vLLM).
    pub prompt_logprobs: Option<usize>,
    /// Tokens in log-probabilities are named by id (vLLM).
    pub return_tokens_as_token_ids: Option<bool>,
    /// Tools that the model may call.
    pub tools: Option<Vec<Value>>,
    /// Whether it may or must.
    pub tool_choice: Option<Value>,
    /// `false`: one call at most.
    pub parallel_tool_calls: Option<bool>,
    /// End the prompt with the words that make the model answer; `true` where missing.
    pub add_generation_prompt: Option<bool>,
    /// The answer goes on with the last message (vLLM).
    pub continue_final_message: Option<bool>,
    /// The model's BOS token goes before what the template gives (vLLM); most templates have it already.
    pub add_special_tokens: Option<bool>,
    /// More variables for the template, such as `enable_thinking` (vLLM).
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Another template; not taken from requests.
    pub chat_template: Option<String>,
    /// Lower goes first (vLLM); `kv.priority` wins.
    pub priority: Option<i32>,
    /// Reef's own.
    pub kv: Option<KvFields>,
}

impl ChatRequest {
    /// Tokens to generate at most.
    ///
    /// # Errors
    /// None at all.
    pub fn most_tokens(&self) -> Result<Option<usize>, ApiError> {
        let (field, most) = match self.max_completion_tokens {
            Some(most) => ("max_completion_tokens", Some(most)),
            None => ("max_tokens", self.max_tokens),
        };
        match most {
            Some(0) => Err(ApiError::invalid(field, format!("{field} is 0: give at least 1"))),
            _ => Ok(most),
        }
    }

    /// Whether the prompt ends with the words that make the model answer, or within its last message.
    ///
    /// # Errors
    /// Both at once.
    pub fn ending(&self) -> Result<Ending, ApiError> {
        match (self.add_generation_prompt, self.continue_final_message.unwrap_or(false)) {
            (Some(true), true) => Err(ApiError::invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other: give one",
            )),
            (_, true) => Ok(Ending::FinalMessage),
            (Some(false), false) => Ok(Ending::Messages),
            _ => Ok(Ending::GenerationPrompt),
        }
    }

    /// The fields about tools.
    pub fn tool_fields(&self) -> ToolFields {
        ToolFields {
            tools: self.tools.clone(),
            tool_choice: self.tool_choice.clone(),
            parallel_tool_calls: self.parallel_tool_calls,
        }
    }

    /// Alternatives to report with each token; `None`: no log-probabilities.
    ///
    /// # Errors
    /// Alternatives without log-probabilities, or more than `most`.
    pub fn alternatives(&self, most: usize) -> Result<Option<usize>, ApiError> {
        let alternatives = self.top_logprobs.unwrap_or(0);
        super::sampling::at_most(alternatives, most, "top_logprobs", "alternatives")?;
        match self.logprobs.unwrap_or(false) {
            true => Ok(Some(alternatives)),
            false if alternatives == 0 => Ok(None),
            false => Err(ApiError::invalid(
                "top_logprobs",
                "top_logprobs goes with logprobs: set it to true, or leave top_logprobs out",
            )),
        }
    }
}

/// Where the prompt of a conversation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Behind the words that make the model answer.
    GenerationPrompt,
    /// Behind the last message.
    Messages,
    /// Within the last message: the answer goes on with it.
    FinalMessage,
}
