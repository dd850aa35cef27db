//! What happens each step: chunked prefill, relief, decode, sampling; and teacher-forced scoring over
//! the same pages for `eval`.
//!
//! Reads no clock and does no I/O: same inputs, same outputs.

pub mod admission;
pub mod constraint;
pub mod eval;
pub mod executor;
pub mod logits;
mod observe;
pub mod profile;
pub mod request;
pub mod sampler;
pub mod score;
pub mod session;
pub mod speculate;
pub mod step;
pub mod stop;

pub use admission::Refusal;
pub use request::{Event, FinishReason, Generation, Request, Usage};
pub use sampler::Sampling;
pub use session::{EngineError, Rules};
pub use step::{Engine, EngineConfig};
