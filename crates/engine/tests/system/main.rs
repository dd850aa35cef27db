//! The whole chain, from a model file to tokens and their likelihood, in a budget of KV memory: each
//! test runs the public interfaces of the engine as `reef run` and `reef eval` do.
//!
//! Tiny models are written by the tests themselves and compared with a plain f64 forward pass.
//! SmolLM2 and Gemma 3 are looked for where `reef pull` puts them; what needs them says so on stderr
//! and is skipped where they are absent (`cargo xtask test` fetches them first).

mod architectures;
mod behaviours;
mod bits;
mod contracts;
mod evaluation;
mod generation;
mod golden;
mod ladder;
mod likelihood;
mod many;
mod observation;
mod page_bytes;
mod profile;
mod refusals;
mod rotation;
mod scenarios;
mod serving;
mod speculation;
mod streaming;
mod support;
mod threaded;
mod windows;
