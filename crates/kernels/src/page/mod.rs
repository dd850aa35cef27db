//! page/mod
