//! A model file becomes a function from tokens to logits.
//!
//! Chooses no pages and schedules nothing; writes K/V into the pages it is given.

pub mod arch;
pub mod chat_template;
pub mod gguf;
pub mod linear;
pub mod reference_attention;
pub mod rope;
pub mod runner;
pub mod spec;
pub mod tokenizer;
