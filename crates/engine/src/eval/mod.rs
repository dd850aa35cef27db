//! What a treatment of KV memory costs: measures and their statistics, for `reef eval`.
//!
//! Every measure is exact about what is scored: both sides of a comparison score the same tokens, the
//! first token of a window is not scored, and a question is asked after what it asks about was
//! compressed.

pub mod comparison;
pub mod descent;
pub(crate) mod divergence;
pub mod h2o_reference;
pub mod lanes;
pub mod re_encoded;
pub mod recall;
pub mod statistics;
pub mod stream;
pub mod treatment;

pub use comparison::Comparison;
pub use lanes::Lanes;
pub use statistics::Interval;
pub use treatment::{Eviction, Treatment};
