//! How quantised KV caches are stored: which scale belongs to which element.
//!
//! Owns `value = decode(stored) · scale` and its inverse for every scale granularity. Must not
//! know blocks, layouts of caches in memory, or attention; bit patterns belong to `formats`.

use crate::error::ReferenceError;
use crate::formats::Format;
use crate::shape::{check_len, check_nonzero, elements};

/// Shape of a K or V tensor: `[tokens, num_kv_heads, head_size]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Tokens, may be 0.
    pub tokens: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
}

impl CacheShape {
    fn dims(&self) -> [usize; 3] {
        [self.tokens, self.num_kv_heads, self.head_size]
    }

    fn validate(&self) -> Result<usize, ReferenceError> {
        check_nonzero("num_kv_heads", self.num_kv_heads)?;
        check_nonzero("head_size", self.head_size)?;
        elements("cache", &self.dims())
    }
}

/// Scales that the caller gives, f32, finite and above 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scales<'a> {
    /// One for the tensor.
    PerTensor(f32),
    /// `[num_kv_heads]`.
    PerHead(&'a [f32]),
}

impl Scales<'_> {
    fn validate(&self, shape: &CacheShape) -> Result<(), ReferenceError> {
        let list = match self {
            Scales::PerTensor(scale) => std::slice::from_ref(scale),
            Scales::PerHead(scales) => {
                check_len("scales", &[shape.num_kv_heads], scales.len())?;
                scales
            }
        };
        check_scales(list, |s| s > 0.0, "a scale is finite and above 0")
    }

    fn of_head(&self, head: usize) -> f64 {
        match self {
            Scales::PerTensor(scale) => f64::from(*scale),
            Scales::PerHead(scales) => f64::from(scales[head]),
        }
    }
}

/// Stores values `[tokens, num_kv_heads, head_size]` in an 8-bit format, one byte each:
/// `stored = encode(value / scale)`, nearest even, saturating.
///
/// # Errors
/// A format that is not fp8 or int8; a scale that is 0, negative, NaN or infinite; lengths that
/// do not fit; NaN for int8, which cannot hold it.
pub fn encode(
    format: Format,
    values: &[f64],
    shape: &CacheShape,
    scales: Scales<'_>,
) -> Result<Vec<u8>, ReferenceError> {
    check_eight_bit(format)?;
    shape.validate()?;
    check_len("values", &shape.dims(), values.len())?;
    scales.validate(shape)?;
    if format.is_integer() {
        check_values(values, |v| !v.is_nan(), "int8 has no NaN; remove it or use fp8")?;
    }
    let scaled: Vec<f64> = values
        .iter()
        .enumerate()
        .map(|(at, v)| v / scales.of_head(at / shape.head_size % shape.num_kv_heads))
        .collect();
    Ok(format.encode_slice(&scaled))
}

/// Reads what [`encode`] stores: `value = decode(stored) · scale`, exact in f64.
///
/// # Errors
/// As [`encode`].
pub fn decode(
    format: Format,
    bytes: &[u8],
    shape: &CacheShape,
    scales: Scales<'_>,
) -> Result<Vec<f64>, ReferenceError> {
    check_eight_bit(format)?;
    let count = shape.validate()?;
    scales.validate(shape)?;
    let stored = format.decode_slice(bytes, count)?;
    Ok(stored.iter().enumerate().map(|(at, v)| v * scales.of_head(at / shape.head_size % shape.num_kv_heads)).collect())
}

/// The formats with one scale per token and head, symmetric (no zero point).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PerTokenHead {
    /// `int8_per_token_head`: scale = absmax / 127.
    Int8,
    /// `fp8_per_token_head` (E4M3): scale = absmax / 448.
    Fp8E4m3,
    /// `int4_per_token_head`: scale = absmax / 7, two elements per byte, low nibble first.
    Int4,
}

impl PerTokenHead {
    /// The storage format of one element.
    pub fn format(self) -> Format {
        match self {
            PerTokenHead::Int8 => Format::Int8,
            PerTokenHead::Fp8E4m3 => Format::Fp8E4m3,
            PerTokenHead::Int4 => Format::Int4,
        }
    }

