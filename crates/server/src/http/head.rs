//! What OpenAI's answers have in common, whole and streamed: who they are, and what their client wants told.

use reef_engine::Usage;
use serde_json::{Value, json};

use super::respond::new_id;
use crate::app::{App, unix_time};
use crate::types::StreamOptions;
use crate::types::kv::KvFields;
use crate::usage::usage_document;

/// Who an answer is, and what its client wants told.
pub struct Head {
    /// Its id, which no other answer has.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// A stream's last chunk tells the usage.
    pub stream_usage: bool,
    /// All of its chunks do.
    pub continuous_usage: bool,
    /// A stream's comments tell when the request stands still.
    pub comments: bool,
}

impl Head {
    /// The head of a new answer, whose id begins with `prefix`, to prompts of `prompt_tokens` tokens.
    pub fn new(
        app: &App,
        prefix: &str,
        prompt_tokens: usize,
        stream: Option<StreamOptions>,
        kv: Option<&KvFields>,
    ) -> Head {
        let stream = stream.unwrap_or_default();
        Head {
            id: new_id(prefix),
            created: unix_time(),
            model: app.model_name().into(),
            prompt_tokens,
            stream_usage: stream.includes_usage(),
            continuous_usage: stream.is_continuous(),
            comments: kv.and_then(|kv| kv.comments).unwrap_or(false),
        }
    }

    /// The document of an answer that is not streamed. `taken`: as in [`usage_document`].
    pub fn document(&self, object: &str, choices: Vec<Value>, taken: &[(Usage, usize)]) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage_document(taken),
        })
    }

    /// The usage as far as it is known while a stream goes on.
    pub fn usage_so_far(&self, completion_tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        })
    }
}
