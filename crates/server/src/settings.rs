//! What a server is started with, besides its engine.

use reef_kv::Fidelity;

/// What a server is started with, besides its engine.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Ids under which the model is served, the first of them shown; at least one.
    pub model_names: Vec<String>,
    /// The contract of requests that name none, and the most that one may permit.
    pub fidelity: Fidelity,
    /// Bytes of a request's body at most.
    pub body_bytes_max: usize,
    /// Prompts in one request to `/v1/completions` at most.
    pub prompts_max: usize,
    /// Continuations (`n`, `best_of`, beams) of a prompt at most.
    pub branches_max: usize,
    /// Alternatives reported with a token (`logprobs`, `top_logprobs`) at most.
    pub logprobs_max: usize,
}

impl Settings {
    /// Serves under `model_name` with every other setting at its default.
    pub fn new(model_name: impl Into<String>) -> Settings {
        Settings {
            model_names: vec![model_name.into()],
            fidelity: Fidelity::Evict,
            body_bytes_max: 16 << 20,
            prompts_max: 256,
            branches_max: 64,
            logprobs_max: 20,
        }
    }
}
