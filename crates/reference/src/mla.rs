//! Multi-head latent attention, in both of its forms, and its softmax scale.
//!
//! Owns the layout of latent rows `[latent | rope]`, of `kv_b_proj`, and of sparse top-k lists.
//! Must not know softmax (it calls `attention`), caches or quantisation.

use crate::attention::{AttentionFeatures, AttentionInputs, AttentionOutput, SinkShare, attend};
use crate::error::ReferenceError;
use crate::shape::{check_finite, check_len, check_nonzero, zeros};

/// Dimensions of an MLA layer, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaDims {
    /// Query heads.
    pub num_heads: usize,
    /// Size of the latent part of a cache row.
    pub kv_lora_rank: usize,
    /// Size of the rotary part, shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Size of the part of a query head without rotation (expanded form).
    pub qk_nope_head_dim: usize,
    /// Size of a value head (expanded form).
    pub v_head_dim: usize,
}

impl MlaDims {
    /// Elements of a cache row: `kv_lora_rank + qk_rope_head_dim`.
    pub fn latent_size(&self) -> usize {
        self.kv_lora_rank.saturating_add(self.qk_rope_head_dim)
    }

    /// Elements of an expanded query head: `qk_nope_head_dim + qk_rope_head_dim`. The softmax
    /// scale of **both** forms comes from this one.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim.saturating_add(self.qk_rope_head_dim)
    }

    /// Rows of `kv_b_proj` per head: `[k_nope | v]`.
    fn rows_per_head(&self) -> usize {
        self.qk_nope_head_dim.saturating_add(self.v_head_dim)
    }

    fn validate(&self) -> Result<(), ReferenceError> {
        check_nonzero("num_heads", self.num_heads)?;
        check_nonzero("kv_lora_rank", self.kv_lora_rank)?;
        check_nonzero("qk_nope_head_dim", self.qk_nope_head_dim)?;
        check_nonzero("v_head_dim", self.v_head_dim)
    }

    fn check_projection(&self, kv_b_proj: &[f64]) -> Result<(), ReferenceError> {
        self.validate()?;
        let shape = [self.num_heads, self.rows_per_head(), self.kv_lora_rank];
        check_len("kv_b_proj", &shape, kv_b_proj.len())
    }

    /// Row `row` (of `[k_nope | v]`) of head `head`: `[kv_lora_rank]`.
    fn projection_row<'a>(&self, kv_b_proj: &'a [f64], head: usize, row: usize) -> &'a [f64] {
        let start = (head * self.rows_per_head() + row) * self.kv_lora_rank;
        &kv_b_proj[start..start + self.kv_lora_rank]
    }
}

/// Sparse attention: which cache rows each query may read.
#[derive(Debug, Clone, Copy)]
pub struct TopK<'a> {
    /// `[q_len, width]` row indices in `0..seq_len`; −1 is padding, anywhere in the list.
    pub indices: &'a [i32],
    /// Entries per query.
    pub width: usize,
}

/// One request of an MLA layer.
#[derive(Debug, Clone, Copy)]
pub struct MlaInputs<'a> {
    /// Queries. Absorbed form: `[q_len, num_heads, kv_lora_rank + qk_rope_head_dim]`; expanded
    /// form: `[q_len, num_heads, qk_nope_head_dim + qk_rope_head_dim]`.
    pub q: &'a [f64],
    /// Cache rows `[seq_len, kv_lora_rank + qk_rope_head_dim]`, each `[latent | rope]`.
    pub latent: &'a [f64],
    /// Query tokens; the last is at position `seq_len − 1`.
    pub q_len: usize,
    /// Cache rows, the new tokens included.
    pub seq_len: usize,
    /// The layer's dimensions.
    pub dims: MlaDims,
    /// Softmax scale, the same number in both forms: see [`softmax_scale`].
    pub scale: f64,
    /// Causality, window and the rest.
    pub features: AttentionFeatures<'a>,
    /// Sparse lists: a row is read when it is listed **and** the mask lets it through.
    pub topk: Option<TopK<'a>>,
}

