//! `attache plan`: kinds, backends, layout and block size of a model's layers.

use crate::{
    arguments::{Common, Plan},
    exit::{Code, Failure, Outcome},
    output, setup,
};
use attache_core::{
    Kind, LayerRequest,
    plan::{EngineConfig, ModelDescription, ModelPlan, PlannedLayer, describe},
    registry::Registry,
    selector::{Candidate, Scope, smallest_changes},
    verdict::verdict,
};
use attache_engine::LoadedModel;
use comfy_table::Table;
use std::path::Path;

/// The layers of a `config.json`, a GGUF file, a folder or the bundled model.
fn description(model: &str) -> Result<ModelDescription, Failure> {
    let path = Path::new(model);
    let config = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    if config.extension().is_none_or(|extension| extension != "json") {
        return Ok(LoadedModel::describe(model)?);
    }
    let text = std::fs::read_to_string(&config).map_err(|error| Failure::file(&config, error))?;
    describe(&text).map_err(|error| Failure::new(Code::Other, format!("{}: {error}", config.display())))
}

pub fn run(common: &Common, flags: &Plan) -> Outcome {
    let description = description(&flags.model)?;
    let default =
        EngineConfig { dtype: description.dtype.unwrap_or(EngineConfig::default().dtype), ..EngineConfig::default() };
    let engine = setup::engine_config(&flags.engine, default)?;
    let (_, registry) = setup::registry(common)?;
    if let Some(what_if) = &flags.what_if {
        return self::what_if(common, &registry, &description, &engine, what_if);
    }
    let plan = registry.plan(&description, &engine)?;
    if common.json {
        output::json(&plan)?;
        return Ok(());
    }
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
    output::line(format!(
        "{} on {}: KV layout {}, block size {}",
        plan.model,
        plan.device,
        text(&plan.kv_layout),
        text(&plan.block_size.map(|size| size.to_string()))
    ))?;
    output::line(table(&plan))?;
    output::warnings(&plan.warnings);
    Ok(())
}

/// What would have to change for one backend to serve each layer.
fn what_if(
    common: &Common,
    registry: &Registry,
    description: &ModelDescription,
    engine: &EngineConfig,
    asked: &str,
) -> Outcome {
    let Some(name) = asked.strip_prefix("backend=").map(str::to_ascii_uppercase) else {
        return Err(Failure::usage(format!("--what-if '{asked}'; valid: backend=NAME")));
    };
    let candidates = registry.candidates();
    let Some(candidate) = candidates.iter().find(|candidate| candidate.name() == name) else {
        let mut valid: Vec<&str> = candidates.iter().map(Candidate::name).collect();
        valid.sort_unstable();
        valid.dedup();
        return Err(Failure::usage(format!("--what-if backend={name}; valid: {}", valid.join(", "))));
    };
    let device = registry.device();
    let mut groups: Vec<(Vec<usize>, Kind, LayerRequest)> = Vec::new();
    for layer in &description.layers {
        let request = layer.request(engine);
        match groups.iter_mut().find(|(_, kind, other)| *kind == layer.kind && *other == request) {
            Some((indices, ..)) => indices.push(layer.index),
            None => groups.push((vec![layer.index], layer.kind, request)),
        }
    }
    let answers: Vec<serde_json::Value> = groups
        .iter()
        .map(|(indices, kind, request)| {
            let reasons = verdict(&candidate.descriptor, request, &device).reasons;
            let changes = smallest_changes(&candidate.descriptor, request, &device, Scope::Model, 4);
            serde_json::json!({
                "layers": indices, "kind": kind, "backend": name, "valid": reasons.is_empty(), "reasons": reasons,
                "changes": changes.map(|(changes, _)| changes),
            })
        })
        .collect();
    if common.json {
        output::json(&answers)?;
        return Ok(());
    }
    let mut table = output::table(&["layers", "kind", "reasons", "what would have to change"]);
    for ((indices, kind, request), _) in groups.iter().zip(&answers) {
        let reasons = verdict(&candidate.descriptor, request, &device).reasons;
        let changes = smallest_changes(&candidate.descriptor, request, &device, Scope::Model, 4);
        let changes = match (reasons.is_empty(), changes) {
            (true, _) => "nothing".to_owned(),
            (false, Some((changes, _))) => changes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and "),
            (false, None) => "no set of up to four changes would do".to_owned(),
        };
        let reasons = if reasons.is_empty() { "valid".to_owned() } else { reasons.join(", ") };
        table.add_row([ranges(indices), kind.to_string(), reasons, changes]);
    }
    output::line(table)?;
    Ok(())
}

