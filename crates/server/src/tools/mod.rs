//! Calls of tools, out of what a model writes.
