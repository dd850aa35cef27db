//! attention/mod
