//! reef-engine
