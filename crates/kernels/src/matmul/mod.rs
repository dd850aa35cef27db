//! matmul/mod
