//! Simulated worlds: the real pool, prefix cache and engine, under an executor whose output tells whose KV
//! it has read.
//!
//! - [`content`], [`pages`]: the fake model. It writes whose token a page holds in bits that every page
//!   format keeps, and makes each token's KV depend on all that it attended, as a real model does.
//! - [`reference`](mod@reference): the same without pages.
//! - [`bare`]: pools and prefix caches without an engine.
//!
//! Everything follows from a seed: same seed, same world, same end.

pub mod bare;
pub mod content;
pub mod pages;
pub mod random;
pub mod reference;
