//! Where rows of q, k, v and out lie in memory.
//!
//! Reach is checked once, when a view is made; after that a row is an address.

use half::{bf16, f16};

/// Elements of one of the storage formats.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// 32 bits.
    F32(&'a [f32]),
    /// IEEE half.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

/// A format of elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    F32,
    F16,
    Bf16,
}

impl Format {
    pub fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// A view that would reach outside its elements.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("rows of {row_len} elements with strides {strides:?} reach element {reach}; there are {found}")]
pub struct RowsError {
    /// Elements of a row.
    pub row_len: usize,
    /// Elements from index to index, outermost first.
    pub strides: [usize; 3],
    /// One past the last element.
    pub reach: usize,
    /// Elements that there are.
    pub found: usize,
}

fn reach(shape: [usize; 3], strides: [usize; 3], row_len: usize) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().zip(strides).try_fold(row_len, |sum, (size, stride)| sum.checked_add((size - 1).checked_mul(stride)?))
}

fn check(shape: [usize; 3], strides: [usize; 3], row_len: usize, found: usize) -> Result<(), RowsError> {
    let reach = reach(shape, strides, row_len).unwrap_or(usize::MAX);
    if reach > found { Err(RowsError { row_len, strides, reach, found }) } else { Ok(()) }
}

/// Rows to read: three indices (block, token of the block, head), each with a stride in elements.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    elements: Elements<'a>,
    shape: [usize; 3],
    strides: [usize; 3],
    row_len: usize,
}

impl<'a> Rows<'a> {
    /// A view of `shape` rows of `row_len` elements.
    ///
    /// # Errors
    /// When a row would reach outside the elements.
    pub fn new(
        elements: Elements<'a>,
        shape: [usize; 3],
        strides: [usize; 3],
        row_len: usize,
    ) -> Result<Self, RowsError> {
        let found = match elements {
            Elements::F32(all) => all.len(),
            Elements::F16(all) => all.len(),
            Elements::Bf16(all) => all.len(),
        };
        check(shape, strides, row_len, found)?;
        Ok(Self { elements, shape, strides, row_len })
    }

    /// The same rows, but only their first `row_len` elements: the latent part of a latent row.
    #[must_use]
    pub fn shortened(self, row_len: usize) -> Self {
        Self { row_len: row_len.min(self.row_len), ..self }
    }

    pub(crate) fn shape(&self) -> [usize; 3] {
        self.shape
    }

    pub(crate) fn row_len(&self) -> usize {
        self.row_len
    }

    pub(crate) fn format(&self) -> Format {
        match self.elements {
            Elements::F32(_) => Format::F32,
            Elements::F16(_) => Format::F16,
            Elements::Bf16(_) => Format::Bf16,
        }
    }

    /// Bytes from a token of a block to the next.
    pub(crate) fn token_step(&self) -> usize {
        self.strides[1] * self.format().size()
    }

    /// The address of a row, valid for `row_len` elements.
    ///
    /// # Panics
    /// For an index outside the shape: callers check, this keeps a mistake from reading elsewhere.
    pub(crate) fn row(&self, index: [usize; 3]) -> *const u8 {
        assert!(index.iter().zip(self.shape).all(|(at, size)| *at < size), "row {index:?} of {:?}", self.shape);
        let offset: usize = index.iter().zip(self.strides).map(|(at, stride)| at * stride).sum();
        let start: *const u8 = match self.elements {
            Elements::F32(all) => all.as_ptr().cast(),
            Elements::F16(all) => all.as_ptr().cast(),
            Elements::Bf16(all) => all.as_ptr().cast(),
        };
        start.wrapping_add(offset * self.format().size())
    }
}

/// Rows to write, from several threads: two indices (token, head).
#[derive(Debug)]
pub struct RowsMut<'a> {
    start: *mut u8,
    format: Format,
    shape: [usize; 2],
    strides: [usize; 2],
    row_len: usize,
    lifetime: std::marker::PhantomData<&'a mut [u8]>,
}

// SAFETY: it is an exclusive borrow of its elements; units write different rows.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowsMut<'_> {}

