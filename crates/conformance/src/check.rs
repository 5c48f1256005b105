//! What the reference says about a case, and the comparison.
//!
//! The reference computes in f64 from what the cache holds, so rounding and quantisation of keys
//! and values are no error. Tolerances are the reference's alone. Must not know backends.

use crate::{
    case::{Case, CaseError, MlaForm},
    execute::Output,
    stored::{Storage, cache_shape, format_of},
};
use attache_core::{AttentionType, Dtype, KvCacheDtype};
use attache_reference::{
    AttentionFeatures, AttentionInputs, AttentionOutput, Mismatch, ReferenceError, Span, Tolerance, attention,
    compare_lse, compare_out,
    mla::{self, MlaDims, MlaInputs},
    tolerance::{tolerance, tolerance_mla_expanded},
    visible_value_scale,
};
use serde::Serialize;
use std::fmt;

/// What the right answer is, and how near is near enough.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// `[tokens, num_heads, out_head_size]`.
    pub out: Vec<f64>,
    /// `[num_heads, tokens]`, natural logarithm.
    pub lse: Vec<f64>,
    /// Of each request the largest |v| that its queries see.
    pub value_scales: Vec<f64>,
    /// The tolerance.
    pub tolerance: Tolerance,
}

/// How near an output came.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct CheckReport {
    /// Largest error of an output element, as a fraction of what is allowed.
    pub out_fraction: f64,
    /// Largest error of an output element.
    pub out_error: f64,
    /// Largest error of an LSE, as a fraction of what is allowed; 0 when there was none.
    pub lse_fraction: f64,
    /// Largest error of an LSE.
    pub lse_error: f64,
}

/// An element of an output or LSE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Request.
    pub request: usize,
    /// Query token within the whole batch.
    pub token: usize,
    /// Query head.
    pub head: usize,
    /// Element of the head; absent for an LSE.
    pub element: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.element.is_some() { "out" } else { "lse" };
        write!(f, "{what} of request {}, token {}, head {}", self.request, self.token, self.head)?;
        self.element.map_or(Ok(()), |element| write!(f, ", element {element}"))
    }
}

/// Why an output is not accepted.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CheckError {
    /// An element is NaN.
    #[error("{place} is NaN; expected {expected}; {count} of {total} are NaN")]
    Nan {
        /// The first one.
        place: Place,
        /// What is right.
        expected: f64,
        /// NaN elements of the request.
        count: usize,
        /// Elements of the request.
        total: usize,
    },
    /// An element is further off than the table allows; the worst one of its request.
    #[error(
        "{place} is {found}, expected {expected}: error {error:e}, allowed {allowed:e}; {count} of {total} are outside"
    )]
    Wrong {
        /// Where.
        place: Place,
        /// What was found.
        found: f64,
        /// What is right.
        expected: f64,
        /// |found − expected|.
        error: f64,
        /// What is allowed there.
        allowed: f64,
        /// Elements of the request outside the tolerance.
        count: usize,
        /// Elements of the request.
        total: usize,
    },
    /// The output has another size than the case.
    #[error("{what} has {found} elements; the case has {expected}")]
    Size {
        /// `out` or `lse`.
        what: &'static str,
        /// What was found.
        found: usize,
        /// What is right.
        expected: usize,
    },
    /// The case asks for the log-sum-exp and there is none.
    #[error("the case asks for the LSE and there is none")]
    NoLse,
    /// A KV-cache format that the reference does not know.
    #[error("the reference does not know the KV-cache format {0}")]
    UnknownFormat(String),
    /// Scales that have no meaning.
    #[error("k_scale or v_scale is given, and the KV-cache format {0} takes none")]
    Scales(String),
    /// The case contradicts itself.
    #[error("{0}")]
    Case(String),
    /// The reference refuses the case.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
}

impl From<CaseError> for CheckError {
    fn from(error: CaseError) -> Self {
        Self::Case(error.to_string())
    }
}

/// What the cache (or, without one, the call) holds of keys and values, in f64.
fn stored(case: &Case) -> Result<(Storage, Vec<f64>, Vec<f64>), CheckError> {
    let kv_cache_dtype = case.kv_cache_dtype.filter(|_| case.has_cache());
    let name = || kv_cache_dtype.map_or("auto", KvCacheDtype::name).to_owned();
    let storage = Storage::of(kv_cache_dtype, case.dtype()).ok_or_else(|| CheckError::UnknownFormat(name()))?;
    let has_scales = !case.k_scales.is_empty() || !case.v_scales.is_empty();
    if has_scales && !storage.takes_scales() {
        return Err(CheckError::Scales(name()));
    }
    let k = storage.read_back(&case.k.to_f64(), &cache_shape(case, case.head_size), &case.k_scales)?;
    let v = match &case.v {
        Some(v) => storage.read_back(&v.to_f64(), &cache_shape(case, case.head_size_v), &case.v_scales)?,
        None => Vec::new(),
    };
    Ok((storage, k, v))
}

