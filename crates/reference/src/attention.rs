//! Attention of one request over dense f64 data.
//!
//! Owns the order of operations (scale → soft-cap → ALiBi → mask → softmax), sinks, LSE and
//! GQA. Must not know caches, quantisation, batches (`varlen`) or how visibility is decided
//! (`mask`).

use std::ops::Range;

use crate::error::ReferenceError;
use crate::mask::{MaskSpec, Span, query_position};
use crate::shape::{check_finite, check_len, check_nonzero, zeros};

/// What a layer does besides plain softmax attention. There is no default: start from
/// [`AttentionFeatures::causal`] or [`AttentionFeatures::bidirectional`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionFeatures<'a> {
    /// No key after the query (bottom-right aligned).
    pub causal: bool,
    /// Window in tokens, the current one included; ≤ 0 is off. See [`MaskSpec`].
    pub sliding_window: i64,
    /// Tokens visible to the left, the current one not counted; `None` is unlimited.
    pub window_left: Option<u64>,
    /// Tokens visible to the right, the current one not counted; `None` is unlimited.
    pub window_right: Option<u64>,
    /// Chunk size in tokens of chunked-local attention; ≤ 0 is off.
    pub chunked_local: i64,
    /// Soft-cap `c`: a scaled logit `x` becomes `c·tanh(x/c)`; ≤ 0 is off.
    pub softcap: f64,
    /// ALiBi slopes `[num_heads]`: `−slope·|p − j|` is added to the logit.
    pub alibi_slopes: Option<&'a [f64]>,
    /// Sink logits `[num_heads]`, natural units, not scaled: each adds `exp(sink)` to the
    /// denominator and nothing to the output. −∞ is "no sink on this head".
    pub sinks: Option<&'a [f64]>,
    /// Bidirectional spans of a multimodal prompt.
    pub prefix_spans: &'a [Span],
}

impl<'a> AttentionFeatures<'a> {
    /// Causal, nothing else.
    pub const fn causal() -> Self {
        AttentionFeatures { causal: true, ..Self::bidirectional() }
    }

    /// Every key visible, nothing else: encoder, and cross attention with
    /// `seq_len = encoder_len`.
    pub const fn bidirectional() -> Self {
        AttentionFeatures {
            causal: false,
            sliding_window: 0,
            window_left: None,
            window_right: None,
            chunked_local: 0,
            softcap: 0.0,
            alibi_slopes: None,
            sinks: None,
            prefix_spans: &[],
        }
    }

    /// The part of the features that decides visibility.
    pub fn mask(&self) -> MaskSpec<'a> {
        MaskSpec {
            causal: self.causal,
            sliding_window: self.sliding_window,
            window_left: self.window_left,
            window_right: self.window_right,
            chunked_local: self.chunked_local,
            prefix_spans: self.prefix_spans,
        }
    }
}

/// One request. All tensors are dense, row-major f64.
///
/// Query row `i` stands at absolute position `seq_len − q_len + i`. `q_len` 0, `seq_len` 0 and
/// `q_len > seq_len` are legal; the other dimensions are at least 1.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a> {
    /// Queries `[q_len, num_heads, head_size]`.
    pub q: &'a [f64],
    /// Keys `[seq_len, num_kv_heads, head_size]`.
    pub k: &'a [f64],
    /// Values `[seq_len, num_kv_heads, head_size_v]`.
    pub v: &'a [f64],
    /// Query tokens.
    pub q_len: usize,
    /// Keys: tokens in the cache, the new ones included (or `encoder_len`).
    pub seq_len: usize,
    /// Query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// KV heads; query head `h` reads KV head `h / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    /// Elements of a query and of a key head.
    pub head_size: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
    /// Softmax scale, finite; usually `head_size^−½`, never derived here.
    pub scale: f64,
    /// Everything else.
    pub features: AttentionFeatures<'a>,
}

/// Output and log-sum-exp of a set of queries: also the partial state that `merge` takes.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionOutput {
    /// `[q_len, num_heads, head_size_v]`.
    pub out: Vec<f64>,
    /// Natural log of the softmax denominator, sink included, `[num_heads, q_len]`; −∞ for a
    /// row without keys and without sink.
    pub lse: Vec<f64>,
    /// Query tokens (of all requests, in a varlen result).
    pub q_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
}

