//! Which backend serves a request: candidates in, a selection or an error with every reason out.
//!
//! A pure function of request, policy, descriptors and device facts: opens nothing, touches no
//! device, has no I/O.

mod candidate;

pub use candidate::{Candidate, Source};