/// Layers of one sort in one row.
pub fn table(plan: &ModelPlan) -> Table {
    let mut groups: Vec<(Vec<usize>, &PlannedLayer)> = Vec::new();
    for layer in &plan.layers {
        let same = |other: &PlannedLayer| {
            (other.kind, &other.backend, &other.request, other.sliding_window, other.state_space)
                == (layer.kind, &layer.backend, &layer.request, layer.sliding_window, layer.state_space)
        };
        match groups.iter_mut().find(|(_, other)| same(other)) {
            Some((indices, _)) => indices.push(layer.index),
            None => groups.push((vec![layer.index], layer)),
        }
    }
    let mut table = output::table(&["layers", "kind", "heads", "head size", "features", "backend", "source", "why"]);
    for (indices, layer) in groups {
        let request = Some(&layer.request).filter(|request| request.state_space.is_none());
        let heads = |request: &LayerRequest| {
            let number = |value: Option<u32>| value.map_or_else(|| "?".to_owned(), |value| value.to_string());
            match request.num_kv_heads {
                Some(_) => format!("{}/{}", number(request.num_heads), number(request.num_kv_heads)),
                None => number(request.num_heads),
            }
        };
        table.add_row([
            ranges(&indices),
            layer
                .state_space
                .map_or_else(|| layer.kind.to_string(), |sort| format!("{} ({})", layer.kind, sort.name())),
            request.map(heads).unwrap_or_default(),
            request.map(|request| request.head_size.to_string()).unwrap_or_default(),
            features(layer),
            layer.backend.clone().unwrap_or_else(|| "none".to_owned()),
            layer.source.clone().unwrap_or_default(),
            layer.why.clone(),
        ]);
    }
    table
}

fn features(layer: &PlannedLayer) -> String {
    let mut all: Vec<String> = layer.sliding_window.map(|window| format!("window {window}")).into_iter().collect();
    if layer.state_space.is_none() {
        let request = &layer.request;
        let flags = [
            ("sinks", request.has_sink),
            ("sparse", request.use_sparse),
            ("soft-cap", request.has_softcap),
            ("ALiBi", request.has_alibi),
            ("chunked-local", request.chunked_local),
            ("multimodal prefix", request.use_mm_prefix),
        ];
        all.extend(flags.iter().filter(|(_, on)| *on).map(|(name, _)| (*name).to_owned()));
    }
    all.join(", ")
}

/// `0-3, 5`, or `0, 2, … 46 (24)` where that would be long.
pub fn ranges(indices: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for index in indices {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *index => *last = *index,
            _ => parts.push((*index, *index)),
        }
    }
    let text = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    match parts.as_slice() {
        [first, second, .., last] if parts.len() > 6 => {
            format!("{}, {}, … {} ({})", text(first), text(second), text(last), indices.len())
        }
        parts => parts.iter().map(text).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::ranges;

    #[test]
    fn indices_are_told_in_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5]), "0-2, 5");
        assert_eq!(ranges(&(0..24).map(|i| 2 * i).collect::<Vec<_>>()), "0, 2, … 46 (24)");
        assert_eq!(ranges(&[]), "");
    }
}
