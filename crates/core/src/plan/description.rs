//! A model as the planner sees it: its layers and what each of them is.

use crate::{
    kind::Kind,
    kv_cache_dtype::KvCacheDtype,
    request::{AttentionType, Dtype, LayerRequest, StateSpaceType},
};
use serde::{Deserialize, Serialize};

/// The dimensions of multi-head latent attention.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
pub struct MlaDimensions {
    /// Elements of the latent part of a row.
    pub kv_lora_rank: u32,
    /// Elements of a query or key head without rotary position.
    pub qk_nope_head_dim: u32,
    /// Elements of a query or key head with rotary position.
    pub qk_rope_head_dim: u32,
    /// Elements of an up-projected value head.
    pub v_head_dim: u32,
}

/// One layer of a model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct LayerDescription {
    /// Position in the model; encoder layers first where there are two halves.
    pub index: usize,
    /// Name, for messages.
    pub name: String,
    /// Its KV-cache group. Kinds that cannot be derived from a request come from here.
    pub kind: Kind,
    /// Query heads.
    pub num_heads: u32,
    /// KV heads. MLA: 1.
    pub num_kv_heads: u32,
    /// Elements of a query or key head. MLA: kv_lora_rank + qk_rope_head_dim.
    pub head_size: u32,
    /// Elements of a value head. MLA: kv_lora_rank.
    pub head_size_v: u32,
    /// Who attends to whom.
    pub attn_type: AttentionType,
    /// Window in tokens, the current one included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<u32>,
    /// Tokens of a chunk of chunked-local attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunked_local: Option<u32>,
    /// Logit soft-cap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f64>,
    /// Attention sinks.
    pub has_sink: bool,
    /// ALiBi position bias.
    pub has_alibi: bool,
    /// Sparse attention with an indexer.
    pub use_sparse: bool,
    /// Bidirectional attention inside multimodal prefixes.
    pub use_mm_prefix: bool,
    /// Present for multi-head latent attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mla: Option<MlaDimensions>,
    /// Present for state-space and linear-attention layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_space: Option<StateSpaceType>,
}

impl LayerDescription {
    /// A plain decoder layer of full attention.
    #[must_use]
    pub fn new(index: usize, num_heads: u32, num_kv_heads: u32, head_size: u32) -> Self {
        Self {
            index,
            name: format!("layers.{index}"),
            kind: Kind::FullAttention,
            num_heads,
            num_kv_heads,
            head_size,
            head_size_v: head_size,
            attn_type: AttentionType::Decoder,
            sliding_window: None,
            chunked_local: None,
            softcap: None,
            has_sink: false,
            has_alibi: false,
            use_sparse: false,
            use_mm_prefix: false,
            mla: None,
            state_space: None,
        }
    }

    /// What the layer asks a backend for, under an engine's settings.
    #[must_use]
    pub fn request(&self, engine: &EngineConfig) -> LayerRequest {
        if let Some(sort) = self.state_space {
            return LayerRequest {
                dtype: engine.dtype,
                use_batch_invariant: engine.use_batch_invariant,
                use_kv_connector: engine.use_kv_connector,
                use_pcp: engine.prefill_context_parallel_size > 1,
                state_space: Some(sort),
                ..LayerRequest::default()
            };
        }
        let without_cache = self.attn_type == AttentionType::EncoderOnly;
        LayerRequest {
            head_size: self.head_size,
            dtype: engine.dtype,
            // Layers without a cache do not care for its format.
            kv_cache_dtype: if without_cache { None } else { engine.kv_cache_dtype },
            block_size: engine.block_size,
            use_mla: self.mla.is_some(),
            has_sink: self.has_sink,
            use_sparse: self.use_sparse,
            use_mm_prefix: self.use_mm_prefix,
            use_per_head_quant_scales: engine.use_per_head_quant_scales,
            attn_type: self.attn_type.clone(),
            num_heads: Some(self.num_heads),
            has_sliding_window: self.sliding_window.is_some(),
            use_non_causal: engine.use_non_causal,
            use_batch_invariant: engine.use_batch_invariant,
            use_kv_connector: engine.use_kv_connector,
            use_pcp: engine.prefill_context_parallel_size > 1,
            use_dcp: engine.decode_context_parallel_size > 1,
            // The drafter always runs full-length blocks.
            use_adaptive_verification: engine.use_adaptive_verification && !engine.is_drafter,
            use_rswa: engine.use_rswa,
            head_size_v: (self.head_size_v != self.head_size && self.mla.is_none()).then_some(self.head_size_v),
            num_kv_heads: self.mla.is_none().then_some(self.num_kv_heads),
            has_softcap: self.softcap.is_some(),
            has_alibi: self.has_alibi,
            chunked_local: self.chunked_local.is_some(),
            needs_lse: engine.needs_lse,
            state_space: None,
        }
    }
}

/// A model's layers.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelDescription {
    /// The family as its configuration names it.
    pub model_type: String,
    /// The dtype that the weights are in, where stated.
    pub dtype: Option<Dtype>,
    /// The layers.
    pub layers: Vec<LayerDescription>,
}

/// The engine's settings that take part in selection. Requests are made from it and a layer's
/// description, so that an engine cannot forget a flag.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Compute dtype.
    pub dtype: Dtype,
    /// Cache element format; absent = not stated.
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Tokens of a block, when the user fixed it.
    pub block_size: Option<u32>,
    /// One KV scale per head instead of one per tensor.
    pub use_per_head_quant_scales: bool,
    /// Decoder attention without the causal mask.
    pub use_non_causal: bool,
    /// Results must not depend on the batch, bit for bit.
    pub use_batch_invariant: bool,
    /// A connector moves the cache between machines.
    pub use_kv_connector: bool,
    /// Ranks that share a prompt's prefill.
    pub prefill_context_parallel_size: u32,
    /// Ranks that share a request's cache while decoding.
    pub decode_context_parallel_size: u32,
    /// Speculative decoding verifies an adaptive number of tokens.
    pub use_adaptive_verification: bool,
    /// The layers belong to the drafter of speculative decoding.
    pub is_drafter: bool,
    /// Relaxed sliding-window attention.
    pub use_rswa: bool,
    /// The engine needs the log-sum-exp of each row.
    pub needs_lse: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            dtype: Dtype::BF16,
            kv_cache_dtype: None,
            block_size: None,
            use_per_head_quant_scales: false,
            use_non_causal: false,
            use_batch_invariant: false,
            use_kv_connector: false,
            prefill_context_parallel_size: 1,
            decode_context_parallel_size: 1,
            use_adaptive_verification: false,
            is_drafter: false,
            use_rswa: false,
            needs_lse: false,
        }
    }
}