    /// The stored number that absmax becomes: 127, 448 or 7.
    pub fn limit(self) -> f64 {
        self.format().max_finite()
    }
}

/// A K or V tensor stored with one scale per token and head.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenHeadCache {
    /// `[tokens, num_kv_heads, bytes]` with bytes = head_size, or ceil(head_size / 2) for int4.
    pub data: Vec<u8>,
    /// `[tokens, num_kv_heads]`, f32; 0 for a head whose elements are all 0.
    pub scales: Vec<f32>,
}

/// Stores values `[tokens, num_kv_heads, head_size]` with a scale per token and head:
/// `scale = f32(absmax / limit)`, `stored = encode(value / scale)`, nearest even. A scale of 0
/// (all elements 0, or absmax below what f32 holds) stores zeros.
///
/// # Errors
/// Lengths that do not fit; a value that is NaN or infinite (it has no scale), or so large that
/// the f32 scale overflows.
pub fn encode_per_token_head(
    kind: PerTokenHead,
    values: &[f64],
    shape: &CacheShape,
) -> Result<TokenHeadCache, ReferenceError> {
    shape.validate()?;
    check_len("values", &shape.dims(), values.len())?;
    let representable = |v: f64| ((v.abs() / kind.limit()) as f32).is_finite();
    check_values(values, representable, "a value that sets a scale is finite and fits an f32 scale")?;
    let mut cache = TokenHeadCache { data: Vec::new(), scales: Vec::new() };
    for row in values.chunks_exact(shape.head_size) {
        let absmax = row.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        let scale = (absmax / kind.limit()) as f32;
        let scaled: Vec<f64> = row
            .iter()
            .map(|v| if scale == 0.0 { 0.0 } else { v / f64::from(scale) })
            // Rounding of the scale to f32 (a subnormal one above all) must not push an element
            // past the symmetric range: −128 and −8 are never written.
            .map(|v| v.clamp(-kind.limit(), kind.limit()))
            .collect();
        cache.data.extend(kind.format().encode_slice(&scaled));
        cache.scales.push(scale);
    }
    Ok(cache)
}

/// Reads what [`encode_per_token_head`] stores: `value = decode(stored) · scale`.
///
/// # Errors
/// Lengths that do not fit; a stored scale that is negative, NaN or infinite.
pub fn decode_per_token_head(
    kind: PerTokenHead,
    cache: &TokenHeadCache,
    shape: &CacheShape,
) -> Result<Vec<f64>, ReferenceError> {
    shape.validate()?;
    let width = kind.format().byte_len(shape.head_size);
    check_len("data", &[shape.tokens, shape.num_kv_heads, width], cache.data.len())?;
    check_len("scales", &[shape.tokens, shape.num_kv_heads], cache.scales.len())?;
    check_scales(&cache.scales, |s| s >= 0.0, "a stored scale is finite and not negative")?;
    let mut values = Vec::new();
    for (bytes, &scale) in cache.data.chunks_exact(width).zip(&cache.scales) {
        let stored = kind.format().decode_slice(bytes, shape.head_size)?;
        values.extend(stored.iter().map(|v| v * f64::from(scale)));
    }
    Ok(values)
}

fn check_eight_bit(format: Format) -> Result<(), ReferenceError> {
    if format.is_fp8() || format == Format::Int8 {
        return Ok(());
    }
    Err(ReferenceError::Format {
        operation: "a per-tensor or per-head scaled cache",
        found: format.name(),
        valid: "fp8_e4m3, fp8_e5m2, fp8_e4m3fnuz, fp8_e5m2fnuz, int8",
    })
}

fn check_scales(scales: &[f32], good: impl Fn(f32) -> bool, rule: &'static str) -> Result<(), ReferenceError> {
    match scales.iter().position(|&s| !(s.is_finite() && good(s))) {
        None => Ok(()),
        Some(index) => Err(ReferenceError::Value { name: "scales", index, value: f64::from(scales[index]), rule }),
    }
}

fn check_values(values: &[f64], good: impl Fn(f64) -> bool, rule: &'static str) -> Result<(), ReferenceError> {
    match values.iter().position(|&v| !good(v)) {
        None => Ok(()),
        Some(index) => Err(ReferenceError::Value { name: "values", index, value: values[index], rule }),
    }
}
