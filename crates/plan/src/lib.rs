//! What an engine would print about memory before it starts, and why.
//!
//! Closed-form answers for vLLM, SGLang, TensorRT-LLM, llama.cpp and Reef. Every number is a
//! [`figure::Figure`]: measured, derived or assumed. Behaviour that differs by engine version is data.
//! No I/O but reading the files it is given.
//!
//! - [`model::Model`] from [`source::read`]: what a model keeps and weighs.
//! - [`device`]: GPUs and links, with sources.
//! - [`engines`]: ledger, blocks, printed tokens, refusal, mends, per engine.
//! - [`score`]: predictions against a table of real start-up logs.
//! - [`ask`]: one question, one file. [`search`]: configurations against a goal.

pub mod ask;
pub mod config;
pub mod device;
pub mod dtype;
pub mod engines;
pub mod families;
pub mod figure;
pub mod fit;
pub mod gguf;
pub mod html;
pub mod log;
pub mod model;
pub mod parameters;
pub mod report;
pub mod score;
pub mod search;
pub mod source;
