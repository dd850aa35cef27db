//! The accept loop over real sockets: limits, slow clients, panics, draining. The router is a toy.

mod bounds;
mod ending;
mod raw;
mod slow;
mod toy;
