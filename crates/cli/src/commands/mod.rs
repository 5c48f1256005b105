//! One module a subcommand.

pub mod case;
pub mod explain;
pub mod list;
pub mod plan;
pub mod run;
