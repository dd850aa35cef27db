//! KV events over ZMQ in vLLM's format.
