//! Grammars, JSON schemas, expressions and choices become masks of tokens.