impl AttentionOutput {
    /// Zeros and −∞: the state of having seen nothing.
    ///
    /// # Errors
    /// [`ReferenceError::TooLarge`] when the shape cannot be allocated.
    pub fn empty(q_len: usize, num_heads: usize, head_size_v: usize) -> Result<Self, ReferenceError> {
        let mut lse = zeros("lse", &[num_heads, q_len])?;
        lse.fill(f64::NEG_INFINITY);
        Ok(AttentionOutput { out: zeros("out", &[q_len, num_heads, head_size_v])?, lse, q_len, num_heads, head_size_v })
    }

    /// The output vector `[head_size_v]` of one query and head, `None` out of range.
    pub fn row(&self, query: usize, head: usize) -> Option<&[f64]> {
        if query >= self.q_len || head >= self.num_heads {
            return None;
        }
        let start = (query * self.num_heads + head) * self.head_size_v;
        self.out.get(start..start + self.head_size_v)
    }

    /// The LSE of one query and head, `None` out of range.
    pub fn row_lse(&self, query: usize, head: usize) -> Option<f64> {
        if query >= self.q_len || head >= self.num_heads {
            return None;
        }
        self.lse.get(head * self.q_len + query).copied()
    }
}

/// Whether a partial state counts the sink: exactly one split of a row may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SinkShare {
    /// This part adds the sink to its denominator.
    Counted,
    /// Another part does.
    LeftOut,
}

/// Attention of one request.
///
/// For query `i` at position `p`, head `h`, KV head `g = h / (num_heads / num_kv_heads)` and
/// every visible key `j`:
///
/// ```text
/// x_j = scale · Σ_d q[i,h,d]·k[j,g,d]
/// x_j = softcap · tanh(x_j / softcap)          if softcap > 0
/// x_j = x_j − slope[h] · |p − j|               if ALiBi
/// m   = max(max_j x_j, sink[h])                the true maximum, first pass
/// z   = Σ_j exp(x_j − m) + exp(sink[h] − m)    second pass
/// out[i,h,:] = Σ_j exp(x_j − m) · v[j,g,:] / z
/// lse[h,i]   = m + ln z
/// ```
///
/// A masked key is never read, so what lies there (NaN, infinity) has no effect. A row without
/// keys gives zeros and LSE −∞, or LSE = sink. Sources: Vaswani 2017 (softmax attention), Press
/// 2022 (ALiBi), Gemma 2 (soft-cap), GPT-OSS (sinks); `docs` §numerics for the order.
///
/// # Errors
/// Lengths that do not fit the dimensions, a dimension of 0, heads that do not divide, a
/// non-finite scale, soft-cap or slope, a NaN or +∞ sink, a contradictory mask.
pub fn attention(inputs: &AttentionInputs<'_>) -> Result<AttentionOutput, ReferenceError> {
    attention_partial(inputs, 0..inputs.seq_len, SinkShare::Counted)
}

/// Attention over the keys `keys` alone, at their places in the whole sequence: one split of a
/// split-KV, cascade or context-parallel computation, to be merged by [`crate::merge()`].
///
/// # Errors
/// As [`attention`]; [`ReferenceError::Index`] when `keys` is not inside `0..seq_len`.
pub fn attention_partial(
    inputs: &AttentionInputs<'_>,
    keys: Range<usize>,
    sink: SinkShare,
) -> Result<AttentionOutput, ReferenceError> {
    attend(inputs, keys, sink, &|_, _| true)
}

/// The largest |v| among the value rows that any query of the request sees: the scale to which
/// absolute tolerances refer. 0 when nothing is visible.
///
/// # Errors
/// As [`attention`].
pub fn visible_value_scale(inputs: &AttentionInputs<'_>) -> Result<f64, ReferenceError> {
    validate(inputs)?;
    let mask = inputs.features.mask();
    let row = inputs.num_kv_heads * inputs.head_size_v;
    let mut largest = 0.0f64;
    for j in 0..inputs.seq_len {
        let seen = (0..inputs.q_len).any(|i| mask.visible(query_position(i, inputs.q_len, inputs.seq_len), j as i64));
        if seen {
            for value in &inputs.v[j * row..(j + 1) * row] {
                largest = largest.max(value.abs());
            }
        }
    }
    Ok(largest)
}

