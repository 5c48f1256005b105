//! Products of rows with a prepacked matrix: projections into and out of a latent space.
//!
//! Each element of a result is one chain of multiply-adds over the inner dimension in ascending
//! order, however many rows are computed beside it. Must not know what is projected.

mod pairs;

pub use pairs::PackedPairs;

use crate::{
    attention::CallError,
    isa::Isa,
    simd::{Simd, with_isa},
};
use half::bf16;

/// Columns of a panel.
const PANEL: usize = 32;

/// A matrix `[inner, columns]`, cut into panels of 32 columns, each `[inner][32]`, the last one padded
/// with zeros.
#[derive(Clone, Debug)]
pub struct Packed {
    inner: usize,
    columns: usize,
    values: Values,
}

/// Sixteen bits where they hold every value exactly, which halves what is read.
#[derive(Clone, Debug)]
enum Values {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
}

/// Values of a panel.
trait Weight: Copy {
    /// # Safety
    /// As [`Simd`].
    unsafe fn load<S: Simd>(from: *const Self) -> S;
}

impl Weight for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S {
        // SAFETY: the caller vouches for it.
        unsafe { S::load(from) }
    }
}

impl Weight for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S {
        // SAFETY: the caller vouches for it.
        unsafe { S::load_bf16(from) }
    }
}

/// Rows of f32 with a stride.
#[derive(Clone, Copy)]
struct Source<'a> {
    rows: usize,
    values: &'a [f32],
    stride: usize,
}

impl Packed {
    /// Packs the matrix whose element (inner index, column) is `at`.
    #[must_use]
    pub fn new(inner: usize, columns: usize, at: impl Fn(usize, usize) -> f32) -> Self {
        let is_exact = |value: f32| value.to_bits() & 0xffff == 0;
        let values = if (0..inner).all(|i| (0..columns).all(|column| is_exact(at(i, column)))) {
            Values::Bf16(pack(inner, columns, bf16::ZERO, |i, column| bf16::from_f32(at(i, column))))
        } else {
            Values::F32(pack(inner, columns, 0.0, at))
        };
        Self { inner, columns, values }
    }

