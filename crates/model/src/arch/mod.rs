//! Architectures: one file is one wiring, read top to bottom. Qwen 2 is Llama's (see `llama.rs`).

pub mod gemma3;
pub mod llama;
pub mod masses;
pub mod parts;
pub mod pass;
pub mod qwen3;

use crate::gguf::Gguf;
use crate::runner::LoadError;
use crate::spec::{Architecture, ModelSpec};
use pass::Pass;

/// A loaded model: weights and their wiring.
pub trait Model: Send {
    /// Embedding, last norm and head.
    fn ends(&self) -> &parts::Ends;

    /// Runs the layers over the batch; leaves the hidden states in the pass's residual stream.
    fn forward(&self, pass: &mut Pass<'_>);
}

/// Loads the weights of `spec`'s architecture.
pub fn load(gguf: &Gguf, spec: &ModelSpec) -> Result<Box<dyn Model>, LoadError> {
    Ok(match spec.architecture {
        Architecture::Llama | Architecture::Qwen2 => Box::new(llama::Llama::load(gguf, spec)?),
        Architecture::Qwen3 => Box::new(qwen3::Qwen3::load(gguf, spec)?),
        Architecture::Gemma3 => Box::new(gemma3::Gemma3::load(gguf, spec)?),
    })
}
