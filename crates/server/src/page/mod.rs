//! The live page at `/`.