    /// `out[r] = x[r] · matrix` for each row: `x` is `rows` rows of `inner` elements, `out` of `columns`;
    /// with each the elements from row to row.
    ///
    /// # Errors
    /// When a slice is too short for its rows.
    pub fn multiply(
        &self,
        isa: Isa,
        rows: usize,
        (x, x_stride): (&[f32], usize),
        (out, out_stride): (&mut [f32], usize),
    ) -> Result<(), CallError> {
        let Some(last) = rows.checked_sub(1) else { return Ok(()) };
        fits("elements of the rows of a product", x.len(), last, x_stride, self.inner)?;
        fits("elements of the results of a product", out.len(), last, out_stride, self.columns)?;
        let isa = if isa.is_available() { isa } else { Isa::Portable };
        let x = Source { rows, values: x, stride: x_stride };
        for (panel, first) in (0..self.columns).step_by(PANEL).enumerate() {
            let width = PANEL.min(self.columns - first);
            let values = panel * self.inner * PANEL..(panel + 1) * self.inner * PANEL;
            let out = &mut out[first..];
            match &self.values {
                Values::Bf16(all) => {
                    let panel = &all[values];
                    with_isa!(isa, halves(x: Source<'_>, panel: &[bf16], out: &mut [f32], out_stride: usize, width: usize));
                }
                Values::F32(all) => {
                    let panel = &all[values];
                    with_isa!(isa, floats(x: Source<'_>, panel: &[f32], out: &mut [f32], out_stride: usize, width: usize));
                }
            }
        }
        Ok(())
    }
}

/// Whether a buffer of `found` elements holds rows up to `last` of `width` elements.
fn fits(what: &'static str, found: usize, last: usize, stride: usize, width: usize) -> Result<(), CallError> {
    let expected = last.saturating_mul(stride).saturating_add(width);
    if found < expected { Err(CallError::Mismatch { what, found, expected }) } else { Ok(()) }
}

fn pack<T: Copy>(inner: usize, columns: usize, zero: T, at: impl Fn(usize, usize) -> T) -> Vec<T> {
    let mut values = Vec::with_capacity(inner * columns.next_multiple_of(PANEL));
    for first in (0..columns).step_by(PANEL) {
        for i in 0..inner {
            values.extend((first..first + PANEL).map(|column| if column < columns { at(i, column) } else { zero }));
        }
    }
    values
}

/// # Safety
/// As [`by_rows`].
#[inline(always)]
unsafe fn halves<S: Simd>(x: Source<'_>, panel: &[bf16], out: &mut [f32], stride: usize, width: usize) {
    // SAFETY: as the caller vouches.
    unsafe { by_rows::<S, bf16>(x, panel, out, stride, width) }
}

/// # Safety
/// As [`by_rows`].
#[inline(always)]
unsafe fn floats<S: Simd>(x: Source<'_>, panel: &[f32], out: &mut [f32], stride: usize, width: usize) {
    // SAFETY: as the caller vouches.
    unsafe { by_rows::<S, f32>(x, panel, out, stride, width) }
}

/// All rows times a panel, of whose results `width` are kept; as many rows at a time as there are
/// registers for.
///
/// # Safety
/// As [`Simd`]. All rows must lie inside `x` and `out`, as [`Packed::multiply`] checks.
#[inline(always)]
unsafe fn by_rows<S: Simd, W: Weight>(x: Source<'_>, panel: &[W], out: &mut [f32], stride: usize, width: usize) {
    let mut row = 0;
    while row < x.rows {
        let from = x.values[row * x.stride..].as_ptr();
        let mut results = [[0.0; PANEL]; 8];
        // SAFETY: the rows lie in `x`, as the caller vouches.
        let count = unsafe {
            match (x.rows - row, S::LANES) {
                (8.., 16) => tile::<S, W, 8, 2>(panel, from, x.stride, &mut results),
                (_, 16) => tile::<S, W, 1, 2>(panel, from, x.stride, &mut results),
                (2.., _) => tile::<S, W, 2, 4>(panel, from, x.stride, &mut results),
                _ => tile::<S, W, 1, 4>(panel, from, x.stride, &mut results),
            }
        };
        for (at, values) in results[..count].iter().enumerate() {
            out[(row + at) * stride..][..width].copy_from_slice(&values[..width]);
        }
        row += count;
    }
}

/// `ROWS` rows times a panel of `VECTORS` vectors; gives the number of rows.
///
/// # Safety
/// As [`Simd`]; `x` must be valid for `ROWS` rows.
#[inline(always)]
unsafe fn tile<S: Simd, W: Weight, const ROWS: usize, const VECTORS: usize>(
    panel: &[W],
    x: *const f32,
    x_stride: usize,
    results: &mut [[f32; PANEL]; 8],
) -> usize {
    let panel_ptr = panel.as_ptr();
    // SAFETY: the caller vouches for the rows; the vectors lie inside the panel.
    unsafe {
        let mut sums = [[S::zero(); VECTORS]; ROWS];
        for i in 0..panel.len() / PANEL {
            let mut weights = [S::zero(); VECTORS];
            for (at, weight) in weights.iter_mut().enumerate() {
                *weight = W::load(panel_ptr.add(i * PANEL + at * S::LANES));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let value = S::splat(*x.add(row * x_stride + i));
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum = value.mul_add(weight, *sum);
                }
            }
        }
        for (sums, result) in sums.iter().zip(results) {
            for (at, sum) in sums.iter().enumerate() {
                sum.store(result.as_mut_ptr().add(at * S::LANES));
            }
        }
    }
    ROWS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(inner: usize, columns: usize, exact: bool) -> impl Fn(usize, usize) -> f32 {
        move |i, column| {
            let value = ((i * 31 + column * 17 + inner + columns) % 97) as f32 / 48.0 - 1.0;
            if exact { bf16::from_f32(value).to_f32() } else { value }
        }
    }

    #[test]
    fn products_are_right_and_a_row_does_not_depend_on_the_others() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (rows, inner, columns) in [(1, 1, 1), (3, 7, 5), (9, 64, 32), (17, 33, 70), (8, 512, 128)] {
                for exact in [true, false] {
                    let at = matrix(inner, columns, exact);
                    let packed = Packed::new(inner, columns, &at);
                    assert_eq!(matches!(packed.values, Values::Bf16(_)), exact);
                    let (x_stride, out_stride) = (inner + 3, columns + 2);
                    let x: Vec<f32> = (0..rows * x_stride).map(|i| (i % 13) as f32 / 7.0 - 0.9).collect();
                    let mut out = vec![f32::NAN; rows * out_stride];
                    packed.multiply(isa, rows, (&x, x_stride), (&mut out, out_stride)).unwrap();
                    for row in 0..rows {
                        let mut alone = vec![f32::NAN; columns];
                        let one = &x[row * x_stride..][..inner];
                        packed.multiply(isa, 1, (one, inner), (&mut alone, columns)).unwrap();
                        assert_eq!(alone, out[row * out_stride..][..columns], "{isa}: row {row} of {rows}");
                        assert!(out[row * out_stride + columns..(row + 1) * out_stride].iter().all(|pad| pad.is_nan()));
                        for (column, found) in alone.iter().enumerate() {
                            let right: f64 = (0..inner).map(|i| f64::from(one[i]) * f64::from(at(i, column))).sum();
                            assert!((f64::from(*found) - right).abs() < 1e-4, "{isa}: {found} is not {right}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_that_do_not_fit_are_an_error() {
        let packed = Packed::new(4, 4, |_, _| 1.0);
        let x = [0.0; 7];
        assert!(packed.multiply(Isa::Portable, 2, (&x, 4), (&mut [0.0; 8], 4)).is_err());
        assert!(packed.multiply(Isa::Portable, 1, (&x, 4), (&mut [0.0; 3], 4)).is_err());
        assert!(packed.multiply(Isa::Portable, usize::MAX, (&x, usize::MAX), (&mut [0.0; 3], 4)).is_err());
        assert!(packed.multiply(Isa::Portable, 0, (&[], 4), (&mut [], 4)).is_ok());
    }
}
