//! The smaller tables: kinds, spelling of settings, layouts, state-space types.

use crate::{
    Outcome, Tally, differences,
    facts::{self, Needs, Settings},
};
use attache_catalogue::Catalogue;
use attache_core::{
    AttentionType, Kind, KvCacheDtype, LayerRequest, StateSpaceType,
    plan::layouts::{CacheShape, KvCacheLayout, LayoutError, LayoutWishes, common, settle},
    policy::{Origin, Policy, Wanted},
    selector::select,
};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Names that stand in their lists and have no code.
const WITHOUT_CODE: &[&str] = &["TORCH_SDPA", "NO_ATTENTION", "CUSTOM"];

/// Passed when `ours` is what `theirs` says; an error of theirs is `None` here.
fn compare(case: &Value, ours: &Option<Value>, theirs: &Value) -> Outcome {
    let is_error = theirs.get("error").is_some();
    match ours {
        None if is_error => Outcome::Passed,
        Some(ours) if !is_error && ours == theirs => Outcome::Passed,
        ours => {
            let ours = ours.as_ref().map_or_else(|| "an error".to_owned(), Value::to_string);
            Outcome::Failed(format!("{case}\n  ours: {ours}\n  theirs: {theirs}"))
        }
    }
}

pub fn kinds(_: &Catalogue, _: &Value, cases: &[Value], tally: &mut Tally) {
    for case in cases {
        let input = &case["in"];
        let request = LayerRequest {
            use_mla: input["use_mla"].as_bool().unwrap_or(false),
            has_sliding_window: input["has_sliding_window"].as_bool().unwrap_or(false),
            attn_type: AttentionType::parse(input["attn_type"].as_str().unwrap_or_default()),
            ..LayerRequest::default()
        };
        tally.add(compare(case, &Some(json!(request.kind().name())), &case["out"]));
    }
}

/// A backend's name as the settings take it: none for `auto`, an error for one that is not there.
fn backend(names: &BTreeSet<&str>, text: &str) -> Result<Option<String>, ()> {
    let Some(wanted) = Wanted::parse(text, Origin::Api) else { return Ok(None) };
    if names.contains(wanted.name.as_str()) { Ok(Some(wanted.name)) } else { Err(()) }
}

fn is_without_code(name: &Value) -> bool {
    name.as_str().is_some_and(|name| WITHOUT_CODE.contains(&name.to_ascii_uppercase().as_str()))
}

pub fn config_parse(catalogue: &Catalogue, _: &Value, cases: &[Value], tally: &mut Tally) {
    let names: BTreeSet<&str> = catalogue.candidates.iter().map(|candidate| candidate.name()).collect();
    for case in cases {
        tally.add(setting(&names, case));
    }
}

fn setting(names: &BTreeSet<&str>, case: &Value) -> Outcome {
    let (input, theirs) = (&case["in"], &case["out"]);
    let list = |names: &mut dyn Iterator<Item = &str>| Some(json!(names.collect::<Vec<_>>()));
    match case["field"].as_str().unwrap_or_default() {
        "backend" if is_without_code(input) => Outcome::Explained(differences::NAMES_WITHOUT_CODE),
        "backend" => {
            let ours = input.as_str().map_or(Ok(None), |text| backend(names, text));
            compare(case, &ours.ok().map(|name| json!(name)), theirs)
        }
        "backend_per_kind" => per_kind(names, case),
        "is_quantized_kv_cache" => {
            let dtype = KvCacheDtype::parse(input.as_str().unwrap_or_default()).ok();
            compare(case, &dtype.map(|dtype| json!(dtype.is_quantized())), theirs)
        }
        "KV_CACHE_DTYPES" => {
            // Ours knows more (float32); theirs must be there, in their order.
            let is_theirs = |name: &&str| theirs.as_array().into_iter().flatten().any(|other| other == name);
            compare(case, &list(&mut KvCacheDtype::names().into_iter().filter(is_theirs)), theirs)
        }
        "KVCacheSpecKind.values" => without(case, &Kind::ALL.map(Kind::name), &["unknown"]),
        "AttentionBackendEnum.names_in_order" => {
            let ours: Vec<&str> = names.iter().copied().filter(|name| !is_state_space(name)).collect();
            without(case, &ours, WITHOUT_CODE)
        }
        "MambaAttentionBackendEnum.names_in_order" => {
            without(case, &StateSpaceType::ALL.map(name_of_type), &["CUSTOM"])
        }
        other => Outcome::Failed(format!("{case}\n  ours: no setting {other}\n  theirs: {theirs}")),
    }
}

