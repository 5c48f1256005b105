//! One module a subcommand.

pub mod case;
pub mod doctor;
pub mod explain;
pub mod list;
pub mod matrix;
pub mod plan;
pub mod run;
