//! The examples of docs/engine-authors.md, compiled and run.

use attache_core::{
    BatchLimits, BatchView, Dtype, LayerConfig, TensorView, TensorViewMut,
    config::{Config, Overrides},
    plan::{EngineConfig, describe},
    registry::{LoadedPlan, Registry},
    runtime::{ExecContext, Forward, HostServices, InlinePool, KvCache},
};
use attache_plugin_cpu as _;
use attache_tests::assert_shows_examples;
use std::sync::Arc;

// example begins
fn one_step() -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    // Which backend? `registry.explain` says why.
    let registry = Registry::builder().default_directories().build();
    let config = LayerConfig::new(8, 2, 64, Dtype::F32); // query heads, KV heads, head size
    let backend = registry.backend(&config.request, None)?.backend;

    // A layer, its cache of four blocks, and the memory that its calls need.
    let layer = backend.create_layer(&config)?;
    let mut cache = KvCache::allocate(&backend.kv_cache_spec(&config)?, 4)?;
    let mut context = ExecContext::new(HostServices::new(Arc::new(InlinePool)));
    let limits = BatchLimits {
        max_num_requests: 1,
        max_num_tokens: 3,
        max_query_len: 3,
        max_seq_len: 64,
        parallelism: context.parallelism(),
    };
    context.reserve_workspace(layer.workspace_size(&limits)?);

    // Three new tokens of one request go to block 2 …
    let (k, v, q) = (vec![0.1_f32; 3 * 2 * 64], vec![1.0_f32; 3 * 2 * 64], vec![0.2_f32; 3 * 8 * 64]);
    let slots: Vec<i64> = (0..3).map(|token| 2 * i64::from(config.block_size) + token).collect();
    layer.write_kv(
        &mut context,
        &TensorView::from_slice(&k, &[3, 2, 64])?,
        Some(&TensorView::from_slice(&v, &[3, 2, 64])?),
        &TensorView::from_slice(&slots, &[3])?,
        &mut cache,
    )?;

    // … and attend.
    let (query_start_loc, seq_lens, block_table) = ([0, 3], [3], [2]);
    let plan = layer.plan(&BatchView::from_host(&query_start_loc, &seq_lens, Some((&block_table, 1)), 4)?)?;
    let mut out = vec![0.0_f32; 3 * 8 * 64];
    layer.forward(
        &mut context,
        Forward {
            q: TensorView::from_slice(&q, &[3, 8, 64])?,
            k: None,
            v: None,
            cache: Some(&cache),
            plan: &plan,
            out: TensorViewMut::from_slice(&mut out, &[3, 8, 64])?,
            lse: None,
            topk_indices: None,
        },
    )?;
    Ok(out)
}
// example ends

// example begins
fn whole_model(config_json: &str) -> Result<LoadedPlan, Box<dyn std::error::Error>> {
    // What the operator wants: attache.toml and ATTACHE_… variables.
    let registry = Config::load(None, &Overrides::default())?.registry().build();
    let engine = EngineConfig { dtype: Dtype::F32, use_batch_invariant: true, ..EngineConfig::default() };
    let loaded = registry.load_plan(&describe(config_json)?, &engine)?;
    for warning in &loaded.plan.warnings {
        eprintln!("{warning}");
    }
    for (layer, backend) in loaded.plan.layers.iter().zip(&loaded.backends) {
        // Absent for layers without attention, for instance state-space ones.
        let name = backend.as_ref().map_or("none", |backend| backend.name());
        println!("{}: {} on {name}: {}", layer.name, layer.kind, layer.why);
    }
    Ok(loaded)
}
// example ends

#[test]
fn the_examples_run_and_the_document_shows_them() {
    // Values of 1 everywhere give 1 everywhere.
    assert!(one_step().expect("it runs").iter().all(|value| (value - 1.0).abs() < 1e-6));
    let llama = r#"{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}"#;
    let loaded = whole_model(llama).expect("a plan");
    assert_eq!((loaded.plan.block_size, loaded.plan.kv_layout.as_deref()), (Some(16), Some("head_major")));
    assert!(loaded.backends.iter().flatten().all(|backend| backend.name() == "CPU_ATTN"));
    assert_shows_examples(include_str!("../docs/engine-authors.md"), include_str!("engine_author.rs"));
}
