//! `cargo xtask`: everything around the build.
//!
//! | module | owns |
//! |---|---|
//! | `cargo` | running cargo, and what it built |
//! | `plugins` | plugins as libraries with manifests |
//! | `demo` | the bundled model on libraries that are loaded at run time |
//! | `test_all` | every check, and a summary |
//! | `bench` | measured ratios |
//! | `oracle` | another selector's answers against ours |

mod bench;
mod cargo;
mod demo;
mod oracle;
mod plugins;
mod test_all;

use clap::{Parser, Subcommand};
use std::{path::PathBuf, process::ExitCode};

/// Everything around the build.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build every plugin as a library with its manifest
    Plugins {
        /// Optimise as for a release
        #[arg(long)]
        release: bool,
        /// Where they go; target/plugins unless this says otherwise
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Run the bundled model on plugins that are loaded from files
    Demo,
    /// Formatting, lints, all tests, and each plugin in both forms
    TestAll,
    /// Compare another selector's answers, as data, with ours
    Oracle {
        /// A folder of cases, for instance tests/oracle
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Print every difference, and not the first ten of a file
        #[arg(long)]
        all: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Measure; prints JSON
    Bench {
        /// Only cases whose name contains this
        #[arg(long, value_name = "TEXT")]
        filter: Option<String>,
        /// Threads
        #[arg(long, value_name = "N", default_value_t = 2)]
        threads: usize,
        /// Also time the peers: a Python that has them, and their script
        #[arg(long, num_args = 2, value_names = ["PYTHON", "SCRIPT"])]
        peers: Option<Vec<PathBuf>>,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Plugins { release, out } => plugins::build(release, out.as_deref()).map(drop),
        Command::Demo => demo::run(),
        Command::Oracle { directory, all, json } => oracle::run(&directory, all, json),
        Command::TestAll => test_all::run(),
        Command::Bench { filter, threads, peers } => bench::run(filter.as_deref(), threads, peers.as_deref()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
