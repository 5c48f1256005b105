//! Selections: who is chosen, in which order, and why the others are not.

use crate::{
    Outcome, Tally, differences,
    facts::{self, Needs, Settings},
};
use attache_catalogue::Catalogue;
use attache_core::{
    AttentionType, Device, Dtype, Kind, KvCacheDtype, LayerRequest,
    policy::{Origin, Policy, Wanted},
    selector::{Explanation, SelectionError, select},
};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// How the other system calls backends that stand under another name in the catalogue.
const CLASSES: &[(&str, &str)] = &[("XPUFlashAttnMLABackend", "FLASH_ATTN_MLA")];

fn name_of(text: &str) -> &str {
    CLASSES.iter().find(|(class, _)| text.ends_with(class)).map_or(text, |(_, name)| name)
}

struct Case<'a> {
    out: &'a Value,
    request: LayerRequest,
    device: Device,
    policy: Policy,
}

pub fn run(catalogue: &Catalogue, machines: &Value, cases: &[Value], tally: &mut Tally) {
    for case in cases {
        tally.add(one(catalogue, machines, case));
    }
}

fn flag(input: &Value, name: &str) -> bool {
    input[name].as_bool().unwrap_or(false)
}

fn number(input: &Value, name: &str) -> Option<u32> {
    input[name].as_u64().and_then(|number| u32::try_from(number).ok())
}

fn request(input: &Value) -> Result<LayerRequest, String> {
    let kv_cache_dtype = match input.get("kv_cache_dtype") {
        None => Some(KvCacheDtype::AUTO),
        Some(Value::Null) => None,
        Some(name) => {
            let name = name.as_str().unwrap_or_default();
            Some(KvCacheDtype::parse(name).map_err(|error| error.to_string())?)
        }
    };
    let dtype = match input["dtype"].as_str() {
        None | Some("bfloat16") => Dtype::BF16,
        Some("float16") => Dtype::F16,
        Some("float32") => Dtype::F32,
        Some(other) => return Err(format!("dtype {other}")),
    };
    let is_head = input["model_tag"].as_str() == Some("dspark_head");
    Ok(LayerRequest {
        head_size: number(input, "head_size").unwrap_or(128),
        dtype,
        kv_cache_dtype,
        block_size: number(input, "block_size"),
        use_mla: flag(input, "use_mla"),
        has_sink: flag(input, "has_sink"),
        use_sparse: flag(input, "use_sparse"),
        use_mm_prefix: flag(input, "use_mm_prefix"),
        use_per_head_quant_scales: flag(input, "use_per_head_quant_scales"),
        attn_type: AttentionType::parse(input["attn_type"].as_str().unwrap_or_default()),
        num_heads: number(input, "num_heads"),
        has_sliding_window: flag(input, "has_sliding_window"),
        use_non_causal: flag(input, "use_non_causal"),
        use_batch_invariant: flag(input, "use_batch_invariant"),
        use_kv_connector: flag(input, "use_kv_connector"),
        use_pcp: flag(input, "use_pcp"),
        use_dcp: flag(input, "use_dcp"),
        use_adaptive_verification: flag(input, "use_adaptive_verification") && !is_head,
        use_rswa: flag(input, "use_rswa"),
        ..LayerRequest::default()
    })
}

/// The overrides of a case; a `null` for a kind names a backend there.
fn overrides(input: &Value, policy: &mut Policy) -> bool {
    let wanted = |name: &str| Wanted::parse(name, Origin::Api);
    // These two stand for a kernel of another layer there, and leave the choice automatic.
    let is_alias = |name: &&str| matches!(*name, "CUTLASS_MSA" | "TRITON_MSA");
    policy.backend = input["backend"].as_str().filter(|name| !is_alias(name)).and_then(wanted);
    let mut has_null = false;
    for (kind, name) in input["backend_per_kind"].as_object().into_iter().flatten() {
        has_null |= name.is_null();
        if let (Some(kind), Some(name)) = (Kind::parse(kind), name.as_str().and_then(wanted)) {
            policy.per_kind.insert(kind, name);
        }
    }
    has_null
}

