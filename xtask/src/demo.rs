//! The bundled model on libraries that are loaded at run time, by a program that links no plugin.

use crate::{cargo, plugins};
use anyhow::{Context, Result};
use std::process::Command;

pub fn run() -> Result<()> {
    println!("Building the plugins as libraries …");
    let folder = plugins::build(false, None)?;
    println!("Building the program, without plugins …");
    let files = cargo::build(&["--bin", "attache", "--no-default-features"], "attache", "bin")?;
    let program = files.first().context("cargo built no program")?;
    println!("\n$ attache run --plugin-path {} --prompt … --prompt …\n", folder.display());
    let mut attache = Command::new(program);
    attache.arg("run").arg("--plugin-path").arg(&folder).args(["--max-tokens", "160"]);
    for prompt in ["Once upon a time", "One day a girl named Lily"] {
        attache.args(["--prompt", prompt]);
    }
    cargo::run(&mut attache)
}
