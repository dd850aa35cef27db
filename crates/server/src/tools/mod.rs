//! Tools: what of a request the chat template shows, a grammar where a call is demanded, and calls out of
//! what a model writes.
//!
//! Own code, not the crate `tool-parser`: its parsers are asynchronous and come with a Python interpreter's
//! parser and an OpenAI protocol crate of its own, its events say nothing of where content ends, and it
//! makes no grammars; four syntaxes take 300 lines.

mod demand;
mod family;
mod fields;
mod reader;
mod scanner;
#[cfg(test)]
mod tests;

pub use family::Family;
pub use fields::{ToolFields, Tools};
pub use reader::{CallDelta, CallReader, Read};
