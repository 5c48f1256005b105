//! Whole models: what their configurations ask for, and what is chosen on machines that are not here.
//!
//! `tests/models/` holds one configuration for each model family, with the dimensions of the named model.

use attache_catalogue::Catalogue;
use attache_core::{
    Kind, KvCacheDtype, LayerRequest, StateSpaceType,
    plan::{EngineConfig, ModelDescription, describe},
    policy::{Origin, Policy, Wanted},
    registry::Registry,
    selector::select,
};
use std::{collections::BTreeMap, fmt::Write, path::Path};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn models() -> BTreeMap<String, ModelDescription> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let files = std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let described = files.map(|path| {
        let text = std::fs::read_to_string(&path).expect("text");
        let model = describe(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (path.file_stem().expect("a name").to_string_lossy().into_owned(), model)
    });
    described.collect()
}

fn registry(device: &str, policy: Policy) -> (Catalogue, Registry) {
    let catalogue = Catalogue::published().expect("the catalogue");
    let policy = Policy { priority: catalogue.priority.clone(), ..policy };
    let device = catalogue.device(device).expect("a device of the catalogue").clone();
    let registry =
        Registry::builder().linked(false).catalogue(catalogue.candidates.clone()).device(device).policy(policy).build();
    (catalogue, registry)
}

/// Kinds, heads and features of each model, one line for each group of layers.
#[test]
fn every_configuration_gives_these_layers() {
    let mut found = String::new();
    for (name, model) in models() {
        let mut groups: Vec<(String, usize)> = Vec::new();
        for layer in &model.layers {
            let mut text = layer.kind.name().to_owned();
            if let Some(sort) = layer.state_space {
                let _ = write!(text, " {}", sort.name());
            } else {
                let _ = write!(text, " {}/{}x{}", layer.num_heads, layer.num_kv_heads, layer.head_size);
            }
            for (word, value) in [("window", layer.sliding_window), ("chunk", layer.chunked_local)] {
                let _ = value.map_or(Ok(()), |value| write!(text, " {word} {value}"));
            }
            let _ = layer.softcap.map_or(Ok(()), |cap| write!(text, " soft-cap {cap}"));
            let flags = [
                ("sinks", layer.has_sink),
                ("ALiBi", layer.has_alibi),
                ("sparse", layer.use_sparse),
                ("multimodal", layer.use_mm_prefix),
                (layer.attn_type.name(), layer.attn_type != attache_core::AttentionType::Decoder),
            ];
            flags.iter().filter(|(_, on)| *on).for_each(|(word, _)| text.extend([" ", word]));
            match groups.iter_mut().find(|(other, _)| *other == text) {
                Some((_, count)) => *count += 1,
                None => groups.push((text, 1)),
            }
        }
        groups.iter().for_each(|(text, count)| found.extend([format!("{name}: {count} × {text}\n")]));
    }
    let expected = include_str!("models/layers.txt");
    assert_eq!(found, expected, "tests/models/layers.txt; found:\n{found}");
}

/// On every device of the catalogue every model plans, or the error names layers and reasons.
#[test]
fn every_configuration_plans_on_other_machines() -> Outcome {
    for device in ["H100", "A100", "B200", "MI300X", "cuda:8.9"] {
        let (_, registry) = registry(device, Policy::default());
        for (name, model) in models() {
            let dtype = model.dtype.unwrap_or(attache_core::Dtype::BF16);
            match registry.plan(&model, &EngineConfig { dtype, ..EngineConfig::default() }) {
                Ok(plan) => {
                    assert!(plan.layers.iter().all(|layer| layer.backend.is_some()), "{device} {name}");
                    let has_cache = plan.layers.iter().any(|layer| layer.layout.is_some());
                    assert_eq!(has_cache, plan.block_size.is_some(), "{device} {name}");
                }
                Err(error) => {
                    let text = error.to_string();
                    let expected = match (name.as_str(), device) {
                        // Sparse layers need kernels that the older machines have not.
                        ("deepseek-v3.2", "A100" | "cuda:8.9") => "layers 0-60 (mla_attention)",
                        // Heads of 8 elements.
                        ("bloom-560m", "MI300X") => "layers 0-1 (full_attention)",
                        _ => panic!("{device} {name}: {text}"),
                    };
                    assert!(text.starts_with(expected), "{text}");
                    assert!(text.ends_with("more are for other platforms or left out by a priority list"), "{text}");
                    assert!(text.len() < 3000, "{} bytes: {text}", text.len());
                }
            }
        }
    }
    let (_, h100) = registry("cuda:9.0", Policy::default());
    let plan = h100.plan(&models()["deepseek-v3.2"], &EngineConfig::default())?;
    assert_eq!(plan.layers[0].backend.as_deref(), Some("FLASH_ATTN_MLA_SPARSE"));
    assert!(h100.load_plan(&models()["llama-3.1-8b"], &EngineConfig::default()).is_err(), "nothing of it can run");
    Ok(())
}

