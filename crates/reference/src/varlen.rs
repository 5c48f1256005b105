//! A batch of requests of any lengths, dense: each request is computed alone.
//!
//! Owns the meaning of `query_start_loc` and `seq_lens`. Must not know blocks, slots or
//! padding of caches.

use crate::attention::{AttentionFeatures, AttentionInputs, AttentionOutput, attention};
use crate::error::ReferenceError;
use crate::mask::Span;
use crate::shape::{check_len, check_nonzero, elements};

/// A batch of `n` requests. Tensors are the requests' rows one after another.
#[derive(Debug, Clone, Copy)]
pub struct VarlenInputs<'a> {
    /// Queries `[query_start_loc[n], num_heads, head_size]`.
    pub q: &'a [f64],
    /// Keys `[Σ seq_lens, num_kv_heads, head_size]`.
    pub k: &'a [f64],
    /// Values `[Σ seq_lens, num_kv_heads, head_size_v]`.
    pub v: &'a [f64],
    /// `[n + 1]`: request `r` owns query rows `query_start_loc[r] .. query_start_loc[r + 1]`.
    pub query_start_loc: &'a [i32],
    /// `[n]`: keys of each request, the new tokens included (encoder lengths for cross
    /// attention).
    pub seq_lens: &'a [i32],
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a query and of a key head.
    pub head_size: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
    /// Softmax scale.
    pub scale: f64,
    /// Features of all requests, unless the next two fields replace a part.
    pub features: AttentionFeatures<'a>,
    /// `[n]`, replaces `features.causal` request by request.
    pub causal_per_request: Option<&'a [bool]>,
    /// `[n]`, replaces `features.prefix_spans` request by request; positions are absolute
    /// within the request.
    pub prefix_spans_per_request: Option<&'a [&'a [Span]]>,
}

/// Attention of a batch: `out` is `[Σ q_len, num_heads, head_size_v]`, `lse` is
/// `[num_heads, Σ q_len]`. Bit-equal to [`attention`] of each request alone.
///
/// An empty batch (`query_start_loc = [0]`), requests without queries, without keys, or with
/// more queries than keys are legal.
///
/// # Errors
/// As [`attention`]; [`ReferenceError::Index`] when `query_start_loc` does not start at 0 or
/// descends, or a length is negative; [`ReferenceError::Length`] when lists disagree.
pub fn attention_varlen(inputs: &VarlenInputs<'_>) -> Result<AttentionOutput, ReferenceError> {
    let requests = inputs.seq_lens.len();
    check_nonzero("num_heads", inputs.num_heads)?;
    check_nonzero("num_kv_heads", inputs.num_kv_heads)?;
    check_nonzero("head_size", inputs.head_size)?;
    check_nonzero("head_size_v", inputs.head_size_v)?;
    check_len("query_start_loc", &[requests + 1], inputs.query_start_loc.len())?;
    if let Some(causal) = inputs.causal_per_request {
        check_len("causal_per_request", &[requests], causal.len())?;
    }
    if let Some(spans) = inputs.prefix_spans_per_request {
        check_len("prefix_spans_per_request", &[requests], spans.len())?;
    }
    let starts = offsets(inputs.query_start_loc)?;
    let lens = lengths(inputs.seq_lens)?;
    let total_q = starts[requests];
    let total_kv = lens.iter().sum::<usize>();
    let q_row = elements("q row", &[inputs.num_heads, inputs.head_size])?;
    let k_row = elements("k row", &[inputs.num_kv_heads, inputs.head_size])?;
    let v_row = elements("v row", &[inputs.num_kv_heads, inputs.head_size_v])?;
    check_len("q", &[total_q, inputs.num_heads, inputs.head_size], inputs.q.len())?;
    check_len("k", &[total_kv, inputs.num_kv_heads, inputs.head_size], inputs.k.len())?;
    check_len("v", &[total_kv, inputs.num_kv_heads, inputs.head_size_v], inputs.v.len())?;

    let mut result = AttentionOutput::empty(total_q, inputs.num_heads, inputs.head_size_v)?;
    let mut first_key = 0;
    for r in 0..requests {
        let (q_start, q_end) = (starts[r], starts[r + 1]);
        let last_key = first_key + lens[r];
        let mut features = inputs.features;
        if let Some(causal) = inputs.causal_per_request {
            features.causal = causal[r];
        }
        if let Some(spans) = inputs.prefix_spans_per_request {
            features.prefix_spans = spans[r];
        }
        let single = attention(&AttentionInputs {
            q: &inputs.q[q_start * q_row..q_end * q_row],
            k: &inputs.k[first_key * k_row..last_key * k_row],
            v: &inputs.v[first_key * v_row..last_key * v_row],
            q_len: q_end - q_start,
            seq_len: lens[r],
            num_heads: inputs.num_heads,
            num_kv_heads: inputs.num_kv_heads,
            head_size: inputs.head_size,
            head_size_v: inputs.head_size_v,
            scale: inputs.scale,
            features,
        })?;
        let out_row = inputs.num_heads * inputs.head_size_v;
        result.out[q_start * out_row..q_end * out_row].copy_from_slice(&single.out);
        for h in 0..inputs.num_heads {
            let from = &single.lse[h * single.q_len..(h + 1) * single.q_len];
            result.lse[h * total_q + q_start..h * total_q + q_end].copy_from_slice(from);
        }
        first_key = last_key;
    }
    Ok(result)
}

/// `query_start_loc` as offsets: starts at 0, never descends.
fn offsets(query_start_loc: &[i32]) -> Result<Vec<usize>, ReferenceError> {
    let mut previous = 0;
    let mut result = Vec::with_capacity(query_start_loc.len());
    for (index, &found) in query_start_loc.iter().enumerate() {
        if (index == 0 && found != 0) || found < previous {
            return Err(ReferenceError::Index {
                name: "query_start_loc",
                index,
                found: i64::from(found),
                rule: "offsets start at 0 and never descend".into(),
            });
        }
        previous = found;
        result.push(found as usize);
    }
    Ok(result)
}

fn lengths(seq_lens: &[i32]) -> Result<Vec<usize>, ReferenceError> {
    seq_lens
        .iter()
        .enumerate()
        .map(|(index, &found)| {
            usize::try_from(found).map_err(|_| ReferenceError::Index {
                name: "seq_lens",
                index,
                found: i64::from(found),
                rule: "a length is 0 or more".into(),
            })
        })
        .collect()
}
