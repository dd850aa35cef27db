//! Reef over HTTP: the OpenAI and vLLM dialects, metrics, KV events and a live page.
//!
//! One runtime thread serves; the engine is behind [`door::Door`], on a thread of its own. Requests go through
//! it as [`reef_engine::Request`]s and come back as events, which become responses, metrics and logs. Nothing
//! here decides about memory.

pub mod access;
pub mod grammar;
pub mod kv_events;
pub mod lifecycle;
pub mod metrics;
pub mod page;
pub mod tools;
