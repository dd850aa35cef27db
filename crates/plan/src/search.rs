//! Configurations against traffic and latency goals.