#[test]
fn state_space_layers_are_selected_by_type() {
    let wanted = |name: &str| Wanted::parse(name, Origin::Api).expect("a name");
    let engine = EngineConfig::default();
    let (_, open) = registry("H100", Policy::default());
    let backends = |plan: &attache_core::plan::ModelPlan| -> Vec<String> {
        let mut all: Vec<String> = plan.layers.iter().filter_map(|layer| layer.backend.clone()).collect();
        all.sort();
        all.dedup();
        all
    };
    let plan = open.plan(&models()["qwen3-next-80b"], &engine).expect("a plan");
    assert_eq!(backends(&plan), ["FLASH_ATTN", "GDN_ATTN"]);
    let mamba = LayerRequest { state_space: Some(StateSpaceType::Mamba1), ..LayerRequest::default() };
    let (_, other) =
        registry("H100", Policy { per_kind: [(Kind::Mamba, wanted("MAMBA2_ATTN"))].into(), ..Policy::default() });
    let error = other.select(&mamba, None).expect_err("another type's backend").to_string();
    assert!(error.contains("state-space type mamba1 not supported"), "{error}");
    let invariant = EngineConfig { use_batch_invariant: true, ..engine };
    let error = open.plan(&models()["falcon-mamba-7b"], &invariant).expect_err("refused").to_string();
    assert!(error.contains("MAMBA1_ATTN: batch invariance not supported"), "{error}");
}

/// What the registry keeps is what selection says afresh, for thousands of requests on several machines.
#[test]
fn a_cached_answer_equals_an_uncached_one() {
    let formats = ["auto", "fp8", "fp8_e5m2", "nvfp4"].map(|name| KvCacheDtype::parse(name).ok());
    let mut compared = 0;
    for name in ["H100", "B200", "MI300X"] {
        let (catalogue, registry) = registry(name, Policy::default());
        let device = registry.device();
        let policy = Policy { priority: catalogue.priority.clone(), ..Policy::default() };
        for bits in 0..512_u32 {
            let is = |bit: u32| bits >> bit & 1 == 1;
            let request = LayerRequest {
                head_size: [64, 80, 128, 256, 512, 576][bits as usize % 6],
                kv_cache_dtype: formats[bits as usize % 4],
                block_size: is(0).then_some(if is(1) { 48 } else { 64 }),
                use_mla: is(2),
                has_sink: is(3),
                use_sparse: is(4),
                has_sliding_window: is(5),
                use_batch_invariant: is(6),
                num_heads: is(7).then_some(16),
                use_dcp: is(8),
                ..LayerRequest::default()
            };
            let fresh = select(&request, None, &device, &policy, &registry.candidates());
            let expected = fresh.result().map(|chosen| chosen.name().to_owned());
            for _ in 0..2 {
                let kept = registry.select(&request, None).map(|selection| selection.name().to_owned());
                assert_eq!(kept, expected, "{name}: {request:?}");
            }
            compared += usize::from(expected.is_ok());
        }
    }
    assert!(compared > 100, "{compared} requests have an answer");
}