/// Absorbed form (MQA over the latent cache): each cache row is the key of every head, its
/// latent part also the value. `out` is `[q_len, num_heads, kv_lora_rank]`, to be turned into
/// value heads by [`project_output`].
///
/// Source: DeepSeek-V2 (2024), §2.1 and appendix.
///
/// # Errors
/// As [`crate::attention::attention`]; a bad top-k list (index out of range or listed twice).
pub fn decode_absorbed(inputs: &MlaInputs<'_>) -> Result<AttentionOutput, ReferenceError> {
    let values = latent_values(inputs)?;
    run(inputs, inputs.latent, &values, 1, inputs.dims.latent_size(), inputs.dims.kv_lora_rank)
}

/// The latent part of each row: the values of the absorbed form.
fn latent_values(inputs: &MlaInputs<'_>) -> Result<Vec<f64>, ReferenceError> {
    let dims = inputs.dims;
    check_nonzero("num_heads", dims.num_heads)?;
    check_nonzero("kv_lora_rank", dims.kv_lora_rank)?;
    check_latent(inputs)?;
    let rows = inputs.latent.chunks_exact(dims.latent_size());
    Ok(rows.flat_map(|row| row[..dims.kv_lora_rank].iter().copied()).collect())
}

/// Expanded form (MHA): keys and values of every head are made from the latent rows,
/// `k = [W_k · latent | rope]`, `v = W_v · latent`. `kv_b_proj` is
/// `[num_heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank]`, per head `[k_nope | v]`. `out`
/// is `[q_len, num_heads, v_head_dim]`; the LSE equals that of the absorbed form.
///
/// # Errors
/// As [`decode_absorbed`], and a `kv_b_proj` of the wrong length.
pub fn prefill_expanded(inputs: &MlaInputs<'_>, kv_b_proj: &[f64]) -> Result<AttentionOutput, ReferenceError> {
    let (keys, values) = expand(inputs, kv_b_proj)?;
    let dims = inputs.dims;
    run(inputs, &keys, &values, dims.num_heads, dims.qk_head_dim(), dims.v_head_dim)
}

/// As [`crate::attention::visible_value_scale`], of the values of the absorbed form (no
/// projection) or of the expanded one. Top-k lists are not looked at: they only narrow the view.
///
/// # Errors
/// As [`decode_absorbed`] and [`prefill_expanded`].
pub fn visible_value_scale(inputs: &MlaInputs<'_>, kv_b_proj: Option<&[f64]>) -> Result<f64, ReferenceError> {
    let dims = inputs.dims;
    match kv_b_proj {
        Some(projection) => {
            let (keys, values) = expand(inputs, projection)?;
            let expanded = dense(inputs, &keys, &values, dims.num_heads, dims.qk_head_dim(), dims.v_head_dim);
            crate::attention::visible_value_scale(&expanded)
        }
        None => {
            let values = latent_values(inputs)?;
            let absorbed = dense(inputs, inputs.latent, &values, 1, dims.latent_size(), dims.kv_lora_rank);
            crate::attention::visible_value_scale(&absorbed)
        }
    }
}

