//! A model file becomes a function from tokens to logits.
//!
//! Chooses no pages and schedules nothing; writes K/V into the pages it is given.

#[cfg(any())]
pub mod arch;
pub mod chat_template;
pub mod gguf;
#[cfg(any())]
pub mod linear;
#[cfg(any())]
pub mod rope;
#[cfg(any())]
pub mod runner;
#[cfg(any())]
pub mod spec;
pub mod tokenizer;
