//! The server as its clients see it, without a socket: the real routes over an engine that says what a test
//! wrote down. A few ask SmolLM2, and are skipped where it is not in the cache.

mod chat;
mod clients;
mod completions;
mod ends;
mod generate;
mod openapi;
mod smollm2;
mod support;
mod telemetry;
mod tokens;
