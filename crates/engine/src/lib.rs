//! What happens each step: who is let in, what is computed, what gives way, which tokens come of it; and
//! teacher-forced scoring over the same pages for `eval`.
//!
//! [`Engine::turn`] reads no clock, does no I/O and never waits: same inputs, same outputs. Threads, files
//! and clocks stand in [`executor`], [`store`], [`handle`] and [`generate`].

pub mod admission;
mod admit;
pub mod beam;
mod beams;
mod branches;
pub mod config;
pub mod constraint;
mod cost;
pub mod engine;
pub mod eval;
pub mod event;
pub mod executor;
pub mod generate;
pub mod handle;
mod late;
mod lifecycle;
pub mod logits;
#[cfg(feature = "mutants")]
pub mod mutant;
mod observe;
pub mod pool_view;
mod preempt;
pub mod profile;
pub mod recent;
pub mod request;
mod room;
mod run;
pub mod sampler;
mod schedule;
pub mod score;
pub mod session;
mod settle;
pub mod speculate;
pub mod stats;
pub mod stop;
pub mod store;
pub mod tally;
pub mod tenant;
pub mod wakeup;
mod watchdog;

pub use admission::Refusal;
pub use config::{AdmissionPolicy, EngineConfig, PrefixSettings, Scheduling};
pub use engine::{Engine, PrefixListener, Progress};
pub use event::{Event, FinishReason, Outcome, Told, Usage};
pub use generate::Generation;
pub use handle::EngineHandle;
pub use pool_view::{PoolView, Probe};
pub use request::{Branches, Request};
pub use sampler::Sampling;
pub use session::{EngineError, Rules};
pub use tenant::Tenant;
