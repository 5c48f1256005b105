//! Products of rows with a prepacked matrix, in f32.
//!
//! Owns the packing and the loop over panels. Each element of a result is one chain of
//! multiply-adds over the inner dimension in ascending order, whatever else is computed beside it:
//! a row's result does not depend on how many rows there are.
//!
//! Must not know what is projected.

mod kernels;

use attache_cpu_kernels::Isa;
use attache_sdk::prelude::*;
use half::bf16;

/// Columns of a panel.
const PANEL: usize = 32;

/// A matrix `[inner, columns]`, cut into panels of [`PANEL`] columns, each `[inner][PANEL]`, the
/// last one padded with zeros.
pub struct Packed {
    inner: usize,
    columns: usize,
    values: Values,
}

/// Sixteen bits where they hold every value exactly, which halves what is read.
enum Values {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
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

impl Packed {
    /// Packs the matrix whose element (inner index, column) is `at`.
    pub fn new(inner: usize, columns: usize, at: impl Fn(usize, usize) -> f32) -> Self {
        let exact = |value: f32| value.to_bits() & 0xffff == 0;
        let all_exact = (0..inner).all(|i| (0..columns).all(|column| exact(at(i, column))));
        let values = if all_exact {
            Values::Bf16(pack(inner, columns, bf16::ZERO, |i, column| bf16::from_f32(at(i, column))))
        } else {
            Values::F32(pack(inner, columns, 0.0, at))
        };
        Self { inner, columns, values }
    }

    /// `out[r] = x[r] · matrix` for each row: `x` `[rows, inner]` with `x_stride` elements from row
    /// to row, `out` `[rows, columns]` with `out_stride`.
    ///
    /// # Errors
    /// When a slice is too short for its rows.
    pub fn multiply(
        &self,
        isa: Isa,
        rows: usize,
        (x, x_stride): (&[f32], usize),
        (out, out_stride): (&mut [f32], usize),
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let reach = |stride: usize, width: usize| (rows - 1) * stride + width;
        if x.len() < reach(x_stride, self.inner) || out.len() < reach(out_stride, self.columns) {
            return Err(BackendError::new(ErrorCode::Internal, "a projection's rows reach outside their buffer"));
        }
        for (panel, first) in (0..self.columns).step_by(PANEL).enumerate() {
            let width = PANEL.min(self.columns - first);
            let values = panel * self.inner * PANEL..(panel + 1) * self.inner * PANEL;
            let panel = match &self.values {
                Values::Bf16(all) => kernels::Panel::Bf16(&all[values]),
                Values::F32(all) => kernels::Panel::F32(&all[values]),
            };
            kernels::run(isa, panel, rows, (x, x_stride), (&mut out[first..], out_stride), width);
        }
        Ok(())
    }
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
                        assert_eq!(alone, out[row * out_stride..][..columns], "{isa:?}: row {row} of {rows}");
                        assert!(out[row * out_stride + columns..(row + 1) * out_stride].iter().all(|pad| pad.is_nan()));
                        for (column, found) in alone.iter().enumerate() {
                            let right: f64 = (0..inner).map(|i| f64::from(one[i]) * f64::from(at(i, column))).sum();
                            assert!((f64::from(*found) - right).abs() < 1e-4, "{isa:?}: {found} is not {right}");
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
        assert!(packed.multiply(Isa::Portable, 0, (&[], 4), (&mut [], 4)).is_ok());
    }
}