fn one(catalogue: &Catalogue, machines: &Value, case: &Value) -> Outcome {
    let (input, out) = (&case["in"], &case["out"]);
    let theirs_failed = !out["error"].is_null();
    let failed =
        |ours: String| Outcome::Failed(format!("{}: {input}\n  ours: {ours}\n  theirs: {out}", case["machine"]));
    let request = match request(input) {
        Ok(request) => request,
        Err(_) if theirs_failed => return Outcome::Passed,
        Err(error) => return failed(error),
    };
    let mut policy = Policy { priority: catalogue.priority.clone(), ..Policy::default() };
    if overrides(input, &mut policy) {
        return Outcome::Explained(differences::NULL_BY_KIND);
    }
    let is_override = policy.wanted(request.kind()).is_some();
    let run_kv_cache_dtype =
        input["run_kv_cache_dtype"].as_str().or_else(|| input["kv_cache_dtype"].as_str()).map(str::to_owned);
    let settings = Settings {
        model: input["model"].clone(),
        attention: input["attn_cfg"].clone(),
        run_kv_cache_dtype,
        is_override,
    };
    let needs = Needs {
        head_size: request.head_size,
        has_sink: request.has_sink,
        batch_invariant: request.use_batch_invariant,
        dcp: request.use_dcp,
        block_size: request.block_size,
    };
    let facts = &machines[case["machine"].as_str().unwrap_or_default()];
    if facts.is_null() {
        return failed("the machine has no facts".to_owned());
    }
    let device = facts::device(facts, needs, &settings);
    if let Some(kind) = case["kind"].as_str()
        && kind != request.kind().name()
    {
        return failed(format!("kind {}", request.kind()));
    }
    let explanation = select(&request, None, &device, &policy, &catalogue.candidates);
    let case = Case { out, request, device, policy };
    case.compare(&explanation, is_override).unwrap_or_else(failed)
}