/// Keys `[seq_len, num_heads, qk_head_dim]` and values `[seq_len, num_heads, v_head_dim]`.
fn expand(inputs: &MlaInputs<'_>, kv_b_proj: &[f64]) -> Result<(Vec<f64>, Vec<f64>), ReferenceError> {
    let dims = inputs.dims;
    dims.check_projection(kv_b_proj)?;
    check_latent(inputs)?;
    let (nope, heads) = (dims.qk_nope_head_dim, dims.num_heads);
    let mut keys = zeros("k", &[inputs.seq_len, heads, dims.qk_head_dim()])?;
    let mut values = zeros("v", &[inputs.seq_len, heads, dims.v_head_dim])?;
    for (j, row) in inputs.latent.chunks_exact(dims.latent_size()).enumerate() {
        let (latent, rope) = row.split_at(dims.kv_lora_rank);
        for h in 0..heads {
            let start = (j * heads + h) * dims.qk_head_dim();
            for d in 0..nope {
                keys[start + d] = dot(dims.projection_row(kv_b_proj, h, d), latent);
            }
            keys[start + nope..start + dims.qk_head_dim()].copy_from_slice(rope);
            let start = (j * heads + h) * dims.v_head_dim;
            for d in 0..dims.v_head_dim {
                values[start + d] = dot(dims.projection_row(kv_b_proj, h, nope + d), latent);
            }
        }
    }
    Ok((keys, values))
}

/// Folds the key half of `kv_b_proj` into expanded queries
/// `[q_len, num_heads, qk_nope_head_dim + qk_rope_head_dim]`, giving absorbed ones
/// `[q_len, num_heads, kv_lora_rank + qk_rope_head_dim]`:
/// `q_latent[r] = Σ_d q_nope[d] · W_k[d, r]`, the rotary part is copied.
///
/// # Errors
/// Lengths that do not fit, a dimension of 0.
pub fn absorb_query(q: &[f64], q_len: usize, dims: &MlaDims, kv_b_proj: &[f64]) -> Result<Vec<f64>, ReferenceError> {
    dims.check_projection(kv_b_proj)?;
    check_len("q", &[q_len, dims.num_heads, dims.qk_head_dim()], q.len())?;
    let mut absorbed = zeros("absorbed q", &[q_len, dims.num_heads, dims.latent_size()])?;
    let heads = q.chunks_exact(dims.qk_head_dim());
    for (at, (from, to)) in heads.zip(absorbed.chunks_exact_mut(dims.latent_size())).enumerate() {
        let (q_nope, q_rope) = from.split_at(dims.qk_nope_head_dim);
        for (d, &value) in q_nope.iter().enumerate() {
            let row = dims.projection_row(kv_b_proj, at % dims.num_heads, d);
            for (t, &w) in to.iter_mut().zip(row) {
                *t += value * w;
            }
        }
        to[dims.kv_lora_rank..].copy_from_slice(q_rope);
    }
    Ok(absorbed)
}

/// Turns absorbed outputs `[q_len, num_heads, kv_lora_rank]` into value heads
/// `[q_len, num_heads, v_head_dim]` by the value half of `kv_b_proj`.
///
/// # Errors
/// Lengths that do not fit, a dimension of 0.
pub fn project_output(
    out: &[f64],
    q_len: usize,
    dims: &MlaDims,
    kv_b_proj: &[f64],
) -> Result<Vec<f64>, ReferenceError> {
    dims.check_projection(kv_b_proj)?;
    check_len("out", &[q_len, dims.num_heads, dims.kv_lora_rank], out.len())?;
    let mut projected = zeros("projected out", &[q_len, dims.num_heads, dims.v_head_dim])?;
    let heads = out.chunks_exact(dims.kv_lora_rank);
    for (at, (from, to)) in heads.zip(projected.chunks_exact_mut(dims.v_head_dim)).enumerate() {
        for (d, t) in to.iter_mut().enumerate() {
            let row = dims.qk_nope_head_dim + d;
            *t = dot(dims.projection_row(kv_b_proj, at % dims.num_heads, row), from);
        }
    }
    Ok(projected)
}

/// YaRN's magnitude correction: `0.1 · mscale · ln(factor) + 1`, and 1 when `factor ≤ 1`.
///
/// Source: Peng 2023 (YaRN), as in DeepSeek-V2's `yarn_get_mscale`.
///
/// # Errors
/// [`ReferenceError::Value`] when an argument is not finite.
pub fn yarn_mscale(factor: f64, mscale: f64) -> Result<f64, ReferenceError> {
    check_finite("factor", &[factor])?;
    check_finite("mscale", &[mscale])?;
    if factor <= 1.0 {
        return Ok(1.0);
    }
    Ok(0.1 * mscale * factor.ln() + 1.0)
}

