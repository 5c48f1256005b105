//! Floats of one of the compute dtypes.
//!
//! Owns the conversion between them, bytes and f64. Must not know what the numbers mean.

use attache_core::{Dtype, TensorView, TensorViewMut, error::Result};
use half::{bf16, f16};

/// Numbers in a compute dtype.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// IEEE binary32.
    F32(Vec<f32>),
    /// IEEE binary16.
    F16(Vec<f16>),
    /// bfloat16.
    BF16(Vec<bf16>),
}

macro_rules! each {
    ($values:expr, $inner:ident => $body:expr) => {
        match $values {
            Values::F32($inner) => $body,
            Values::F16($inner) => $body,
            Values::BF16($inner) => $body,
        }
    };
}

impl Values {
    /// `len` times NaN.
    #[must_use]
    pub fn nan(dtype: Dtype, len: usize) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(vec![f32::NAN; len]),
            Dtype::F16 => Self::F16(vec![f16::NAN; len]),
            Dtype::BF16 => Self::BF16(vec![bf16::NAN; len]),
        }
    }

    /// Numbers rounded to `dtype`.
    pub fn from_f64(dtype: Dtype, numbers: impl IntoIterator<Item = f64>) -> Self {
        let numbers = numbers.into_iter();
        match dtype {
            Dtype::F32 => Self::F32(numbers.map(|number| number as f32).collect()),
            Dtype::F16 => Self::F16(numbers.map(f16::from_f64).collect()),
            Dtype::BF16 => Self::BF16(numbers.map(bf16::from_f64).collect()),
        }
    }

    /// Numbers from little-endian bytes; bytes that do not make a whole number are left out.
    #[must_use]
    pub fn from_le_bytes(dtype: Dtype, bytes: &[u8]) -> Self {
        let halves = || bytes.chunks_exact(2).map(|chunk| u16::from_le_bytes([chunk[0], chunk[1]]));
        match dtype {
            Dtype::F32 => {
                Self::F32(bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
            }
            Dtype::F16 => Self::F16(halves().map(f16::from_bits).collect()),
            Dtype::BF16 => Self::BF16(halves().map(bf16::from_bits).collect()),
        }
    }

    /// Little-endian bytes.
    #[must_use]
    pub fn to_le_bytes(&self) -> Vec<u8> {
        each!(self, inner => inner.iter().flat_map(|number| number.to_le_bytes()).collect())
    }

    /// The dtype.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::BF16(_) => Dtype::BF16,
        }
    }

    /// How many numbers.
    #[must_use]
    pub fn len(&self) -> usize {
        each!(self, inner => inner.len())
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The numbers, exact.
    #[must_use]
    pub fn to_f64(&self) -> Vec<f64> {
        match self {
            Self::F32(inner) => inner.iter().map(|number| f64::from(*number)).collect(),
            Self::F16(inner) => inner.iter().map(|number| number.to_f64()).collect(),
            Self::BF16(inner) => inner.iter().map(|number| number.to_f64()).collect(),
        }
    }

    /// A copy of a part, and `padding` times NaN behind it; `None` when the part is not inside.
    #[must_use]
    pub fn part(&self, range: std::ops::Range<usize>, padding: usize) -> Option<Self> {
        macro_rules! copy {
            ($variant:ident, $inner:expr, $nan:expr) => {{
                let mut part = $inner.get(range)?.to_vec();
                part.resize(part.len() + padding, $nan);
                Some(Self::$variant(part))
            }};
        }
        match self {
            Self::F32(inner) => copy!(F32, inner, f32::NAN),
            Self::F16(inner) => copy!(F16, inner, f16::NAN),
            Self::BF16(inner) => copy!(BF16, inner, bf16::NAN),
        }
    }

    /// A compact view.
    ///
    /// # Errors
    /// When `shape` does not hold exactly these numbers.
    pub fn view(&self, shape: &[usize]) -> Result<TensorView<'_>> {
        each!(self, inner => TensorView::from_slice(inner, shape))
    }

    /// A view with strides, in elements.
    ///
    /// # Errors
    /// When the view would reach outside.
    pub fn strided(&self, shape: &[usize], strides: &[i64]) -> Result<TensorView<'_>> {
        each!(self, inner => TensorView::strided(inner, shape, strides))
    }

    /// A view with strides, to write.
    ///
    /// # Errors
    /// When the view would reach outside.
    pub fn strided_mut(&mut self, shape: &[usize], strides: &[i64]) -> Result<TensorViewMut<'_>> {
        each!(self, inner => TensorViewMut::strided(inner, shape, strides))
    }

    /// A compact view to write.
    ///
    /// # Errors
    /// When `shape` does not hold exactly these numbers.
    pub fn view_mut(&mut self, shape: &[usize]) -> Result<TensorViewMut<'_>> {
        each!(self, inner => TensorViewMut::from_slice(inner, shape))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_numbers_survive() {
        for dtype in Dtype::ALL {
            let values = Values::from_f64(dtype, [1.0, -0.5, 3.25, f64::INFINITY]);
            assert_eq!(values.dtype(), dtype);
            assert_eq!(Values::from_le_bytes(dtype, &values.to_le_bytes()), values);
            assert_eq!(values.to_f64(), [1.0, -0.5, 3.25, f64::INFINITY]);
            assert!(values.view(&[2, 2]).is_ok() && values.view(&[3]).is_err());
            let part = values.part(1..3, 2).unwrap();
            assert_eq!(part.len(), 4);
            assert!(part.to_f64()[3].is_nan());
            assert!(values.part(3..5, 0).is_none());
            assert!(Values::nan(dtype, 3).to_f64().iter().all(|x| x.is_nan()));
        }
        assert!(Values::from_f64(Dtype::F32, []).is_empty());
    }
}