/// The numbers of a case in f64.
struct Numbers<'a> {
    case: &'a Case,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    sinks: Vec<f64>,
    alibi_slopes: Vec<f64>,
    kv_b_proj: Option<Vec<f64>>,
}

impl Numbers<'_> {
    fn features<'b>(&'b self, request: usize, spans: &'b [Span]) -> AttentionFeatures<'b> {
        let case = self.case;
        let window = case.sliding_window;
        let one_sided = case.window_right >= 0;
        let listed = |list: &'b Vec<f64>| (!list.is_empty()).then_some(list.as_slice());
        AttentionFeatures {
            causal: case.causal_per_request.as_ref().map_or(case.causal, |flags| flags[request]),
            sliding_window: if one_sided { 0 } else { window },
            window_left: (one_sided && window > 0).then(|| window.unsigned_abs() - 1),
            window_right: one_sided.then(|| case.window_right.unsigned_abs()),
            chunked_local: case.chunked_local,
            softcap: case.softcap,
            alibi_slopes: listed(&self.alibi_slopes),
            sinks: listed(&self.sinks),
            prefix_spans: spans,
        }
    }

    /// Output and value scale of a request.
    fn attend(&self, request: usize) -> Result<(AttentionOutput, f64), ReferenceError> {
        let case = self.case;
        let (queries, keys) = (case.query_range(request), case.kv_range(request));
        let spans: Vec<Span> = case
            .prefix_spans
            .iter()
            .filter(|span| usize::try_from(span[0]) == Ok(request))
            .map(|span| Span { start: i64::from(span[1]), end: i64::from(span[2]) })
            .collect();
        let features = self.features(request, &spans);
        let (q_row, k_row) = (case.num_heads * case.q_head_size(), case.num_kv_heads * case.head_size);
        let q = &self.q[queries.start * q_row..queries.end * q_row];
        let k = &self.k[keys.start * k_row..keys.end * k_row];
        let (q_len, seq_len) = (queries.len(), keys.len());
        let Some(mla) = &case.mla else {
            let v_row = case.num_kv_heads * case.head_size_v;
            let inputs = AttentionInputs {
                q,
                k,
                v: &self.v[keys.start * v_row..keys.end * v_row],
                q_len,
                seq_len,
                num_heads: case.num_heads,
                num_kv_heads: case.num_kv_heads,
                head_size: case.head_size,
                head_size_v: case.head_size_v,
                scale: case.scale,
                features,
            };
            return Ok((attention(&inputs)?, visible_value_scale(&inputs)?));
        };
        let inputs = MlaInputs {
            q,
            latent: k,
            q_len,
            seq_len,
            dims: MlaDims {
                num_heads: case.num_heads,
                kv_lora_rank: mla.kv_lora_rank,
                qk_rope_head_dim: mla.qk_rope_head_dim,
                qk_nope_head_dim: mla.qk_nope_head_dim,
                v_head_dim: mla.v_head_dim,
            },
            scale: case.scale,
            features,
            topk: case.topk.as_ref().map(|topk| mla::TopK {
                indices: &topk.indices[queries.start * topk.width..queries.end * topk.width],
                width: topk.width,
            }),
        };
        match (mla.form, &self.kv_b_proj) {
            (MlaForm::Expanded | MlaForm::Auto, Some(projection)) => {
                Ok((mla::prefill_expanded(&inputs, projection)?, mla::visible_value_scale(&inputs, Some(projection))?))
            }
            // `Case::check` lets no other form be without its projection.
            _ => Ok((mla::decode_absorbed(&inputs)?, mla::visible_value_scale(&inputs, None)?)),
        }
    }
}

