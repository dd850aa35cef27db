//! What hostile clients get, over real sockets from the real routes: a refusal, never a 5xx, never a hang, and
//! never what is another's.

mod bodies;
mod keys;
#[allow(dead_code, reason = "written for the tests of the accept loop; a part of it is used here")]
#[path = "../lifecycle/raw.rs"]
mod raw;
mod served;
#[allow(
    dead_code,
    unused_imports,
    reason = "written for the tests of the routes; a part of it is used here"
)]
#[path = "../system/support/mod.rs"]
mod support;
mod tenants;
mod tiny_model;
mod wire;