/// The one loop. `admit(query, key)` is a further condition beside the mask (sparse MLA).
pub(crate) fn attend(
    inputs: &AttentionInputs<'_>,
    keys: Range<usize>,
    sink: SinkShare,
    admit: &dyn Fn(usize, usize) -> bool,
) -> Result<AttentionOutput, ReferenceError> {
    validate(inputs)?;
    if keys.start > keys.end || keys.end > inputs.seq_len {
        return Err(ReferenceError::Index {
            name: "keys",
            index: 0,
            found: keys.end as i64,
            rule: format!("the range {}..{} must be ascending and inside 0..{}", keys.start, keys.end, inputs.seq_len),
        });
    }
    let mut result = AttentionOutput::empty(inputs.q_len, inputs.num_heads, inputs.head_size_v)?;
    let mask = inputs.features.mask();
    let group = inputs.num_heads / inputs.num_kv_heads;

    for i in 0..inputs.q_len {
        let p = query_position(i, inputs.q_len, inputs.seq_len);
        let visible: Vec<usize> = keys.clone().filter(|&j| mask.visible(p, j as i64) && admit(i, j)).collect();
        for h in 0..inputs.num_heads {
            let g = h / group;
            let logits: Vec<f64> = visible.iter().map(|&j| logit(inputs, i, h, g, p, j)).collect();
            let sink_logit = match (inputs.features.sinks, sink) {
                (Some(sinks), SinkShare::Counted) => sinks[h],
                _ => f64::NEG_INFINITY,
            };
            let max = logits.iter().copied().fold(sink_logit, f64::max);
            if max == f64::NEG_INFINITY && !logits.iter().any(|x| x.is_nan()) {
                continue; // empty: zeros and −∞ stand already
            }
            let start = (i * inputs.num_heads + h) * inputs.head_size_v;
            let out = &mut result.out[start..start + inputs.head_size_v];
            let mut z = (sink_logit - max).exp();
            for (&x, &j) in logits.iter().zip(&visible) {
                let weight = (x - max).exp();
                z += weight;
                let row = (j * inputs.num_kv_heads + g) * inputs.head_size_v;
                for (o, &v) in out.iter_mut().zip(&inputs.v[row..row + inputs.head_size_v]) {
                    *o += weight * v;
                }
            }
            for o in out.iter_mut() {
                *o /= z;
            }
            result.lse[h * inputs.q_len + i] = max + z.ln();
        }
    }
    Ok(result)
}

/// Scale → soft-cap → ALiBi of one query head and key.
fn logit(inputs: &AttentionInputs<'_>, i: usize, h: usize, g: usize, p: i64, j: usize) -> f64 {
    let q_row = (i * inputs.num_heads + h) * inputs.head_size;
    let k_row = (j * inputs.num_kv_heads + g) * inputs.head_size;
    let mut dot = 0.0;
    for d in 0..inputs.head_size {
        dot += inputs.q[q_row + d] * inputs.k[k_row + d];
    }
    let mut x = dot * inputs.scale;
    let cap = inputs.features.softcap;
    if cap > 0.0 {
        x = cap * (x / cap).tanh();
    }
    if let Some(slopes) = inputs.features.alibi_slopes {
        x -= slopes[h] * (p - j as i64).abs() as f64;
    }
    x
}

/// Every check, before any data is read.
fn validate(inputs: &AttentionInputs<'_>) -> Result<(), ReferenceError> {
    check_nonzero("num_heads", inputs.num_heads)?;
    check_nonzero("num_kv_heads", inputs.num_kv_heads)?;
    check_nonzero("head_size", inputs.head_size)?;
    check_nonzero("head_size_v", inputs.head_size_v)?;
    if !inputs.num_heads.is_multiple_of(inputs.num_kv_heads) {
        return Err(ReferenceError::HeadRatio { num_heads: inputs.num_heads, num_kv_heads: inputs.num_kv_heads });
    }
    let (q_len, seq_len) = (inputs.q_len, inputs.seq_len);
    check_len("q", &[q_len, inputs.num_heads, inputs.head_size], inputs.q.len())?;
    check_len("k", &[seq_len, inputs.num_kv_heads, inputs.head_size], inputs.k.len())?;
    check_len("v", &[seq_len, inputs.num_kv_heads, inputs.head_size_v], inputs.v.len())?;
    check_finite("scale", &[inputs.scale])?;
    let features = &inputs.features;
    check_finite("softcap", &[features.softcap])?;
    if let Some(slopes) = features.alibi_slopes {
        check_len("alibi_slopes", &[inputs.num_heads], slopes.len())?;
        check_finite("alibi_slopes", slopes)?;
    }
    if let Some(sinks) = features.sinks {
        check_len("sinks", &[inputs.num_heads], sinks.len())?;
        if let Some(index) = sinks.iter().position(|s| s.is_nan() || *s == f64::INFINITY) {
            return Err(ReferenceError::Value {
                name: "sinks",
                index,
                value: sinks[index],
                rule: "a sink is finite, or -inf for none",
            });
        }
    }
    features.mask().validate()
}
