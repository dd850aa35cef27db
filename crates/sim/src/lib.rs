//! Simulated worlds: the real pool, prefix cache and engine, under an executor whose output tells whose KV
//! it has read.
//!
//! - [`content`], [`pages`]: the fake model. It writes whose token a page holds in bits that every page
//!   format keeps, and makes each token's KV depend on all that it attended, as a real model does.
//! - [`reference`](mod@reference): the same without pages.
//! - [`bare`]: pools and prefix caches without an engine.
//! - [`world`]: what a seed stands for: model, pool, engine, who comes when, what goes wrong.
//! - [`run`](mod@run): a world from its beginning to its end over [`executor`] and [`spill`], every invariant
//!   checked each turn, every exact request compared with itself [`alone`](setup::alone).
//! - [`campaign`](mod@campaign), [`coverage`], [`shrink`](mod@shrink): many worlds, what they met, the smallest that fails.
//!
//! Everything follows from a seed: same seed, same world, same end.

pub mod bare;
pub mod campaign;
pub mod content;
pub mod coverage;
pub mod executor;
pub mod fault;
pub mod grammar;
pub mod life;
pub mod oracle;
pub mod pages;
pub mod random;
pub mod reference;
pub mod run;
pub mod setup;
pub mod shrink;
pub mod spill;
pub mod world;
