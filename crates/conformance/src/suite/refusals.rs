//! What is not claimed is refused: one question for each thing that a claim can leave out.
//!
//! Must not know how claims are decided: the core's verdict is taken as it is.

use super::{Recorder, checks};
use crate::{case::Case, execute::cache_form, generate::Space};
use attache_core::{
    AttentionType, Device, Dtype, ErrorCode, KvCacheDtype, LayerConfig, MlaConfig, NumberRule,
    cache::{LAYOUT_HEAD_MAJOR, LAYOUT_LATENT, LAYOUT_TOKEN_MAJOR},
    condition::any_contains,
    runtime::Backend,
    verdict::Effective,
};
use std::sync::Arc;

/// A name that no backend claims.
const UNKNOWN: &str = "conformance_unknown";

/// A change to a layer that is claimed.
type Change<'a> = (String, Box<dyn Fn(&mut LayerConfig<'_>) + 'a>);

pub(super) fn run(backend: &Arc<Backend>, space: &Space, device: &Device, plain: &Case, recorder: &mut Recorder<'_>) {
    let (layout, block_size) = cache_form(plain, backend.descriptor());
    let mut changes = formats(plain);
    changes.extend(sizes(backend, plain));
    changes.extend(features(plain));
    for (what, change) in changes {
        let mut config = match plain.layer_config(&layout, block_size) {
            Ok(config) => config,
            Err(error) => return recorder.record(checks::REFUSALS, Some(plain), &what, Err(error.to_string())),
        };
        change(&mut config);
        let layouts = Effective::new(backend.descriptor(), &config.request, device).layouts();
        let is_claimed = space.claims(&config.request) && (!plain.has_cache() || layouts.contains(&config.layout));
        if is_claimed {
            recorder.skip(checks::REFUSALS);
        } else {
            recorder.record(checks::REFUSALS, None, &what, refused(backend, device, &config));
        }
    }
}

fn refused(backend: &Arc<Backend>, device: &Device, config: &LayerConfig<'_>) -> Result<(), String> {
    match backend.create_layer(config) {
        Err(error) if error.code == ErrorCode::Panic => return Err(error.to_string()),
        Err(_) => return Ok(()),
        Ok(_) => {}
    }
    match backend.validate(&config.request, device) {
        Ok(reasons) if reasons.is_empty() => {
            Err("it is not claimed, and both create_layer and validate accept it".to_owned())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(format!("validate: {error}")),
    }
}

fn change<'a>(what: impl Into<String>, function: impl Fn(&mut LayerConfig<'_>) + 'a) -> Change<'a> {
    (what.into(), Box::new(function))
}

fn formats(plain: &Case) -> Vec<Change<'static>> {
    let mut changes = Vec::new();
    for dtype in Dtype::ALL {
        changes.push(change(format!("dtype {dtype}"), move |config| {
            config.dtype = dtype;
            config.request.dtype = dtype;
        }));
    }
    let attn_types = ["decoder", "encoder", "encoder_only", "encoder_decoder", UNKNOWN].map(AttentionType::parse);
    for attn_type in attn_types {
        changes.push(change(format!("attention type {attn_type}"), move |config| {
            config.attn_type = attn_type.clone();
            config.request.attn_type = attn_type.clone();
        }));
    }
    if plain.has_cache() {
        let names = KvCacheDtype::names().into_iter().chain([UNKNOWN]);
        for dtype in names.map(KvCacheDtype::register).collect::<Vec<_>>() {
            changes.push(change(format!("kv_cache_dtype {dtype}"), move |config| {
                config.kv_cache_dtype = dtype;
                config.request.kv_cache_dtype = Some(dtype);
            }));
        }
        for layout in [LAYOUT_HEAD_MAJOR, LAYOUT_TOKEN_MAJOR, LAYOUT_LATENT, UNKNOWN] {
            changes.push(change(format!("layout {layout}"), move |config| layout.clone_into(&mut config.layout)));
        }
    }
    changes
}

/// Numbers that none of the rules hold, the smallest ones and one far beyond.
fn outside(rules: &[NumberRule], from: u32) -> Vec<u32> {
    let small = (from..from + 600).filter(|size| !any_contains(rules, *size)).take(3);
    let large = [4097, 1 << 20].into_iter().filter(|size| *size > from && !any_contains(rules, *size));
    small.chain(large).collect()
}

