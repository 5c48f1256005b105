//! Running cargo, and what it built.

use anyhow::{Context, Result, bail};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The workspace's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// cargo, in the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Runs a command that prints for itself.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", text(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", text(command));
    }
    Ok(())
}

/// A command as one would type it.
pub fn text(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let parts = command.get_args().map(|argument| argument.to_string_lossy().into_owned());
    std::iter::once(program).chain(parts).collect::<Vec<_>>().join(" ")
}

/// Builds and gives the files of the artifacts of a kind (`bin`, `cdylib`) of a package.
pub fn build(arguments: &[&str], package: &str, kind: &str) -> Result<Vec<PathBuf>> {
    let mut command = cargo();
    command.args(["build", "--message-format=json-render-diagnostics", "--package", package]).args(arguments);
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start {}", text(&command)))?;
    if !output.status.success() {
        bail!("{} failed ({})", text(&command), output.status);
    }
    let mut files = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        let is_artifact = message["reason"] == "compiler-artifact";
        let is_kind = message["target"]["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|found| found == kind));
        let name = message["manifest_path"].as_str().map(PathBuf::from);
        let is_package = name.is_some_and(|path| package_of(&path).as_deref() == Some(package));
        if is_artifact && is_kind && is_package {
            let names = message["filenames"].as_array().into_iter().flatten();
            files.extend(names.filter_map(|name| name.as_str().map(PathBuf::from)));
        }
    }
    Ok(files)
}

/// The name in a manifest.
pub fn package_of(manifest: &Path) -> Option<String> {
    let text = std::fs::read_to_string(manifest).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("name = "))?;
    Some(line.trim().trim_matches('"').to_owned())
}