macro_rules! rows_mut {
    ($($(#[$doc:meta])* $name:ident $type:ty, $format:ident;)*) => {
        $($(#[$doc])*
        ///
        /// # Errors
        /// When a row would reach outside the elements, or rows overlap.
        pub fn $name(
            elements: &'a mut [$type],
            shape: [usize; 2],
            strides: [usize; 2],
            row_len: usize,
        ) -> Result<Self, RowsError> {
            let (wide, far) = ([1, shape[0], shape[1]], [0, strides[0], strides[1]]);
            check(wide, far, row_len, elements.len())?;
            let mut order: Vec<(usize, usize)> = strides.into_iter().zip(shape).filter(|(_, size)| *size > 1).collect();
            order.sort_unstable();
            // Each stride must step over all that lies within the smaller ones.
            let mut inside = row_len;
            for (stride, size) in order {
                if stride < inside && !shape.contains(&0) {
                    return Err(RowsError { row_len, strides: far, reach: inside, found: stride });
                }
                inside = inside.saturating_add((size - 1).saturating_mul(stride));
            }
            let start = elements.as_mut_ptr().cast();
            Ok(Self { start, format: Format::$format, shape, strides, row_len, lifetime: std::marker::PhantomData })
        })*
    };
}

impl<'a> RowsMut<'a> {
    rows_mut! {
        /// Rows of f32, `shape` = tokens, heads; strides in elements.
        f32 f32, F32;
        /// Rows of f16, `shape` = tokens, heads; strides in elements.
        f16 f16, F16;
        /// Rows of bf16, `shape` = tokens, heads; strides in elements.
        bf16 bf16, Bf16;
    }

    /// Tokens and heads.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Elements of a row.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// Writes a row, rounded to the format.
    ///
    /// # Safety
    /// No other thread may write or read the same row now.
    ///
    /// # Panics
    /// For an index outside the shape or a row of another length.
    pub(crate) unsafe fn write(&self, token: usize, head: usize, values: &[f32]) {
        assert!(
            token < self.shape[0] && head < self.shape[1] && values.len() == self.row_len,
            "row outside the output"
        );
        let at = (token * self.strides[0] + head * self.strides[1]) * self.format.size();
        let to = self.start.wrapping_add(at);
        // SAFETY: the reach of every row was checked; the caller vouches for exclusive access.
        unsafe {
            match self.format {
                Format::F32 => std::slice::from_raw_parts_mut(to.cast::<f32>(), self.row_len).copy_from_slice(values),
                Format::F16 => convert(to.cast(), values, f16::from_f32),
                Format::Bf16 => convert(to.cast(), values, bf16::from_f32),
            }
        }
    }
}

/// # Safety
/// `to` must be valid for as many elements as there are values.
unsafe fn convert<T>(to: *mut T, values: &[f32], rounded: impl Fn(f32) -> T) {
    // SAFETY: the caller vouches for it.
    let to = unsafe { std::slice::from_raw_parts_mut(to, values.len()) };
    to.iter_mut().zip(values).for_each(|(to, value)| *to = rounded(*value));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reach_and_overlap_are_checked() {
        let all = [0_f32; 24];
        assert!(Rows::new(Elements::F32(&all), [2, 3, 2], [12, 4, 2], 2).is_ok());
        assert!(Rows::new(Elements::F32(&all), [2, 3, 2], [12, 4, 2], 3).is_err());
        assert!(Rows::new(Elements::F32(&all), [usize::MAX, 3, 2], [usize::MAX, 4, 2], 2).is_err());
        assert!(Rows::new(Elements::F32(&[]), [0, 3, 2], [12, 4, 2], 2).is_ok());
        let mut out = [0_f32; 24];
        assert!(RowsMut::f32(&mut out, [3, 2], [8, 4], 4).is_ok());
        assert!(RowsMut::f32(&mut out, [3, 2], [4, 4], 4).is_err(), "rows overlap");
        assert!(RowsMut::f32(&mut out, [3, 2], [8, 4], 5).is_err());
    }
}
