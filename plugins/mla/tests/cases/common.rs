//! The plugin as an engine has it, and cases made from a few numbers.

use attache_conformance::{Case, Mla, MlaForm, Values, rng::Rng};
use attache_core::{
    AttentionType, Dtype,
    plugin::{PluginMetadata, linked_plugins},
    runtime::{Backend, descriptors, interface::backend_interface},
};
use attache_plugin_mla as _;
use std::sync::Arc;

/// The backend, with options.
pub fn backend(options: &[(&str, &str)]) -> Result<Arc<Backend>, attache_core::BackendError> {
    let plugin = linked_plugins().next().expect("the plugin is linked in");
    let table = backend_interface(plugin.interface).expect("the interface");
    let metadata: PluginMetadata = attache_core::private::serde_json::from_str(plugin.metadata).expect("metadata");
    let descriptor = descriptors(table).expect("descriptors").remove(0);
    let options: Vec<_> = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Backend::create(table, 0, Arc::new(descriptor), metadata, "linked in".to_owned(), &options)
}

/// The dimensions of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub heads: usize,
    pub rank: usize,
    pub rope: usize,
    pub nope: usize,
    pub v: usize,
}

/// DeepSeek's, with fewer heads.
pub const DEEPSEEK: Shape = Shape { heads: 3, rank: 512, rope: 64, nope: 128, v: 128 };
/// The bundled model's.
pub const TINY: Shape = Shape { heads: 4, rank: 48, rope: 16, nope: 32, v: 32 };
/// Nothing is a multiple of anything.
pub const ODD: Shape = Shape { heads: 5, rank: 37, rope: 7, nope: 19, v: 23 };

/// A causal case; `requests` are (new tokens, all tokens).
pub fn case(shape: Shape, dtype: Dtype, form: MlaForm, requests: &[(usize, usize)], seed: u64) -> Case {
    let Shape { heads, rank, rope, nope, v } = shape;
    let mut rng = Rng::new(seed);
    let mut normal = |count: usize, spread: f64| {
        Values::from_f64(dtype, (0..count).map(|_| rng.normal() * spread).collect::<Vec<_>>())
    };
    let kv_b_proj = normal(heads * (nope + v) * rank, (rank as f64).powf(-0.5));
    let k = normal(requests.iter().map(|(_, all)| all).sum::<usize>() * (rank + rope), 1.0);
    let tokens = requests.iter().map(|(new, _)| new).sum::<usize>();
    // An absorbed query is as large as what a query of unit elements becomes in the latent space.
    let (q_size, spread) = match form {
        MlaForm::Absorbed => (rank + rope, (nope as f64 / rank as f64).sqrt()),
        MlaForm::Expanded | MlaForm::Auto => (nope + rope, 1.0),
    };
    let mut query_start_loc = vec![0];
    query_start_loc.extend(requests.iter().scan(0, |sum, (new, _)| {
        *sum += *new as i32;
        Some(*sum)
    }));
    Case {
        q: normal(tokens * heads * q_size, spread),
        k,
        v: None,
        num_heads: heads,
        num_kv_heads: 1,
        head_size: rank + rope,
        head_size_v: rank,
        query_start_loc,
        seq_lens: requests.iter().map(|(_, all)| *all as i32).collect(),
        scale: ((nope + rope) as f64).powf(-0.5),
        causal: true,
        causal_per_request: None,
        sliding_window: 0,
        window_right: -1,
        chunked_local: 0,
        softcap: 0.0,
        sinks: Vec::new(),
        alibi_slopes: Vec::new(),
        k_scales: Vec::new(),
        v_scales: Vec::new(),
        prefix_spans: Vec::new(),
        topk: None,
        attn_type: AttentionType::Decoder,
        block_size: None,
        layout: None,
        kv_cache_dtype: None,
        mla: Some(Mla {
            kv_lora_rank: rank,
            qk_rope_head_dim: rope,
            qk_nope_head_dim: nope,
            v_head_dim: v,
            kv_b_proj: Some(kv_b_proj),
            form,
        }),
        lse: true,
        seed,
    }
}
