//! arch/mod
