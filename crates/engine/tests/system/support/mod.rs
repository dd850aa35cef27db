//! What the tests share: models, files of others, an f64 forward pass, ways to run a sequence.

#[allow(dead_code, reason = "written for the reader's tests; a part of it is used here")]
#[path = "../../../../model/tests/gguf/builder.rs"]
pub mod builder;
pub mod drive;
pub mod faulty;
pub mod files;
pub mod random;
pub mod reference;
pub mod tiny;
