//! Which backend serves a request: candidates in, a selection or an error with every reason out.
//!
//! A pure function of request, policy, descriptors and device facts: opens nothing, touches no
//! device, has no I/O.

mod candidate;
mod change;
mod error;
mod explanation;
mod select;

pub use candidate::{Candidate, Source};
pub use change::{Change, Scope, smallest_changes};
pub use error::{Refused, SelectionError};
pub use explanation::{CandidateVerdict, Explanation};
pub use select::select;
