//! gguf/mod
