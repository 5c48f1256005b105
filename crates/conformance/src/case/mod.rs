//! One attention call: what a case is, and what it asks for.
//!
//! Owns the meaning of a case and its checks. Must not know files (`file`), backends, or what the
//! right answer is.

mod error;
mod file;
mod part;

pub use error::CaseError;
pub use file::{METADATA_KEYS, TENSORS, write_output};

use crate::values::Values;
use attache_core::{AttentionType, Dtype, KvCacheDtype, LayerConfig, LayerRequest, MlaConfig};

/// The tokens of a block when neither the case nor the backend says otherwise.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// The largest head count, head size and block size of a case.
pub const MAX_SIZE: usize = 1 << 16;

/// In which form an MLA layer is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlaForm {
    /// `forward_decode`: q and out in the latent space.
    Absorbed,
    /// `forward_prefill`: q and out per head, keys and values expanded.
    Expanded,
    /// `forward`: as expanded, and the backend chooses the way.
    Auto,
}

impl MlaForm {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::Absorbed, Self::Expanded, Self::Auto];

    /// The name in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Absorbed => "absorbed",
            Self::Expanded => "expanded",
            Self::Auto => "auto",
        }
    }
}

/// What makes a case one of multi-head latent attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Mla {
    /// Elements of the latent part of a row.
    pub kv_lora_rank: usize,
    /// Elements of the rotary part of a row.
    pub qk_rope_head_dim: usize,
    /// Elements of a query head without rotary position; 0 = not stated (absorbed form only).
    pub qk_nope_head_dim: usize,
    /// Elements of an up-projected value head; 0 = not stated (absorbed form only).
    pub v_head_dim: usize,
    /// `[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]`; needed unless absorbed.
    pub kv_b_proj: Option<Values>,
    /// The form.
    pub form: MlaForm,
}

/// The rows that each query of sparse attention may read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopK {
    /// `[tokens, width]` positions within the request; −1 is padding.
    pub indices: Vec<i32>,
    /// Entries per query.
    pub width: usize,
}

/// One attention call: dense inputs and every option.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Queries `[Σq, num_heads, q_head_size]`.
    pub q: Values,
    /// Keys `[Σkv, num_kv_heads, head_size]`, all tokens of each sequence in order; MLA: rows
    /// `[Σkv, kv_lora_rank + qk_rope_head_dim]`.
    pub k: Values,
    /// Values `[Σkv, num_kv_heads, head_size_v]`; MLA: none.
    pub v: Option<Values>,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads. MLA: 1.
    pub num_kv_heads: usize,
    /// Elements of a key head. MLA: kv_lora_rank + qk_rope_head_dim.
    pub head_size: usize,
    /// Elements of a value head. MLA: kv_lora_rank.
    pub head_size_v: usize,
    /// `[n + 1]`.
    pub query_start_loc: Vec<i32>,
    /// `[n]`: keys of each sequence, the new ones included; cross attention: the encoder's.
    pub seq_lens: Vec<i32>,
    /// Softmax scale.
    pub scale: f64,
    /// No query sees a later key.
    pub causal: bool,
    /// `[n]`, replaces `causal` request by request.
    pub causal_per_request: Option<Vec<bool>>,
    /// Window in tokens, the current one included; 0 or less = off.
    pub sliding_window: i64,
    /// Tokens visible to the right; −1 = as the window says.
    pub window_right: i64,
    /// Tokens of a chunk; 0 or less = off.
    pub chunked_local: i64,
    /// Soft-cap on logits; 0 or less = off.
    pub softcap: f64,
    /// One logit a query head, or empty.
    pub sinks: Vec<f32>,
    /// One slope a query head, or empty.
    pub alibi_slopes: Vec<f32>,
    /// Scale of stored keys: empty, one, or one a KV head.
    pub k_scales: Vec<f32>,
    /// Scale of stored values: likewise.
    pub v_scales: Vec<f32>,
    /// Multimodal prefixes: request, first position, one past the last.
    pub prefix_spans: Vec<[i32; 3]>,
    /// Sparse attention.
    pub topk: Option<TopK>,
    /// Who attends to whom.
    pub attn_type: AttentionType,
    /// Tokens of a block; absent = the backend's choice.
    pub block_size: Option<u32>,
    /// Cache layout by name; absent = the backend's first.
    pub layout: Option<String>,
    /// Cache element format; absent = not stated.
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Present for multi-head latent attention.
    pub mla: Option<Mla>,
    /// Ask for the log-sum-exp of each row.
    pub lse: bool,
    /// Seed of the cache's shuffling.
    pub seed: u64,
}

