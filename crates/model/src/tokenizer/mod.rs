//! tokenizer/mod
