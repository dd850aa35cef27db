//! Who holds which bytes of KV memory, and what gives way when it runs short.
//!
//! Does no I/O, reads no clock, spawns no thread, knows no model and no arithmetic.

pub mod page;