impl Case {
    /// The compute dtype.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.q.dtype()
    }

    /// Query tokens of all requests.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.query_start_loc.last().map_or(0, |last| usize::try_from(*last).unwrap_or(0))
    }

    /// Key tokens of all requests.
    #[must_use]
    pub fn num_kv_tokens(&self) -> usize {
        self.seq_lens.iter().map(|len| usize::try_from(*len).unwrap_or(0)).sum()
    }

    /// Elements of a query head as `q` has them.
    #[must_use]
    pub fn q_head_size(&self) -> usize {
        match &self.mla {
            Some(mla) if mla.form != MlaForm::Absorbed => mla.qk_nope_head_dim.saturating_add(mla.qk_rope_head_dim),
            _ => self.head_size,
        }
    }

    /// Elements of an output head.
    #[must_use]
    pub fn out_head_size(&self) -> usize {
        match &self.mla {
            Some(mla) if mla.form != MlaForm::Absorbed => mla.v_head_dim,
            _ => self.head_size_v,
        }
    }

    /// Whether the layer keeps a cache.
    #[must_use]
    pub fn has_cache(&self) -> bool {
        !matches!(self.attn_type, AttentionType::Encoder | AttentionType::EncoderOnly)
    }

    /// Whether any request has no causal mask.
    #[must_use]
    pub fn is_non_causal(&self) -> bool {
        match &self.causal_per_request {
            Some(flags) => flags.contains(&false),
            None => !self.causal,
        }
    }

    /// What the layer asks a backend for.
    #[must_use]
    pub fn request(&self) -> LayerRequest {
        let is_mla = self.mla.is_some();
        let decoder = self.attn_type == AttentionType::Decoder;
        LayerRequest {
            head_size: self.head_size as u32,
            dtype: self.dtype(),
            kv_cache_dtype: self.kv_cache_dtype.filter(|_| self.has_cache()),
            block_size: self.block_size,
            use_mla: is_mla,
            has_sink: !self.sinks.is_empty(),
            use_sparse: self.topk.is_some(),
            use_mm_prefix: !self.prefix_spans.is_empty(),
            use_per_head_quant_scales: self.k_scales.len().max(self.v_scales.len()) > 1,
            attn_type: self.attn_type.clone(),
            num_heads: Some(self.num_heads as u32),
            has_sliding_window: self.sliding_window > 0,
            use_non_causal: decoder && self.is_non_causal(),
            head_size_v: (!is_mla && self.head_size_v != self.head_size).then_some(self.head_size_v as u32),
            num_kv_heads: (!is_mla).then_some(self.num_kv_heads as u32),
            has_softcap: self.softcap > 0.0,
            has_alibi: !self.alibi_slopes.is_empty(),
            chunked_local: self.chunked_local > 0,
            needs_lse: self.lse,
            ..LayerRequest::default()
        }
    }

    /// The layer's configuration for a cache of this layout and block size.
    ///
    /// # Errors
    /// When `kv_b_proj` does not have its shape.
    pub fn layer_config(&self, layout: &str, block_size: u32) -> attache_core::error::Result<LayerConfig<'_>> {
        let mla = match &self.mla {
            None => None,
            Some(mla) => Some(MlaConfig {
                kv_lora_rank: mla.kv_lora_rank as u32,
                qk_nope_head_dim: mla.qk_nope_head_dim as u32,
                qk_rope_head_dim: mla.qk_rope_head_dim as u32,
                v_head_dim: mla.v_head_dim as u32,
                kv_b_proj: match &mla.kv_b_proj {
                    Some(projection) => {
                        let rows = self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim);
                        Some(projection.view(&[rows, mla.kv_lora_rank])?)
                    }
                    None => None,
                },
            }),
        };
        Ok(LayerConfig {
            request: self.request(),
            name: "case".to_owned(),
            head_size_v: self.head_size_v as u32,
            kv_cache_dtype: self.kv_cache_dtype.unwrap_or(KvCacheDtype::AUTO),
            layout: layout.to_owned(),
            block_size,
            attn_type: self.attn_type.clone(),
            scale: self.scale,
            softcap: self.softcap,
            sliding_window: self.sliding_window,
            window_right: self.window_right,
            chunked_local: self.chunked_local,
            sinks: self.sinks.clone(),
            alibi_slopes: self.alibi_slopes.clone(),
            k_scales: self.k_scales.clone(),
            v_scales: self.v_scales.clone(),
            mla,
            ..LayerConfig::new(self.num_heads as u32, self.num_kv_heads as u32, self.head_size as u32, self.dtype())
        })
    }

    /// Checks that sizes fit each other and values make sense.
    ///
    /// # Errors
    /// Names the tensor or key, what was found and what is right.
    pub fn check(&self) -> Result<(), CaseError> {
        self.check_sizes()?;
        self.check_batch()?;
        self.check_numbers()?;
        let dtype = self.dtype();
        // Lengths in a file may be anything: what overflows is no size that a tensor has.
        let size = |rows: usize, heads: usize, size: usize| rows.saturating_mul(heads).saturating_mul(size);
        let (tokens, rows) = (self.num_tokens(), self.num_kv_tokens());
        let tensors = [
            ("q", Some(&self.q), size(tokens, self.num_heads, self.q_head_size())),
            ("k", Some(&self.k), size(rows, self.num_kv_heads, self.head_size)),
            ("v", self.v.as_ref(), size(rows, self.num_kv_heads, self.head_size_v)),
        ];
        for (tensor, values, expected) in tensors {
            let Some(values) = values else { continue };
            if values.len() != expected {
                return Err(CaseError::lengths(format!("{tensor} has {} elements; expected {expected}", values.len())));
            }
            if values.dtype() != dtype {
                return Err(CaseError::Dtype {
                    tensor: tensor.to_owned(),
                    found: values.dtype().to_string(),
                    expected: format!("{dtype}, as q"),
                });
            }
        }
        match (&self.mla, &self.v) {
            (Some(_), Some(_)) => Err(CaseError::lengths("an MLA case has no v: its rows hold the values")),
            (None, None) => Err(CaseError::MissingTensor { name: "v" }),
            (Some(mla), None) => self.check_mla(mla),
            (None, Some(_)) => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<(), CaseError> {
        let sizes = [
            ("the number of query heads", self.num_heads),
            ("the number of KV heads", self.num_kv_heads),
            ("the size of a key head", self.head_size),
            ("the size of a value head", self.head_size_v),
            ("the size of a query head", self.q_head_size()),
            ("the size of an output head", self.out_head_size()),
            ("block_size", self.block_size.unwrap_or(1) as usize),
        ];
        for (what, size) in sizes {
            if size == 0 || size > MAX_SIZE {
                return Err(CaseError::lengths(format!("{what} is {size}; valid are 1 … {MAX_SIZE}")));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(CaseError::lengths(format!(
                "q has {} heads and k has {}: the first must be a multiple of the second",
                self.num_heads, self.num_kv_heads
            )));
        }
        Ok(())
    }

    fn check_batch(&self) -> Result<(), CaseError> {
        let n = self.seq_lens.len();
        let starts = &self.query_start_loc;
        if starts.len() != n + 1 {
            return Err(CaseError::lengths(format!(
                "query_start_loc has {} values; {n} seq_lens need {}",
                starts.len(),
                n + 1
            )));
        }
        if starts[0] != 0 {
            return Err(CaseError::lengths(format!("query_start_loc starts with {}, not 0", starts[0])));
        }
        if let Some(pair) = starts.windows(2).find(|pair| pair[1] < pair[0]) {
            return Err(CaseError::lengths(format!("query_start_loc falls from {} to {}", pair[0], pair[1])));
        }
        if let Some(len) = self.seq_lens.iter().find(|len| **len < 0) {
            return Err(CaseError::lengths(format!("seq_lens holds {len}; a length is 0 or more")));
        }
        let flags = self.causal_per_request.as_ref().map_or(n, Vec::len);
        if flags != n {
            return Err(CaseError::lengths(format!("causal_per_request has {flags} values; there are {n} requests")));
        }
        for [request, start, end] in &self.prefix_spans {
            let known = usize::try_from(*request).is_ok_and(|request| request < n);
            if !known || *start < 0 || end < start {
                return Err(CaseError::lengths(format!(
                    "prefix span (request {request}, {start} … {end}): no such request, or not a span"
                )));
            }
        }
        let positional = self.sliding_window > 0 || self.window_right >= 0 || self.chunked_local > 0;
        if self.attn_type == AttentionType::EncoderDecoder
            && (positional
                || self.causal_per_request.as_ref().map_or(self.causal, |flags| flags.contains(&true))
                || !self.alibi_slopes.is_empty()
                || !self.prefix_spans.is_empty())
        {
            return Err(CaseError::lengths(
                "cross attention has no positions: causal must be false, and windows, chunks, ALiBi and prefix spans are not possible",
            ));
        }
        self.check_topk()
    }

    fn check_topk(&self) -> Result<(), CaseError> {
        let Some(topk) = &self.topk else { return Ok(()) };
        let needed = self.num_tokens().saturating_mul(topk.width);
        if topk.indices.len() != needed {
            return Err(CaseError::lengths(format!(
                "topk_indices has {} values; {} tokens of {} need {needed}",
                topk.indices.len(),
                self.num_tokens(),
                topk.width
            )));
        }
        for (bounds, len) in self.query_start_loc.windows(2).zip(&self.seq_lens) {
            let rows = &topk.indices[bounds[0] as usize * topk.width..bounds[1] as usize * topk.width];
            if let Some(index) = rows.iter().find(|index| **index < -1 || *index >= len) {
                return Err(CaseError::lengths(format!(
                    "topk_indices holds {index} for a request of {len} keys; -1 is padding"
                )));
            }
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), CaseError> {
        for (key, value) in [("scale", self.scale), ("softcap", self.softcap)] {
            if !value.is_finite() {
                return Err(CaseError::metadata(key, &value.to_string(), "a finite number"));
            }
        }
        for (name, values) in [("sinks", &self.sinks), ("alibi_slopes", &self.alibi_slopes)] {
            if !values.is_empty() && values.len() != self.num_heads {
                return Err(CaseError::lengths(format!(
                    "{name} has {} values; there are {} query heads",
                    values.len(),
                    self.num_heads
                )));
            }
            if values.iter().any(|value| value.is_nan()) {
                return Err(CaseError::lengths(format!("{name} holds NaN")));
            }
        }
        for (name, values) in [("k_scales", &self.k_scales), ("v_scales", &self.v_scales)] {
            if values.len() > 1 && values.len() != self.num_kv_heads {
                return Err(CaseError::lengths(format!(
                    "{name} has {} values; expected one, or one a KV head ({})",
                    values.len(),
                    self.num_kv_heads
                )));
            }
            if let Some(bad) = values.iter().find(|scale| !(scale.is_finite() && **scale > 0.0)) {
                return Err(CaseError::lengths(format!("{name} holds {bad}; a scale is finite and above 0")));
            }
        }
        Ok(())
    }

    fn check_mla(&self, mla: &Mla) -> Result<(), CaseError> {
        let row = mla.kv_lora_rank.saturating_add(mla.qk_rope_head_dim);
        if self.num_kv_heads != 1 || self.head_size != row || self.head_size_v != mla.kv_lora_rank {
            return Err(CaseError::lengths(format!(
                "k has {} heads of {}; MLA needs one row a token of kv_lora_rank + qk_rope_head_dim = {row}",
                self.num_kv_heads, self.head_size
            )));
        }
        if mla.form == MlaForm::Absorbed && mla.kv_b_proj.is_none() {
            return Ok(());
        }
        let Some(projection) = &mla.kv_b_proj else {
            return Err(CaseError::MissingTensor { name: "kv_b_proj" });
        };
        let rows = self.num_heads.saturating_mul(mla.qk_nope_head_dim.saturating_add(mla.v_head_dim));
        let needed = rows.saturating_mul(mla.kv_lora_rank);
        if mla.qk_nope_head_dim == 0 || mla.v_head_dim == 0 || projection.len() != needed {
            return Err(CaseError::lengths(format!(
                "kv_b_proj has {} elements; num_heads * (qk_nope_head_dim {} + v_head_dim {}) rows of kv_lora_rank {} are needed, none of them 0",
                projection.len(),
                mla.qk_nope_head_dim,
                mla.v_head_dim,
                mla.kv_lora_rank
            )));
        }
        if projection.dtype() != self.dtype() {
            return Err(CaseError::Dtype {
                tensor: "kv_b_proj".to_owned(),
                found: projection.dtype().to_string(),
                expected: format!("{}, as q", self.dtype()),
            });
        }
        Ok(())
    }
}
