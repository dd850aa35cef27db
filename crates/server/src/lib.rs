//! Reef over HTTP: the OpenAI and vLLM dialects, metrics, KV events and a live page.
//!
//! One runtime thread serves; the engine is behind [`door::Door`], on a thread of its own. Requests go through
//! it as [`reef_engine::Request`]s and come back as events, which become responses, metrics and logs. Nothing
//! here decides about memory.

pub mod access;
pub mod app;
pub mod door;
pub mod error;
pub mod generation;
pub mod grammar;
mod guarded;
pub mod http;
pub mod kv_events;
pub mod lifecycle;
pub mod metrics;
pub mod page;
pub mod settings;
pub mod sizes;
pub mod sse;
pub mod telemetry;
pub mod tools;
pub mod types;
pub mod usage;

pub use app::{App, Model};
pub use settings::Settings;
