//! Does a server of OpenAI's dialect hold? Many strict streaming clients in a part of the KV memory that they need,
//! some of whom leave early; then every answer, the server's memory and its pool are judged. Knows nothing of Reef
//! but its dialect, so that a peer gets the same traffic.

pub mod exchange;
pub mod fault;
pub mod fleet;
pub mod peer;
pub mod resident;
pub mod rest;
pub mod served;
pub mod sse;
pub mod traffic;
pub mod transcript;
pub mod wire;
