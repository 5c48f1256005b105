//! `attache`: which attention backend each layer gets, why, and text that proves it.
//!
//! | module | owns |
//! |---|---|
//! | `arguments` | flags and subcommands |
//! | `commands` | one module a subcommand |
//! | `exit` | errors as lines and exit codes |
//! | `output` | tables, JSON, colours |
//! | `setup` | configuration and registry from flags |

mod arguments;
mod commands;
mod exit;
mod output;
mod setup;

// The one place that refers to the linked-in plugins: without it the linker drops them.
#[cfg(feature = "linked-plugins")]
use {attache_plugin_cpu as _, attache_plugin_mla as _};

use arguments::{Arguments, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let is_help = !error.use_stderr();
            // Help and version are not errors; nothing can be done about a closed terminal.
            let _ = error.print();
            return if is_help { ExitCode::SUCCESS } else { exit::Code::Usage.into() };
        }
    };
    setup::logging();
    let common = &arguments.common;
    let outcome = match &arguments.command {
        Command::Run(run) => commands::run::run(common, run),
        Command::Plan(plan) => commands::plan::run(common, plan),
        Command::Explain(explain) => commands::explain::run(common, explain),
        Command::List(list) => commands::list::run(common, list),
        Command::Matrix(matrix) => commands::matrix::run(common, matrix),
        Command::Doctor => commands::doctor::run(common),
        Command::Case(case) => commands::case::run(common, &case.command),
    };
    exit::report(outcome, common.verbose)
}