/// The same names, whatever their order, but for those that name nothing.
fn without(case: &Value, ours: &[&str], nothing: &[&str]) -> Outcome {
    let ours: BTreeSet<&str> = ours.iter().copied().collect();
    let theirs: BTreeSet<&str> = case["out"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let missing: Vec<&&str> = theirs.difference(&ours).filter(|name| !nothing.contains(name)).collect();
    let more: Vec<&&str> = ours.difference(&theirs).collect();
    if missing.is_empty() && more.is_empty() {
        return Outcome::Explained(differences::NAMES_WITHOUT_CODE);
    }
    Outcome::Failed(format!(
        "{}\n  ours: {missing:?} are missing, {more:?} are more\n  theirs: {}",
        case["field"], case["out"]
    ))
}

fn per_kind(names: &BTreeSet<&str>, case: &Value) -> Outcome {
    let mut ours = serde_json::Map::new();
    let mut is_error = false;
    for (kind, name) in case["in"].as_object().into_iter().flatten() {
        let Some(text) = name.as_str() else { return Outcome::Explained(differences::NULL_BY_KIND) };
        if text.eq_ignore_ascii_case("auto") {
            return Outcome::Explained(differences::AUTO_BY_KIND);
        }
        if kind == "unknown" || is_without_code(name) {
            return Outcome::Explained(differences::NAMES_WITHOUT_CODE);
        }
        match (Kind::parse(kind), backend(names, text)) {
            (Some(kind), Ok(Some(name))) => {
                ours.insert(kind.name().to_owned(), json!(name));
            }
            _ => is_error = true,
        }
    }
    compare(case, &(!is_error).then_some(Value::Object(ours)), &case["out"])
}

fn layout_names(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

pub fn layouts(_: &Catalogue, _: &Value, cases: &[Value], tally: &mut Tally) {
    for case in cases {
        tally.add(layout(case));
    }
}

fn layout(case: &Value) -> Outcome {
    let (input, theirs) = (&case["in"], &case["out"]);
    let name = input["name"].as_str().unwrap_or_default();
    let ours: Result<Value, LayoutError> = match input["fn"].as_str().unwrap_or_default() {
        "get_supported_kv_cache_layouts" => declared(&input["declared"]).and_then(|declared| {
            let names: Vec<&str> = common(&declared)?.into_iter().map(KvCacheLayout::name).collect();
            Ok(json!(names))
        }),
        "_layout_from_name" => KvCacheLayout::parse(name).map(|layout| json!(layout.name())),
        "KVCacheLayout" => KvCacheLayout::parse(name).map(|layout| {
            json!({
                "stride_order": layout.stride_order(),
                "is_layer_compact": layout.is_layer_compact(),
                "is_block_contiguous": layout.is_block_contiguous(),
                "is_block_compact": layout.is_block_compact(),
                "is_block_outermost": layout.is_block_outermost(),
                "enum_index": KvCacheLayout::ALL.iter().position(|other| *other == layout),
            })
        }),
        "resolve_kv_cache_layout" => resolve(input).map(|layout| json!(layout)),
        other => return Outcome::Failed(format!("{case}\n  ours: no rule {other}\n  theirs: {theirs}")),
    };
    // Which of the errors it is counts too.
    if let (Err(error), Some(message)) = (&ours, theirs["message"].as_str())
        && !is_same_error(error, message)
    {
        return Outcome::Failed(format!("{case}\n  ours: {error}\n  theirs: {message}"));
    }
    // What is recorded there is the layout, or the older name that it was handed in by.
    compare(case, &ours.ok(), theirs.get("layout").unwrap_or(theirs))
}

fn is_same_error(ours: &LayoutError, theirs: &str) -> bool {
    let beginnings: &[&str] = match ours {
        LayoutError::Unknown { .. } => &["Unknown KV cache layout", "Invalid value"],
        LayoutError::NothingInCommon { .. } => &["No KV cache layout satisfies"],
        LayoutError::NoWorkers => &["No worker reported"],
        LayoutError::WorkersDisagree { .. } => &["Workers disagree"],
        LayoutError::MixedShapes { .. } => &["Specs with mixed HNC shapes"],
        LayoutError::MixedSharding { .. } => &["DCP with a replicated draft"],
        LayoutError::NotTaken { .. } => &["VLLM_KV_CACHE_LAYOUT="],
    };
    beginnings.iter().any(|beginning| theirs.starts_with(beginning))
}

fn declared(list: &Value) -> Result<Vec<Option<Vec<KvCacheLayout>>>, LayoutError> {
    let one = |entry: &Value| {
        if entry.is_null() {
            return Ok(None);
        }
        layout_names(entry).iter().map(|name| KvCacheLayout::parse(name)).collect::<Result<Vec<_>, _>>().map(Some)
    };
    list.as_array().into_iter().flatten().map(one).collect()
}

fn resolve(input: &Value) -> Result<&'static str, LayoutError> {
    let workers: Vec<Vec<String>> = input["workers"].as_array().into_iter().flatten().map(layout_names).collect();
    let shape = |spec: &Value| {
        let number = |key: &str| spec[key].as_u64().unwrap_or(0);
        let is = |key: &str| spec[key].as_bool().unwrap_or(false);
        CacheShape {
            has_layer_views: is("has_layer_views"),
            uses_slot_mapping: is("is_attention_spec") && is("uses_slot_mapping"),
            num_heads: u32::try_from(number("num_heads")).unwrap_or(u32::MAX),
            num_states: u32::try_from(number("num_states")).unwrap_or(u32::MAX),
            page_size_bytes: number("page_size_bytes"),
            dcp_sharded: is("dcp_sharded"),
        }
    };
    let shapes: Vec<CacheShape> = input["specs"].as_array().into_iter().flatten().map(shape).collect();
    let wishes = LayoutWishes {
        settled: input["already_resolved"].as_str().map(KvCacheLayout::parse).transpose()?,
        operator: input["env_VLLM_KV_CACHE_LAYOUT"].as_str(),
        connector: input["connector_layout"].as_str(),
    };
    settle(&workers, &shapes, wishes).map(|settled| settled.layout.name())
}

/// What the other system calls a sort of state-space layers.
fn name_of_type(sort: StateSpaceType) -> &'static str {
    match sort {
        StateSpaceType::Mamba1 => "MAMBA1",
        StateSpaceType::Mamba2 => "MAMBA2",
        StateSpaceType::ShortConv => "SHORT_CONV",
        StateSpaceType::Linear => "LINEAR",
        StateSpaceType::Gdn => "GDN_ATTN",
    }
}

