//! `attache case run`: one attention call from a file.

use crate::{
    arguments::{CaseCommand, CaseRun, Common},
    exit::{Code, Failure, Outcome},
    output, setup,
};
use attache_conformance::{Case, CaseError, check, execute};
use attache_core::runtime::HostServices;
use attache_engine::pool::Pool;
use serde_json::json;
use std::path::Path;

pub fn run(common: &Common, command: &CaseCommand) -> Outcome {
    let CaseCommand::Run(flags) = command;
    run_case(common, flags)
}

/// An error that names its file, which not every one does itself.
fn about(path: &Path, error: &CaseError, code: Code) -> Failure {
    match error {
        CaseError::Io { .. } => Failure::new(code, error),
        _ => Failure::new(code, format!("{}: {error}", path.display())),
    }
}

/// Whether both name one file, through links too; a file that does not exist is no other.
fn is_same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

fn run_case(common: &Common, flags: &CaseRun) -> Outcome {
    let case = Case::load(&flags.file).map_err(|error| about(&flags.file, &error, Code::Usage))?;
    if is_same_file(&flags.file, &flags.out) {
        return Err(Failure::usage(format!("--out {} is the case itself; name another file", flags.out.display())));
    }
    let (_, registry) = setup::registry(common)?;
    let resolved = registry.backend(&case.request(), None)?;
    let result = execute(&resolved.backend, HostServices::new(Pool::new(0)), &case)?;
    attache_conformance::write_output(&flags.out, &result).map_err(|error| about(&flags.out, &error, Code::Other))?;
    let report = if flags.check { Some(check(&case, &result)?) } else { None };
    let chosen = resolved.selection.chosen();
    let why = &resolved.selection.explanation().why;
    if common.json {
        output::json(&json!({
            "backend": chosen.name(),
            "source": chosen.source,
            "why": why,
            "layout": result.layout,
            "block_size": result.block_size,
            "out": flags.out,
            "check": report,
        }))?;
        return Ok(());
    }
    output::line(format!("{} ({}): {why}", chosen.name(), chosen.source))?;
    if !result.layout.is_empty() {
        output::line(format!("layout {}, block size {}", result.layout, result.block_size))?;
    }
    if let Some(report) = report {
        output::line(format!("agrees with the reference: {}", serde_json::to_string(&report)?))?;
    }
    output::line(format!("out and lse written to {}", flags.out.display()))?;
    Ok(())
}