impl Case<'_> {
    /// The outcome, or what we say where the two differ.
    fn compare(&self, ours: &Explanation, is_override: bool) -> Result<Outcome, String> {
        let theirs = self.out["backend"].as_str().map(name_of);
        let chosen = ours.result().map(|chosen| chosen.name().to_owned());
        let platform = self.device.platform.0.as_str();
        if is_override {
            return self.compare_override(&chosen, theirs, platform);
        }
        let ours_text = || match &chosen {
            Ok(name) => name.clone(),
            Err(error) => error.to_string(),
        };
        match (&chosen, theirs) {
            (Ok(name), Some(theirs)) if name == theirs => {}
            (Err(_), None) => {}
            (Err(_), Some(_)) if platform == "cpu" => {
                return Ok(Outcome::Explained(differences::CPU_VALIDATES_NOTHING));
            }
            (Ok(_), Some(theirs)) if platform == "cpu" && is_refused(ours, theirs) => {
                return Ok(Outcome::Explained(differences::CPU_VALIDATES_NOTHING));
            }
            _ => return Err(ours_text()),
        }
        if self.out.get("candidates").is_none() {
            return Ok(Outcome::Passed);
        }
        let rule = self.policy.priority_rule(&self.request, &self.device);
        let listed = |name: &str| rule.is_some_and(|rule| rule.order.iter().any(|other| other == name));
        let on_platform = ours.candidates.iter().filter(|candidate| {
            listed(candidate.name()) && candidate.descriptor.platforms.iter().any(|name| name == platform)
        });
        let (mut valid, mut refused) = (Vec::new(), BTreeMap::new());
        for candidate in on_platform {
            if candidate.is_valid() {
                valid.push(candidate.name());
            } else {
                let reasons: Vec<String> = candidate.reasons.iter().map(ToString::to_string).collect();
                refused.insert(candidate.name(), reasons);
            }
        }
        let their_valid: Vec<&str> = strings(&self.out["candidates"]).map(name_of).collect();
        if valid != their_valid {
            return Err(format!("candidates {valid:?}"));
        }
        let their_refused: BTreeMap<&str, Vec<String>> = self.out["invalid"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|entry| {
                (name_of(entry[0].as_str().unwrap_or_default()), strings(&entry[2]).map(str::to_owned).collect())
            })
            .collect();
        if refused != their_refused {
            let names: BTreeSet<&str> = refused.keys().chain(their_refused.keys()).copied().collect();
            let differing: Vec<String> = names
                .into_iter()
                .filter(|name| refused.get(name) != their_refused.get(name))
                .map(|name| format!("{name}: {:?} and not {:?}", refused.get(name), their_refused.get(name)))
                .collect();
            return Err(differing.join("; "));
        }
        let they_warn = self.out["warned"].as_bool().unwrap_or(false) || !self.out["block_size_warning"].is_null();
        // One platform there never warns; ours warns on each.
        let we_warn = !ours.warnings.is_empty();
        if platform == "cuda" && they_warn != we_warn {
            return Err(format!("warnings {:?}", ours.warnings));
        }
        Ok(Outcome::Passed)
    }

    fn compare_override(
        &self,
        chosen: &Result<String, SelectionError>,
        theirs: Option<&str>,
        platform: &str,
    ) -> Result<Outcome, String> {
        let their_reasons: Vec<String> = strings(&self.out["selected_reasons"]).map(str::to_owned).collect();
        match (chosen, theirs) {
            (Ok(name), Some(theirs)) if name == theirs => Ok(Outcome::Passed),
            // Both refuse: for the same reasons, where there are reasons.
            (Err(SelectionError::OverrideInvalid { reasons, .. }), None) => {
                let other = format!("platform {platform} not supported");
                let is_other = reasons.iter().any(|reason| *reason == other);
                let ours: Vec<String> =
                    reasons.iter().filter(|reason| **reason != other).map(ToString::to_string).collect();
                if self.out.get("selected_reasons").is_none() || ours == their_reasons {
                    Ok(Outcome::Passed)
                } else if is_other {
                    Ok(Outcome::Explained(differences::OTHER_PLATFORM))
                } else {
                    Err(format!("{ours:?}"))
                }
            }
            (Err(SelectionError::UnknownBackend { .. }), None) => Ok(Outcome::Passed),
            (Err(_), None) => Ok(Outcome::Passed),
            (Err(SelectionError::UnknownBackend { .. }), Some(_)) => {
                Ok(Outcome::Explained(differences::NAMES_WITHOUT_CODE))
            }
            (Err(SelectionError::OverrideInvalid { reasons, .. }), Some(_)) => {
                let other = format!("platform {platform} not supported");
                if reasons.iter().any(|reason| *reason == other) {
                    Ok(Outcome::Explained(if platform == "cpu" || platform == "xpu" {
                        differences::SILENT_FALLBACK
                    } else {
                        differences::OTHER_PLATFORM
                    }))
                } else if platform == "cpu" {
                    Ok(Outcome::Explained(differences::CPU_VALIDATES_NOTHING))
                } else if !their_reasons.is_empty() || platform == "xpu" {
                    Ok(Outcome::Explained(differences::SILENT_FALLBACK))
                } else {
                    Err(format!("{reasons:?}"))
                }
            }
            // The override is obeyed here and ignored there.
            (Ok(_), Some(_)) if platform == "cpu" || platform == "xpu" => {
                Ok(Outcome::Explained(differences::SILENT_FALLBACK))
            }
            (Ok(name), _) => Err(name.clone()),
            (Err(error), Some(_)) => Err(error.to_string()),
        }
    }
}

/// Whether a backend of that name is there and does not claim what is asked.
fn is_refused(ours: &Explanation, name: &str) -> bool {
    ours.candidates.iter().any(|candidate| candidate.name() == name && !candidate.is_valid())
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}
