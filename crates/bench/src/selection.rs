//! Selection, planning and discovery.

use crate::{Row, median};
use attache_core::{
    AttentionType, BackendDescriptor, BlockSizes, Device, Dtype, KvCacheDtype, LayerRequest, NumberRule,
    PluginMetadata,
    manifest::{MANIFEST_SUFFIX, Manifest},
    plan::{EngineConfig, LayerDescription, ModelDescription},
    policy::{Origin, Policy},
    registry::Registry,
    selector::{Candidate, Source, select},
};
use std::{hint::black_box, path::PathBuf, sync::Arc};

/// Backends among which is chosen.
const BACKENDS: usize = 40;
const MANIFESTS: usize = 100;
const LAYERS: usize = 80;

fn descriptor(index: usize) -> BackendDescriptor {
    BackendDescriptor::builder(&format!("BACKEND_{index}"))
        .platform("cpu")
        .head_sizes([NumberRule::multiples(8, 8..=64 + 8 * index as u32)])
        .gqa_ratios([NumberRule::ANY])
        .dtypes([Dtype::BF16, Dtype::F16])
        .kv_cache_dtypes(["auto", "fp8"])
        .block_sizes(BlockSizes::multiples_of(16))
        .layouts(["head_major", "token_major"])
        .attn_types([AttentionType::Decoder])
        .features(if index.is_multiple_of(3) { vec!["sink", "sliding_window"] } else { vec!["sliding_window"] })
        .architectures(["*"])
        .rank(index as i32)
        .build()
}

fn metadata(index: usize) -> PluginMetadata {
    PluginMetadata {
        name: format!("plugin_{index}"),
        vendor: "bench".to_owned(),
        version: semver_of(1),
        sdk_version: semver_of(1),
        abi_generation_min: 1,
        abi_generation_max: 1,
    }
}

fn semver_of(major: u64) -> attache_core::plugin::Version {
    attache_core::plugin::Version::new(major, 0, 0)
}

fn candidates() -> Vec<Candidate> {
    (0..BACKENDS)
        .map(|index| Candidate {
            descriptor: Arc::new(descriptor(index)),
            plugin: Arc::new(metadata(index)),
            source: Source::Catalogue(PathBuf::from("bench")),
            unavailable: Vec::new(),
        })
        .collect()
}

fn per_call(calls: u32, mut function: impl FnMut()) -> f64 {
    median(7, || (0..calls).for_each(|_| function())).as_secs_f64() * 1e3 / f64::from(calls)
}

pub fn run(filter: &str, show: &mut dyn FnMut(Row)) {
    let wanted = |case: &str| case.contains(filter);
    let mut row = |case: &str, ms: f64| show(Row { case: case.to_owned(), ms, gflops: None, kv_gbs: None });
    let request = LayerRequest {
        kv_cache_dtype: Some(KvCacheDtype::AUTO),
        num_heads: Some(32),
        num_kv_heads: Some(8),
        has_sink: true,
        ..LayerRequest::default()
    };
    let registry = Registry::builder().linked(false).catalogue(candidates()).build();
    if wanted("select_cached") {
        let ms = per_call(100_000, || {
            black_box(registry.select(black_box(&request), None)).ok();
        });
        row("select_cached", ms);
    }
    if wanted("select_uncached_40") {
        let (device, policy, candidates) = (Device::host_cpu(), Policy::default(), candidates());
        let ms = per_call(2000, || {
            black_box(select(black_box(&request), None, &device, &policy, &candidates));
        });
        row("select_uncached_40", ms);
    }
    if wanted("plan_80_layers_40_backends") {
        let layer = |index: usize| LayerDescription {
            sliding_window: index.is_multiple_of(2).then_some(512),
            kind: if index.is_multiple_of(2) {
                attache_core::Kind::SlidingWindow
            } else {
                attache_core::Kind::FullAttention
            },
            ..LayerDescription::new(index, 32, 8, 128)
        };
        let layers = (0..LAYERS).map(layer).collect();
        let model = ModelDescription { model_type: "bench".to_owned(), dtype: None, layers };
        let engine = EngineConfig::default();
        let ms = per_call(200, || {
            black_box(registry.plan(black_box(&model), &engine)).ok();
        });
        row("plan_80_layers_40_backends", ms);
    }
    if wanted("discover_100_manifests") {
        match manifests() {
            Ok(folder) => {
                let ms = per_call(10, || {
                    let found = Registry::builder().linked(false).directory(folder.path(), Origin::Api).build();
                    assert_eq!(found.candidates().len(), MANIFESTS);
                });
                row("discover_100_manifests", ms);
            }
            Err(error) => eprintln!("discover_100_manifests: {error}"),
        }
    }
}

/// A folder of manifests whose libraries would not open: discovery must not try.
fn manifests() -> Result<tempfile::TempDir, Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    for index in 0..MANIFESTS {
        let plugin = metadata(index);
        let library = format!("lib{index}.so");
        std::fs::write(folder.path().join(&library), "not a library")?;
        let manifest = Manifest {
            name: plugin.name.clone(),
            vendor: plugin.vendor,
            version: plugin.version,
            sdk_version: plugin.sdk_version,
            abi_generation_min: 1,
            abi_generation_max: 1,
            library,
            sha256: "0".repeat(64),
            backends: vec![descriptor(index)],
        };
        std::fs::write(folder.path().join(format!("{}{MANIFEST_SUFFIX}", plugin.name)), manifest.to_toml()?)?;
    }
    Ok(folder)
}
