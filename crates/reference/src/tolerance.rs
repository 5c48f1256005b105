//! How close is close enough: the one table, and the comparison that applies it.
//!
//! Owns the numbers. Must not know what is being compared. A number here is **never loosened to
//! make a kernel pass**: a kernel outside it is wrong, or does arithmetic that the contract does
//! not allow.
//!
//! # What the numbers cover
//!
//! The reference computes from the stored values (what q, k, v and the cache decode to), so
//! quantisation error is not in the table. What remains, with u = the unit roundoff of the
//! compute dtype (f16 2⁻¹¹, bf16 2⁻⁹), for a kernel that accumulates in f32:
//!
//! | source | out | LSE |
//! |---|---|---|
//! | dot products, exp and sums in f32 | about 10⁻⁵ · max\|v\| | about 10⁻⁵, and 10⁻⁵ of \|LSE\| for large logits |
//! | P rounded to the compute dtype for P·V | u · max\|v\| | – |
//! | denominator summed from rounded P | u · max\|v\| | u |
//! | output rounded to the compute dtype | u · \|out\| | – |
//! | K and V rounded after conversion | a few u · max\|v\| | a few u |
//!
//! The last line applies when the cache dtype is not the compute dtype: a scaled fp8 or int8
//! element is rounded once more before the dot product; K and V of expanded MLA are, too. The
//! table takes twice the sum of the others: out_abs = 4u, out_rel = 2u, lse_abs = 2u + 10⁻⁴; a
//! conversion doubles out_abs and adds 3u to lse_abs. In f32 conversion is exact and nothing is
//! rounded: 2·10⁻⁵. Not covered, hence not allowed: queries rounded after scaling, half-precision
//! accumulators, int8 queries, partial states kept in half precision.

use thiserror::Error;

use crate::error::ReferenceError;
use crate::formats::Format;

/// Allowed error: `abs · value_scale + rel · |expected|` for `out`, `abs + rel · |expected|` for
/// the (natural) LSE.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Absolute, in units of the largest |v| that the queries see.
    pub out_abs: f64,
    /// Relative to the expected output.
    pub out_rel: f64,
    /// Absolute, natural log units.
    pub lse_abs: f64,
    /// Relative to the expected LSE.
    pub lse_rel: f64,
}

const F32: Tolerance = Tolerance { out_abs: 2e-5, out_rel: 2e-5, lse_abs: 1e-4, lse_rel: 1e-5 };

/// The table's row for half-precision compute with unit roundoff `u`.
const fn half_row(u: f64, converted: bool) -> Tolerance {
    Tolerance {
        out_abs: if converted { 8.0 * u } else { 4.0 * u },
        out_rel: 2.0 * u,
        lse_abs: if converted { 5.0 * u } else { 2.0 * u } + 1e-4,
        lse_rel: 1e-5,
    }
}

const F16_UNIT: f64 = 1.0 / 2048.0;
const BF16_UNIT: f64 = 1.0 / 512.0;

/// The tolerance of a kernel that computes in `compute` (f32, f16, bf16: the dtype of q and out)
/// from a cache stored as `kv_cache` (the element format; per-token-head forms by theirs).
///
/// | compute | cache | out_abs | out_rel | lse_abs | lse_rel |
/// |---|---|---|---|---|---|
/// | f32 | any | 2e-5 | 2e-5 | 1e-4 | 1e-5 |
/// | f16 | f16 | 1.95e-3 | 9.8e-4 | 1.08e-3 | 1e-5 |
/// | f16 | other | 3.9e-3 | 9.8e-4 | 2.5e-3 | 1e-5 |
/// | bf16 | bf16 | 7.8e-3 | 3.9e-3 | 4.0e-3 | 1e-5 |
/// | bf16 | other | 1.56e-2 | 3.9e-3 | 9.9e-3 | 1e-5 |
///
/// Expanded MLA prefill makes its own K and V: use [`tolerance_mla_expanded`].
///
/// # Errors
/// [`ReferenceError::Format`] when `compute` is not f32, f16 or bf16.
pub fn tolerance(compute: Format, kv_cache: Format) -> Result<Tolerance, ReferenceError> {
    row(compute, compute != kv_cache)
}

/// The tolerance of an expanded MLA prefill, whose K and V are rounded to `compute` after the
/// projection: the "other" row of [`tolerance`].
///
/// # Errors
/// As [`tolerance`].
pub fn tolerance_mla_expanded(compute: Format) -> Result<Tolerance, ReferenceError> {
    row(compute, true)
}

