//! Arithmetic on plain slices: quantised matmul, paged attention over mixed formats, page encoding.
//!
//! Allocates nothing after start and knows no requests. Each SIMD path has a scalar twin.

pub mod attention;
pub mod dispatch;
pub mod logits;
pub mod matmul;
pub mod ops;
pub mod page;
pub mod pool;
pub mod rows;
pub mod scalar;
pub mod simd;
