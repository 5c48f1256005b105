//! Products of bf16 rows with a matrix that bf16 holds exactly, by dot products of pairs.
//!
//! Must not know what is projected.

use super::{PANEL, fits, pack};
use crate::{attention::CallError, isa::Isa};
use half::bf16;

/// A matrix `[inner, columns]` as pairs along the inner dimension: panels of 32 columns, each
/// `[inner / 2][32]` pairs, padded with zeros.
#[derive(Clone, Debug)]
pub struct PackedPairs {
    pairs: usize,
    columns: usize,
    values: Vec<u32>,
}

impl PackedPairs {
    /// Packs the matrix whose element (inner index, column) is `at`; `None` when the instruction set
    /// has no dot products of bf16, or bf16 does not hold every value exactly.
    #[must_use]
    pub fn new(isa: Isa, inner: usize, columns: usize, at: impl Fn(usize, usize) -> f32) -> Option<Self> {
        let is_exact = |i| (0..columns).all(|column| at(i, column).to_bits() & 0xffff == 0);
        if !isa.has_bf16_dot() || !(0..inner).all(is_exact) {
            return None;
        }
        let half = |i: usize, column| if i < inner { at(i, column).to_bits() >> 16 } else { 0 };
        let pairs = inner.div_ceil(2);
        let values = pack(pairs, columns, 0, |pair, column| half(2 * pair, column) | half(2 * pair + 1, column) << 16);
        Some(Self { pairs, columns, values })
    }

    /// Elements of a row of `x`: the inner dimension, made even.
    #[must_use]
    pub fn row_len(&self) -> usize {
        2 * self.pairs
    }

    /// `out[r] = x[r] · matrix` for each row, summed in f32 and rounded to bf16: `x` is `rows` rows of
    /// [`PackedPairs::row_len`] elements, the last one zero where the inner dimension is odd; `out` of
    /// `columns`; with each the elements from row to row.
    ///
    /// # Errors
    /// When a slice is too short for its rows.
    pub fn multiply(
        &self,
        rows: usize,
        (x, x_stride): (&[bf16], usize),
        (out, out_stride): (&mut [bf16], usize),
    ) -> Result<(), CallError> {
        let Some(last) = rows.checked_sub(1) else { return Ok(()) };
        fits("elements of the rows of a product", x.len(), last, x_stride, self.row_len())?;
        fits("elements of the results of a product", out.len(), last, out_stride, self.columns)?;
        for (panel, first) in (0..self.columns).step_by(PANEL).enumerate() {
            let panel = &self.values[panel * self.pairs * PANEL..(panel + 1) * self.pairs * PANEL];
            let width = PANEL.min(self.columns - first);
            let mut row = 0;
            while row < rows {
                let mut results = [[bf16::ZERO; PANEL]; ROWS];
                let count = tile(panel, &x[row * x_stride..], x_stride, rows - row, &mut results);
                for (at, values) in results[..count].iter().enumerate() {
                    out[(row + at) * out_stride + first..][..width].copy_from_slice(&values[..width]);
                }
                row += count;
            }
        }
        Ok(())
    }
}

/// Rows that are computed together.
const ROWS: usize = 8;

/// Computes the next rows of `left`, which lie in `x`; gives how many.
fn tile(panel: &[u32], x: &[bf16], stride: usize, left: usize, results: &mut [[bf16; PANEL]; ROWS]) -> usize {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a `PackedPairs` exists only where the instruction set is, and `multiply` has checked
    // that `x` holds all rows that are left.
    unsafe {
        if left >= ROWS {
            x86::tile::<ROWS>(panel, x, stride, results);
            return ROWS;
        }
        x86::tile::<1>(panel, x, stride, results);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (panel, x, stride, left, results);
    1
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{PANEL, bf16};
    use std::arch::x86_64::*;

    /// # Safety
    /// AVX-512 BF16 must be present; `x` must hold `COUNT` rows of twice as many elements as the panel
    /// has pairs.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub unsafe fn tile<const COUNT: usize>(panel: &[u32], x: &[bf16], stride: usize, results: &mut [[bf16; PANEL]]) {
        let x = x.as_ptr();
        let mut sums = [[_mm512_setzero_ps(); 2]; COUNT];
        for (pair, weights) in panel.chunks_exact(PANEL).enumerate() {
            // SAFETY: a chunk of the panel holds two vectors; the caller vouches for the rows. The
            // types of a transmutation have the same bits.
            unsafe {
                let load = |at: usize| {
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(weights.as_ptr().add(at).cast()))
                };
                let weights = [load(0), load(16)];
                for (row, sums) in sums.iter_mut().enumerate() {
                    let value = x.add(row * stride + 2 * pair).cast::<i32>().read_unaligned();
                    let value = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(value));
                    for (sum, weights) in sums.iter_mut().zip(weights) {
                        *sum = _mm512_dpbf16_ps(*sum, weights, value);
                    }
                }
            }
        }
        for (sums, result) in sums.into_iter().zip(results) {
            for (sum, result) in sums.into_iter().zip(result.chunks_exact_mut(16)) {
                // SAFETY: the result has room for sixteen elements; the types have the same bits.
                unsafe {
                    let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(sum));
                    _mm256_storeu_si256(result.as_mut_ptr().cast(), rounded);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_right_and_a_row_does_not_depend_on_the_others() {
        let isa = Isa::best();
        for (rows, inner, columns) in [(1, 1, 1), (3, 7, 5), (9, 64, 32), (17, 33, 70), (8, 512, 128)] {
            let at =
                |i: usize, column: usize| bf16::from_f32(((i * 31 + column * 17) % 97) as f32 / 48.0 - 1.0).to_f32();
            assert!(PackedPairs::new(isa, inner, columns, |_, _| 0.1).is_none(), "not exact");
            let Some(packed) = PackedPairs::new(isa, inner, columns, at) else {
                assert!(!isa.has_bf16_dot());
                return;
            };
            let (x_stride, out_stride) = (packed.row_len() + 3, columns + 2);
            let value = |row: usize, i: usize| if i < inner { ((row * 5 + i) % 13) as f32 / 8.0 - 0.75 } else { 0.0 };
            let x: Vec<bf16> =
                (0..rows * x_stride).map(|at| bf16::from_f32(value(at / x_stride, at % x_stride))).collect();
            let mut out = vec![bf16::NAN; rows * out_stride];
            packed.multiply(rows, (&x, x_stride), (&mut out, out_stride)).unwrap();
            for row in 0..rows {
                let mut alone = vec![bf16::NAN; columns];
                packed.multiply(1, (&x[row * x_stride..], x_stride), (&mut alone, columns)).unwrap();
                assert_eq!(alone, out[row * out_stride..][..columns], "row {row} of {rows}");
                assert!(out[row * out_stride + columns..(row + 1) * out_stride].iter().all(|pad| pad.is_nan()));
                for (column, found) in alone.iter().enumerate() {
                    let right: f64 = (0..inner).map(|i| f64::from(value(row, i)) * f64::from(at(i, column))).sum();
                    assert!((found.to_f64() - right).abs() < 1e-3 + right.abs() / 256.0, "{found} is not {right}");
                }
            }
            assert!(packed.multiply(rows + 1, (&x, x_stride), (&mut out, out_stride)).is_err());
        }
    }
}
