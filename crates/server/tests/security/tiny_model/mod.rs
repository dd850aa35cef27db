//! What the engine's tests build their tiny models with.

#[allow(dead_code, reason = "written for the reader's tests; a part of it is used here")]
#[path = "../../../../model/tests/gguf/builder.rs"]
pub mod builder;
#[allow(dead_code, reason = "written for the engine's tests; a part of it is used here")]
#[path = "../../../../engine/tests/system/support/random.rs"]
pub mod random;
#[allow(dead_code, reason = "written for the engine's tests; a part of it is used here")]
#[path = "../../../../engine/tests/system/support/tiny.rs"]
pub mod tiny;
