//! The server as its clients see it, without a socket and without weights: the real routes over an engine
//! that says what a test wrote down.

mod clients;
mod completions;
mod generate;
mod openapi;
mod support;
mod telemetry;
mod tokens;
