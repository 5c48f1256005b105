//! `attache case run`: one attention call from a file.

use crate::{
    arguments::{CaseCommand, CaseRun, Common},
    exit::Outcome,
    output, setup,
};
use attache_conformance::{Case, check, execute};
use attache_core::runtime::HostServices;
use attache_engine::pool::Pool;
use serde_json::json;

pub fn run(common: &Common, command: &CaseCommand) -> Outcome {
    let CaseCommand::Run(flags) = command;
    run_case(common, flags)
}

fn run_case(common: &Common, flags: &CaseRun) -> Outcome {
    let case = Case::load(&flags.file)?;
    let (_, registry) = setup::registry(common)?;
    let resolved = registry.backend(&case.request(), None)?;
    let result = execute(&resolved.backend, HostServices::new(Pool::new(0)), &case)?;
    attache_conformance::write_output(&flags.out, &result)?;
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
