//! `cargo xtask oracle`: another selector's answers against ours.

use anyhow::{Result, bail};
use serde_json::json;
use std::path::Path;

/// Runs every case of a folder and ends with `N passed, M failed`; fails when a case does.
pub fn run(directory: &Path, all: bool, is_json: bool) -> Result<()> {
    let report = attache_oracle::run(directory, all)?;
    let (passed, explained, failed) = report.totals();
    if is_json {
        let files: Vec<_> = report
            .files
            .iter()
            .map(|file| {
                json!({
                    "file": file.file, "passed": file.passed, "explained": file.explained, "failures": file.failures,
                })
            })
            .collect();
        println!("{}", json!({ "files": files, "passed": passed, "explained": explained, "failed": failed }));
    } else {
        println!("{report}");
    }
    if failed > 0 {
        bail!("{failed} cases differ from what is expected");
    }
    Ok(())
}
