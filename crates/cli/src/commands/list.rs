//! `attache list`: plugins and their backends.

use crate::{
    arguments::{Common, List},
    exit::Outcome,
    output, setup,
};
use attache_core::registry::{Entry, Stage};
use serde_json::json;

pub fn run(common: &Common, list: &List) -> Outcome {
    let (_, registry) = setup::quiet_registry(common)?;
    let usable = |entry: &Entry| matches!(entry.stage, Stage::Found | Stage::Opened | Stage::Ready);
    let report = registry.report();
    let entries: Vec<&Entry> = report.iter().filter(|entry| list.all || usable(entry)).collect();
    let hidden = report.len() - entries.len();
    if common.json {
        let searched: Vec<_> = registry
            .searched()
            .iter()
            .map(|place| json!({"path": place.path, "origin": place.origin, "exists": place.exists}))
            .collect();
        output::json(&json!({"plugins": entries, "searched": searched}))?;
        return Ok(());
    }
    let mut table = output::table(&["plugin", "version", "backends", "stage", "source", "named by", "reason"]);
    for entry in entries {
        table.add_row([
            entry.name.clone().unwrap_or_else(|| "?".to_owned()),
            entry.version.as_ref().map_or_else(|| "?".to_owned(), ToString::to_string),
            entry.backends.join(", "),
            entry.stage.to_string(),
            entry.source.to_string(),
            entry.origin.to_string(),
            entry.reason.clone().unwrap_or_default(),
        ]);
    }
    output::line(table)?;
    if list.all {
        for place in registry.searched() {
            let state = if place.exists { "" } else { " (does not exist)" };
            output::line(format!("searched {} ({}){state}", place.path.display(), place.origin))?;
        }
    } else if hidden > 0 {
        output::line(format!("{hidden} more cannot be used or are shadowed; attache list --all shows why"))?;
    }
    Ok(())
}