fn is_state_space(backend: &str) -> bool {
    StateSpaceType::ALL
        .into_iter()
        .any(|sort| backend.trim_end_matches("_ATTN") == name_of_type(sort).trim_end_matches("_ATTN"))
}

pub fn mamba(catalogue: &Catalogue, machines: &Value, cases: &[Value], tally: &mut Tally) {
    for case in cases {
        tally.add(state_space(catalogue, machines, case));
    }
}

fn state_space(catalogue: &Catalogue, machines: &Value, case: &Value) -> Outcome {
    let (input, theirs) = (&case["in"], &case["out"]);
    // The last word of a sequence is what holds now.
    let is_sequence = input.get("sequence").is_some();
    // A text in place of a type cannot be handed in here.
    let is_text = input["as_string"].as_bool().unwrap_or(false);
    let name = if is_sequence { Some("MAMBA1") } else { input["mamba_type"].as_str() };
    let sort = name
        .filter(|_| !is_text)
        .and_then(|name| StateSpaceType::ALL.into_iter().find(|sort| name_of_type(*sort) == name));
    let chosen = sort.and_then(|sort| {
        let request = LayerRequest {
            state_space: Some(sort),
            use_batch_invariant: is_sequence || input["batch_invariant"].as_bool().unwrap_or(false),
            ..LayerRequest::default()
        };
        let needs = Needs {
            head_size: request.head_size,
            has_sink: false,
            batch_invariant: request.use_batch_invariant,
            dcp: false,
            block_size: None,
        };
        let facts = &machines[case["machine"].as_str().unwrap_or_default()];
        let device = facts::device(facts, needs, &Settings::default());
        let policy = Policy { priority: catalogue.priority.clone(), ..Policy::default() };
        let explanation = select(&request, None, &device, &policy, &catalogue.candidates);
        explanation.result().ok().map(|chosen| json!(chosen.name()))
    });
    if is_sequence && chosen.is_none() {
        return Outcome::Explained(differences::STALE_TYPE);
    }
    let theirs = if theirs.get("error").is_some() { theirs } else { &theirs["backend"] };
    compare(case, &chosen, theirs)
}