fn row(compute: Format, converted: bool) -> Result<Tolerance, ReferenceError> {
    match compute {
        Format::F32 => Ok(F32),
        Format::F16 => Ok(half_row(F16_UNIT, converted)),
        Format::Bf16 => Ok(half_row(BF16_UNIT, converted)),
        _ => Err(ReferenceError::Format {
            operation: "tolerance of a compute dtype",
            found: compute.name(),
            valid: "f32, f16, bf16",
        }),
    }
}

/// What a passed comparison saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompareReport {
    /// Elements compared.
    pub elements: usize,
    /// Largest |actual − expected|.
    pub max_error: f64,
    /// Largest error as a fraction of what was allowed, 0..=1.
    pub max_fraction: f64,
    /// Where that fraction was.
    pub worst_index: usize,
}

/// Why a comparison failed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// Different numbers of elements.
    #[error("{actual} elements found, {expected} expected; compare tensors of one shape")]
    Length {
        /// Found.
        actual: usize,
        /// Expected.
        expected: usize,
    },
    /// Elements outside the tolerance; the worst one is shown (the first of several as bad).
    #[error(
        "element {index} is {actual}, expected {expected}: error {error:e}, allowed {allowed:e}; {count} of {total} elements are outside"
    )]
    Element {
        /// Index of the worst element.
        index: usize,
        /// Its expected value.
        expected: f64,
        /// Its actual value; NaN never matches, −∞ matches −∞ alone.
        actual: f64,
        /// |actual − expected|, infinite when one of them is not finite.
        error: f64,
        /// What was allowed there.
        allowed: f64,
        /// Elements outside the tolerance.
        count: usize,
        /// Elements compared.
        total: usize,
    },
    /// The comparison itself makes no sense.
    #[error("{name} is {value}; it must be finite and not negative")]
    Parameter {
        /// `value_scale`, `abs` or `rel`.
        name: &'static str,
        /// What was found.
        value: f64,
    },
}

/// Compares outputs. `value_scale` is the largest |v| that the queries see
/// ([`crate::attention::visible_value_scale`]).
///
/// # Errors
/// [`Mismatch`].
pub fn compare_out<T: Copy + Into<f64>>(
    actual: &[T],
    expected: &[f64],
    value_scale: f64,
    tolerance: &Tolerance,
) -> Result<CompareReport, Mismatch> {
    compare(actual, expected, value_scale, tolerance.out_abs, tolerance.out_rel)
}

/// Compares natural LSEs.
///
/// # Errors
/// [`Mismatch`].
pub fn compare_lse<T: Copy + Into<f64>>(
    actual: &[T],
    expected: &[f64],
    tolerance: &Tolerance,
) -> Result<CompareReport, Mismatch> {
    compare(actual, expected, 1.0, tolerance.lse_abs, tolerance.lse_rel)
}

/// Compares element by element: `|actual − expected| ≤ abs · value_scale + rel · |expected|`.
/// NaN in either never matches; an infinity matches only itself.
///
/// # Errors
/// [`Mismatch`].
pub fn compare<T: Copy + Into<f64>>(
    actual: &[T],
    expected: &[f64],
    value_scale: f64,
    abs: f64,
    rel: f64,
) -> Result<CompareReport, Mismatch> {
    for (name, value) in [("value_scale", value_scale), ("abs", abs), ("rel", rel)] {
        if !(value.is_finite() && value >= 0.0) {
            return Err(Mismatch::Parameter { name, value });
        }
    }
    if actual.len() != expected.len() {
        return Err(Mismatch::Length { actual: actual.len(), expected: expected.len() });
    }
    let mut report = CompareReport { elements: expected.len(), max_error: 0.0, max_fraction: 0.0, worst_index: 0 };
    let mut outside = 0;
    for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let a: f64 = a.into();
        let (error, allowed) = error_and_allowed(a, e, value_scale, abs, rel);
        if error > allowed {
            outside += 1;
        }
        report.max_error = report.max_error.max(error);
        let fraction = if error == 0.0 { 0.0 } else { error / allowed };
        if fraction > report.max_fraction {
            report.max_fraction = fraction;
            report.worst_index = index;
        }
    }
    if outside == 0 {
        return Ok(report);
    }
    let index = report.worst_index;
    let (a, e): (f64, f64) = (actual[index].into(), expected[index]);
    let (error, allowed) = error_and_allowed(a, e, value_scale, abs, rel);
    Err(Mismatch::Element { index, expected: e, actual: a, error, allowed, count: outside, total: expected.len() })
}

fn error_and_allowed(a: f64, e: f64, value_scale: f64, abs: f64, rel: f64) -> (f64, f64) {
    if a == e {
        return (0.0, 0.0); // equal infinities included
    }
    if !a.is_finite() || !e.is_finite() {
        return (f64::INFINITY, 0.0);
    }
    ((a - e).abs(), abs * value_scale + rel * e.abs())
}
