//! Cases of one attention call, their execution through the ABI, and their check against the
//! reference; here grows the suite that any plugin must pass.
//!
//! | module | owns |
//! |---|---|
//! | [`case`] | what one attention call is, and its file |
//! | [`mod@execute`] | a case run on a backend, over a shuffled paged cache |
//! | [`mod@check`] | what the reference says, and the comparison |
//! | [`generate`] | seeded random cases that cover a space of features pairwise |
//! | [`values`] | floats of one of the compute dtypes |
//! | [`rng`] | random numbers that never change with a dependency |
//! | [`suite`] | the checks that a backend must pass, and their report |
//! | [`stored`] | what a KV cache holds of a number |
//! | [`pool`] | threads to check with |
//!
//! Must not know: how a plugin is made, found or chosen; any kernel.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod case;
pub mod check;
pub mod execute;
pub mod generate;
pub mod pool;
pub mod rng;
pub mod stored;
pub mod suite;
pub mod values;

pub use case::{Case, CaseError, Mla, MlaForm, write_output};
pub use check::{CheckError, CheckReport, check, expected};
pub use execute::{ExecuteError, Output, execute};
pub use generate::Space;
pub use suite::{SuiteOptions, SuiteReport};
pub use values::Values;
