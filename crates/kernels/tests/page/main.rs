//! Page encoding: tiers agree with the scalar specification, and both with plain arithmetic.

mod distinct;
mod error;
mod fp8;
mod ladder;
mod pages;
mod write;
