//! From a listening socket to the last answer: accepting, limits, readiness, draining.
