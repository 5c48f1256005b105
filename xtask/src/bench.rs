//! Measured ratios, never timed tests.

use crate::cargo;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{path::PathBuf, process::Command};

/// Builds the benchmarks for a release, runs them, and the peers where they are given; prints JSON.
pub fn run(filter: Option<&str>, threads: usize, peers: Option<&[PathBuf]>) -> Result<()> {
    let files = cargo::build(&["--release", "--bin", "attache-bench"], "attache-bench", "bin")?;
    let program = files.first().context("cargo built no benchmarks")?;
    let mut bench = Command::new(program);
    bench.args(["--threads", &threads.to_string()]);
    if let Some(filter) = filter {
        bench.args(["--filter", filter]);
    }
    let ours = json_of(&mut bench)?;
    let mut report = json!({ "attache": ours });
    if let Some([python, script]) = peers {
        let mut command = Command::new(python);
        command.arg(script).args(["--reps", "7"]);
        let theirs = json_of(&mut command)?;
        report["ratios"] = ratios(&report["attache"], &theirs);
        report["peers"] = theirs;
    }
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

/// The last line of a command's output that is JSON.
fn json_of(command: &mut Command) -> Result<Value> {
    let output = command.stderr(std::process::Stdio::inherit()).output().with_context(|| cargo::text(command))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().rev().find_map(|line| serde_json::from_str(line).ok());
    last.with_context(|| format!("{} printed no JSON ({})", cargo::text(command), output.status))
}

/// How much faster we are than each peer, case by case.
fn ratios(ours: &Value, theirs: &Value) -> Value {
    let mut all = serde_json::Map::new();
    let rows = |value: &Value| value["rows"].as_array().cloned().unwrap_or_default();
    for mine in rows(ours) {
        let (Some(case), Some(time)) = (mine["case"].as_str(), mine["ms"].as_f64()) else { continue };
        for other in rows(theirs).iter().filter(|other| other["case"] == case) {
            if let (Some(peer), Some(theirs)) = (other["peer"].as_str(), other["ms"].as_f64()) {
                all.insert(format!("{case} / {peer}"), json!(theirs / time));
            }
        }
    }
    Value::Object(all)
}