fn sizes(backend: &Backend, plain: &Case) -> Vec<Change<'static>> {
    let capability = &backend.descriptor().capability;
    let mut changes = Vec::new();
    let latent = plain.mla.as_ref().map_or(0, |mla| mla.kv_lora_rank as u32);
    for size in outside(&capability.head_sizes, latent + 1) {
        changes.push(change(format!("head_size {size}"), move |config| {
            match &mut config.mla {
                Some(mla) => mla.qk_rope_head_dim = size - mla.kv_lora_rank,
                None => config.head_size_v = size,
            }
            config.head_size = size;
            config.request.head_size = size;
        }));
    }
    if plain.has_cache() {
        let blocks = &capability.block_sizes;
        for size in [1, 3, 8, 16, 17, 1024, 1 << 20].into_iter().filter(|size| !blocks.contains(*size)) {
            changes.push(change(format!("block_size {size}"), move |config| {
                config.block_size = size;
                config.request.block_size = Some(size);
            }));
        }
    }
    if plain.mla.is_some() {
        return changes;
    }
    let own = [NumberRule::Exact(plain.head_size as u32)];
    for size in outside(capability.head_sizes_v.as_deref().unwrap_or(&own), 1) {
        changes.push(change(format!("head_size_v {size}"), move |config| {
            config.head_size_v = size;
            config.request.head_size_v = Some(size);
        }));
    }
    let one = [NumberRule::Exact(1)];
    for ratio in outside(capability.gqa_ratios.as_deref().unwrap_or(&one), 1) {
        changes.push(change(format!("{ratio} query heads for each KV head"), move |config| {
            config.num_heads = config.num_kv_heads.saturating_mul(ratio);
            config.request.num_heads = Some(config.num_heads);
        }));
    }
    changes
}

fn features(plain: &Case) -> Vec<Change<'static>> {
    let mut changes = vec![
        change("sinks", |config| {
            config.sinks = vec![0.5; config.num_heads as usize];
            config.request.has_sink = true;
        }),
        change("sliding window", |config| {
            config.sliding_window = 4;
            config.request.has_sliding_window = true;
        }),
        change("softcap", |config| {
            config.softcap = 2.0;
            config.request.has_softcap = true;
        }),
        change("ALiBi", |config| {
            config.alibi_slopes = vec![0.5; config.num_heads as usize];
            config.request.has_alibi = true;
        }),
        change("chunked-local attention", |config| {
            config.chunked_local = 4;
            config.request.chunked_local = true;
        }),
        change("the LSE", |config| config.request.needs_lse = true),
        change("no causal mask", |config| config.request.use_non_causal = true),
        change("multimodal prefixes", |config| config.request.use_mm_prefix = true),
        change("batch invariance", |config| config.request.use_batch_invariant = true),
        change("relaxed sliding window", |config| config.request.use_rswa = true),
        change("decode context parallelism", |config| config.request.use_dcp = true),
        change("prefill context parallelism", |config| config.request.use_pcp = true),
        change("sparse attention", |config| config.request.use_sparse = true),
        change("attention that is not sparse", |config| config.request.use_sparse = false),
    ];
    if plain.mla.is_some() {
        changes.push(change("a layer that is not MLA", |config| {
            config.mla = None;
            config.head_size_v = config.head_size;
            config.request.use_mla = false;
            config.request.num_kv_heads = Some(1);
        }));
        return changes;
    }
    changes.push(change("one scale for each head", |config| {
        config.num_heads *= 2;
        config.num_kv_heads *= 2;
        config.request.num_heads = Some(config.num_heads);
        config.request.num_kv_heads = Some(config.num_kv_heads);
        config.k_scales = vec![0.5; config.num_kv_heads as usize];
        config.v_scales.clone_from(&config.k_scales);
        config.request.use_per_head_quant_scales = true;
    }));
    changes.push(change("multi-head latent attention", |config| {
        config.mla = Some(MlaConfig {
            kv_lora_rank: 48,
            qk_nope_head_dim: 32,
            qk_rope_head_dim: 16,
            v_head_dim: 32,
            kv_b_proj: None,
        });
        (config.num_kv_heads, config.head_size, config.head_size_v) = (1, 64, 48);
        config.request.use_mla = true;
        config.request.head_size = 64;
        config.request.num_kv_heads = None;
    }));
    changes
}
