//! What a layer is, once a backend was chosen for it.

use crate::{
    error::{BackendError, Result},
    kv_cache_dtype::KvCacheDtype,
    request::{AttentionType, Dtype, LayerRequest},
    tensor::TensorView,
};

/// The dimensions of multi-head latent attention.
#[derive(Clone, Copy, Debug)]
pub struct MlaConfig<'a> {
    /// Elements of the latent part of a row.
    pub kv_lora_rank: u32,
    /// Elements of a query or key head without rotary position.
    pub qk_nope_head_dim: u32,
    /// Elements of a query or key head with rotary position.
    pub qk_rope_head_dim: u32,
    /// Elements of an up-projected value head.
    pub v_head_dim: u32,
    /// `[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]`, per head `[k_nope | v]`.
    /// Without it only `forward_decode` works.
    pub kv_b_proj: Option<TensorView<'a>>,
}

/// What a layer is: `create_layer`'s argument.
#[derive(Clone, Debug)]
pub struct LayerConfig<'a> {
    /// The request that the layer was selected by.
    pub request: LayerRequest,
    /// The layer's name, for messages.
    pub name: String,
    /// Query heads.
    pub num_heads: u32,
    /// KV heads; divides `num_heads`. MLA: 1.
    pub num_kv_heads: u32,
    /// Elements of a query or key head. MLA: kv_lora_rank + qk_rope_head_dim.
    pub head_size: u32,
    /// Elements of a value head. MLA: kv_lora_rank.
    pub head_size_v: u32,
    /// Element type of q, k, v and out.
    pub dtype: Dtype,
    /// Cache element format.
    pub kv_cache_dtype: KvCacheDtype,
    /// Cache layout by name.
    pub layout: String,
    /// Tokens of a block.
    pub block_size: u32,
    /// Who attends to whom.
    pub attn_type: AttentionType,
    /// Softmax scale.
    pub scale: f64,
    /// Logit soft-cap; 0 or less = off.
    pub softcap: f64,
    /// Window in tokens, the current one included: the token at p sees p−w+1 … p, and without
    /// causal masking every j with |p−j| < w. 0 or less = off.
    pub sliding_window: i64,
    /// Tokens visible to the right without causal masking; −1 = as the window says.
    pub window_right: i64,
    /// Tokens of a chunk of chunked-local attention; 0 or less = off.
    pub chunked_local: i64,
    /// One logit per query head, or empty.
    pub sinks: Vec<f32>,
    /// One slope per query head, or empty.
    pub alibi_slopes: Vec<f32>,
    /// Scale of stored keys: empty = 1, one value, or one per KV head.
    pub k_scales: Vec<f32>,
    /// Scale of stored values: likewise.
    pub v_scales: Vec<f32>,
    /// Present for multi-head latent attention.
    pub mla: Option<MlaConfig<'a>>,
    /// Options for this layer, by name.
    pub options: Vec<(String, String)>,
}

impl LayerConfig<'_> {
    /// A plain layer: full causal attention, scale `head_size`^−½, cache in the compute dtype.
    #[must_use]
    pub fn new(num_heads: u32, num_kv_heads: u32, head_size: u32, dtype: Dtype) -> Self {
        Self {
            request: LayerRequest {
                head_size,
                dtype,
                num_heads: Some(num_heads),
                num_kv_heads: Some(num_kv_heads),
                ..LayerRequest::default()
            },
            name: String::new(),
            num_heads,
            num_kv_heads,
            head_size,
            head_size_v: head_size,
            dtype,
            kv_cache_dtype: KvCacheDtype::AUTO,
            layout: "head_major".to_owned(),
            block_size: 16,
            attn_type: AttentionType::Decoder,
            scale: f64::from(head_size).powf(-0.5),
            softcap: 0.0,
            sliding_window: 0,
            window_right: -1,
            chunked_local: 0,
            sinks: Vec::new(),
            alibi_slopes: Vec::new(),
            k_scales: Vec::new(),
            v_scales: Vec::new(),
            mla: None,
            options: Vec::new(),
        }
    }

    /// Checks what every backend would have to check.
    ///
    /// # Errors
    /// Names the field, what was found and what is valid.
    pub fn check(&self) -> Result<()> {
        if self.num_heads == 0 || self.num_kv_heads == 0 || !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(BackendError::invalid(format!(
                "num_heads {} must be a positive multiple of num_kv_heads {}",
                self.num_heads, self.num_kv_heads
            )));
        }
        if self.head_size == 0 || self.head_size_v == 0 {
            return Err(BackendError::invalid(format!(
                "head_size {} and head_size_v {} must be above 0",
                self.head_size, self.head_size_v
            )));
        }
        if self.block_size == 0 {
            return Err(BackendError::invalid("block_size must be above 0"));
        }
        if !self.scale.is_finite() || !self.softcap.is_finite() {
            return Err(BackendError::invalid(format!(
                "scale {} and softcap {} must be finite",
                self.scale, self.softcap
            )));
        }
        for (name, values) in [("sinks", &self.sinks), ("alibi_slopes", &self.alibi_slopes)] {
            if !values.is_empty() && values.len() != self.num_heads as usize {
                return Err(BackendError::invalid(format!(
                    "{name} has {} values; expected none or one per query head ({})",
                    values.len(),
                    self.num_heads
                )));
            }
            if values.iter().any(|value| value.is_nan()) {
                return Err(BackendError::invalid(format!("{name} holds NaN")));
            }
        }
        for (name, values) in [("k_scales", &self.k_scales), ("v_scales", &self.v_scales)] {
            if values.len() > 1 && values.len() != self.num_kv_heads as usize {
                return Err(BackendError::invalid(format!(
                    "{name} has {} values; expected none, one, or one per KV head ({})",
                    values.len(),
                    self.num_kv_heads
                )));
            }
            if let Some(bad) = values.iter().find(|scale| !(scale.is_finite() && **scale > 0.0)) {
                return Err(BackendError::invalid(format!("{name} holds {bad}; a scale must be finite and above 0")));
            }
        }
        if let Some(mla) = &self.mla {
            let (latent, row) = (mla.kv_lora_rank, mla.kv_lora_rank.saturating_add(mla.qk_rope_head_dim));
            if latent == 0 || self.head_size != row || self.head_size_v != latent || self.num_kv_heads != 1 {
                return Err(BackendError::invalid(format!(
                    "MLA needs head_size = kv_lora_rank + qk_rope_head_dim = {row}, head_size_v = kv_lora_rank = {latent} and one KV head; found {}, {} and {}",
                    self.head_size, self.head_size_v, self.num_kv_heads
                )));
            }
            if let Some(projection) = &mla.kv_b_proj {
                let rows = u64::from(self.num_heads) * (u64::from(mla.qk_nope_head_dim) + u64::from(mla.v_head_dim));
                let found = projection.shape();
                if found.len() != 2 || found[0] as u64 != rows || found[1] as u64 != u64::from(latent) {
                    return Err(BackendError::invalid(format!(
                        "kv_b_proj has shape {found:?}; expected [{rows}, {latent}]"
                    )));
                }
            }
        }
        Ok(())
    }
}