/// The right answer.
///
/// # Errors
/// When the case contradicts itself, or holds what the reference does not know.
pub fn expected(case: &Case) -> Result<Expected, CheckError> {
    case.check()?;
    if case.topk.is_some() && case.mla.is_none() {
        return Err(CheckError::Case("topk_indices are for MLA cases".to_owned()));
    }
    let (storage, k, v) = stored(case)?;
    let compute = format_of(case.dtype());
    let is_expanded = case.mla.as_ref().is_some_and(|mla| mla.form != MlaForm::Absorbed);
    let widen = |list: &[f32]| list.iter().map(|number| f64::from(*number)).collect();
    let numbers = Numbers {
        case,
        q: case.q.to_f64(),
        k,
        v,
        sinks: widen(&case.sinks),
        alibi_slopes: widen(&case.alibi_slopes),
        kv_b_proj: case.mla.as_ref().and_then(|mla| mla.kv_b_proj.as_ref()).map(|projection| projection.to_f64()),
    };
    let (tokens, heads) = (case.num_tokens(), case.num_heads);
    let mut result = Expected {
        out: Vec::with_capacity(numbers.q.len()),
        lse: vec![f64::NEG_INFINITY; heads * tokens],
        value_scales: Vec::with_capacity(case.num_requests()),
        tolerance: if is_expanded { tolerance_mla_expanded(compute)? } else { tolerance(compute, storage.format())? },
    };
    for request in 0..case.num_requests() {
        let (single, value_scale) = numbers.attend(request)?;
        result.out.extend_from_slice(&single.out);
        let rows = case.query_range(request);
        for head in 0..heads {
            let from = &single.lse[head * rows.len()..(head + 1) * rows.len()];
            result.lse[head * tokens + rows.start..head * tokens + rows.end].copy_from_slice(from);
        }
        result.value_scales.push(value_scale);
    }
    Ok(result)
}

/// Compares an output with the right answer.
///
/// # Errors
/// Names the request, token, head and element that is NaN or furthest off.
pub fn check(case: &Case, output: &Output) -> Result<CheckReport, CheckError> {
    compare(case, output, &expected(case)?)
}

/// As [`check`], with the right answer at hand.
///
/// # Errors
/// As [`check`].
pub fn compare(case: &Case, output: &Output, expected: &Expected) -> Result<CheckReport, CheckError> {
    let size = |what, found, expected| {
        if found == expected { Ok(()) } else { Err(CheckError::Size { what, found, expected }) }
    };
    size("out", output.out.len(), expected.out.len())?;
    let out = output.out.to_f64();
    let (tokens, heads, head_size) = (case.num_tokens(), case.num_heads, case.out_head_size());
    let mut report = CheckReport::default();
    for (request, value_scale) in expected.value_scales.iter().enumerate() {
        let rows = case.query_range(request);
        let elements = rows.start * heads * head_size..rows.end * heads * head_size;
        let (found, right) = (&out[elements.clone()], &expected.out[elements]);
        let place = |index: usize| Place {
            request,
            token: rows.start + index / (heads * head_size),
            head: index / head_size % heads,
            element: Some(index % head_size),
        };
        refuse_nan(found, right, place)?;
        let near = compare_out(found, right, *value_scale, &expected.tolerance).map_err(|error| wrong(error, place))?;
        report.out_fraction = report.out_fraction.max(near.max_fraction);
        report.out_error = report.out_error.max(near.max_error);
    }
    if !case.lse {
        return Ok(report);
    }
    let lse = output.lse.as_ref().ok_or(CheckError::NoLse)?;
    size("lse", lse.len(), expected.lse.len())?;
    for request in 0..case.num_requests() {
        let rows = case.query_range(request);
        let of = |head: usize| head * tokens + rows.start..head * tokens + rows.end;
        let found: Vec<f64> = (0..heads).flat_map(|head| &lse[of(head)]).map(|number| f64::from(*number)).collect();
        let right: Vec<f64> = (0..heads).flat_map(|head| &expected.lse[of(head)]).copied().collect();
        let place = |index: usize| Place {
            request,
            token: rows.start + index % rows.len().max(1),
            head: index / rows.len().max(1),
            element: None,
        };
        refuse_nan(&found, &right, place)?;
        let near = compare_lse(&found, &right, &expected.tolerance).map_err(|error| wrong(error, place))?;
        report.lse_fraction = report.lse_fraction.max(near.max_fraction);
        report.lse_error = report.lse_error.max(near.max_error);
    }
    Ok(report)
}

fn refuse_nan(found: &[f64], right: &[f64], place: impl Fn(usize) -> Place) -> Result<(), CheckError> {
    match found.iter().position(|number| number.is_nan()) {
        None => Ok(()),
        Some(first) => Err(CheckError::Nan {
            place: place(first),
            expected: right[first],
            count: found.iter().filter(|number| number.is_nan()).count(),
            total: found.len(),
        }),
    }
}

fn wrong(error: Mismatch, place: impl Fn(usize) -> Place) -> CheckError {
    match error {
        Mismatch::Element { index, expected, actual, error, allowed, count, total } => {
            CheckError::Wrong { place: place(index), found: actual, expected, error, allowed, count, total }
        }
        other => CheckError::Case(other.to_string()),
    }
}

/// Whether the reference can check layers of this kind and KV-cache format.
#[must_use]
pub fn can_check(attn_type: &AttentionType, kv_cache_dtype: Option<KvCacheDtype>) -> bool {
    !matches!(attn_type, AttentionType::Other(_)) && Storage::of(kv_cache_dtype, Dtype::F32).is_some()
}