/// Softmax scale of an MLA layer, for both forms:
/// `(qk_nope_head_dim + qk_rope_head_dim)^−½ · yarn_mscale(factor, mscale_all_dim)²`.
///
/// `yarn` is `(factor, mscale_all_dim)` of the model's rope scaling; `None`, or an
/// `mscale_all_dim` of 0, leaves the correction out.
///
/// # Errors
/// As [`yarn_mscale`]; [`ReferenceError::Zero`] for an empty head.
pub fn softmax_scale(dims: &MlaDims, yarn: Option<(f64, f64)>) -> Result<f64, ReferenceError> {
    check_nonzero("qk_head_dim", dims.qk_head_dim())?;
    let mscale = match yarn {
        None => 1.0,
        Some((factor, mscale_all_dim)) => yarn_mscale(factor, mscale_all_dim)?,
    };
    Ok(mscale * mscale / (dims.qk_head_dim() as f64).sqrt())
}

fn check_latent(inputs: &MlaInputs<'_>) -> Result<(), ReferenceError> {
    check_len("latent", &[inputs.seq_len, inputs.dims.latent_size()], inputs.latent.len())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = 0.0;
    for (x, y) in a.iter().zip(b) {
        sum += x * y;
    }
    sum
}

/// Attention over prepared keys and values, restricted to the top-k lists.
fn run(
    inputs: &MlaInputs<'_>,
    k: &[f64],
    v: &[f64],
    num_kv_heads: usize,
    head_size: usize,
    head_size_v: usize,
) -> Result<AttentionOutput, ReferenceError> {
    let listed = match inputs.topk {
        None => None,
        Some(topk) => Some(listed_rows(topk, inputs.q_len, inputs.seq_len)?),
    };
    let attention_inputs = dense(inputs, k, v, num_kv_heads, head_size, head_size_v);
    attend(&attention_inputs, 0..inputs.seq_len, SinkShare::Counted, &|i, j| {
        listed.as_ref().is_none_or(|rows| rows[i].binary_search(&j).is_ok())
    })
}

fn dense<'a>(
    inputs: &MlaInputs<'a>,
    k: &'a [f64],
    v: &'a [f64],
    num_kv_heads: usize,
    head_size: usize,
    head_size_v: usize,
) -> AttentionInputs<'a> {
    AttentionInputs {
        q: inputs.q,
        k,
        v,
        q_len: inputs.q_len,
        seq_len: inputs.seq_len,
        num_heads: inputs.dims.num_heads,
        num_kv_heads,
        head_size,
        head_size_v,
        scale: inputs.scale,
        features: inputs.features,
    }
}

/// Per query, the listed rows in ascending order.
fn listed_rows(topk: TopK<'_>, q_len: usize, seq_len: usize) -> Result<Vec<Vec<usize>>, ReferenceError> {
    check_len("topk", &[q_len, topk.width], topk.indices.len())?;
    let mut lists = vec![Vec::new(); q_len];
    for (at, &found) in topk.indices.iter().enumerate() {
        if found == -1 {
            continue;
        }
        let refuse = |rule: String| ReferenceError::Index { name: "topk", index: at, found: i64::from(found), rule };
        let row = usize::try_from(found)
            .ok()
            .filter(|&row| row < seq_len)
            .ok_or_else(|| refuse(format!("a row is in 0..{seq_len}, or -1 for padding")))?;
        let list: &mut Vec<usize> = &mut lists[at / topk.width];
        match list.binary_search(&row) {
            Ok(_) => return Err(refuse("a query lists a row once".into())),
            Err(place) => list.insert(place, row),
        }
    }
    Ok(lists)
}
