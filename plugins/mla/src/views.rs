//! Parts of tensors, and buffers of the workspace, as the kernels' rows.
//!
//! Must not know what the rows hold.

use attache_cpu_kernels::{Elements, Rows, RowsError, RowsMut};
use attache_cpu_plugin::{Number, with_number};
use attache_sdk::prelude::*;
use half::bf16;
use std::ops::Range;

/// A float type in which projected rows are held in the workspace.
pub trait Held: Number {
    /// A buffer of the workspace as this type: at least as many values as it has f32.
    fn buffer(memory: &mut [f32]) -> &mut [Self];
    /// A slice as the kernels' elements.
    fn elements(values: &[Self]) -> Elements<'_>;
}

impl Held for f32 {
    fn buffer(memory: &mut [f32]) -> &mut [Self] {
        memory
    }
    fn elements(values: &[Self]) -> Elements<'_> {
        Elements::F32(values)
    }
}

impl Held for bf16 {
    fn buffer(memory: &mut [f32]) -> &mut [Self] {
        bytemuck::cast_slice_mut(memory)
    }
    fn elements(values: &[Self]) -> Elements<'_> {
        Elements::Bf16(values)
    }
}

/// Cuts `len` values off the workspace.
///
/// # Errors
/// When fewer are left: then a size was computed wrongly.
pub fn cut<'a>(memory: &mut &'a mut [f32], len: usize) -> Result<&'a mut [f32]> {
    let found = memory.len();
    let (part, rest) = std::mem::take(memory).split_at_mut_checked(len).ok_or_else(|| {
        BackendError::new(ErrorCode::Internal, format!("a buffer of {len} values where the workspace has {found} left"))
    })?;
    *memory = rest;
    Ok(part)
}

/// A refusal of the kernels' views.
pub fn reach(error: RowsError) -> BackendError {
    BackendError::invalid(error.to_string())
}

/// A block of tokens and heads of a `[tokens, heads, size]` tensor.
#[derive(Clone, Debug)]
pub struct Part {
    /// Tokens.
    pub tokens: Range<usize>,
    /// Heads.
    pub heads: Range<usize>,
}

impl Part {
    fn offset(&self, strides: &[i64]) -> usize {
        self.tokens.start * strides[0] as usize + self.heads.start * strides[1] as usize
    }

    /// The part as query rows. It must lie inside the tensor and not be empty.
    ///
    /// # Errors
    /// When a row would reach outside the tensor.
    pub fn queries<'a>(&self, q: &TensorView<'a>) -> Result<Rows<'a>> {
        let at = self.offset(q.strides());
        let elements = match q.dtype() {
            DataType::F16 => Elements::F16(&q.span()?[at..]),
            DataType::BF16 => Elements::Bf16(&q.span()?[at..]),
            _ => Elements::F32(&q.span()?[at..]),
        };
        let strides = [q.strides()[0] as usize, q.strides()[1] as usize, 0];
        Rows::new(elements, [self.tokens.len(), self.heads.len(), 1], strides, q.dim(2)).map_err(reach)
    }

    /// The part as rows to write. It must lie inside the tensor and not be empty.
    ///
    /// # Errors
    /// When rows overlap or would reach outside the tensor.
    pub fn output<'a>(&self, out: &'a mut TensorViewMut<'_>) -> Result<RowsMut<'a>> {
        let view = out.as_view();
        let (at, size, dtype) = (self.offset(view.strides()), view.dim(2), view.dtype());
        let strides = [view.strides()[0] as usize, view.strides()[1] as usize];
        let shape = [self.tokens.len(), self.heads.len()];
        match dtype {
            DataType::F16 => RowsMut::f16(&mut out.span_mut()?[at..], shape, strides, size),
            DataType::BF16 => RowsMut::bf16(&mut out.span_mut()?[at..], shape, strides, size),
            _ => RowsMut::f32(&mut out.span_mut()?[at..], shape, strides, size),
        }
        .map_err(reach)
    }

    /// The part of an `[heads, tokens]` LSE as rows of one value.
    ///
    /// # Errors
    /// As [`Part::output`].
    pub fn lse<'a>(&self, lse: &'a mut TensorViewMut<'_>) -> Result<RowsMut<'a>> {
        let strides = lse.as_view().strides().to_vec();
        let (head, token) = (strides[0] as usize, strides[1] as usize);
        let at = self.tokens.start * token + self.heads.start * head;
        let shape = [self.tokens.len(), self.heads.len()];
        RowsMut::f32(&mut lse.span_mut()?[at..], shape, [token, head], 1).map_err(reach)
    }

    /// Writes rows `[heads][tokens][size]` of the part into a tensor, rounded to its type.
    ///
    /// # Errors
    /// For an element type that is no float.
    pub fn write(&self, rows: &[f32], out: &mut TensorViewMut<'_>) -> Result<()> {
        let view = out.as_view();
        let (size, dtype) = (view.dim(2), view.dtype());
        let (token_stride, head_stride) = (view.strides()[0] as usize, view.strides()[1] as usize);
        with_number!(dtype, T => {
            let all = out.span_mut::<T>()?;
            let mut rows = rows.chunks_exact(size);
            for head in self.heads.clone() {
                for (token, row) in self.tokens.clone().zip(&mut rows) {
                    let to = &mut all[token * token_stride + head * head_stride..][..size];
                    to.iter_mut().zip(row).for_each(|(to, value)| *to = T::from_f32(*value));
                }
            }
            Ok(())
        })
    }

    /// Writes values `[heads][tokens]` of the part into an `[heads, tokens]` LSE.
    ///
    /// # Errors
    /// For an element type other than f32.
    pub fn write_lse(&self, values: &[f32], lse: &mut TensorViewMut<'_>) -> Result<()> {
        let strides = lse.as_view().strides().to_vec();
        let all = lse.span_mut::<f32>()?;
        let mut values = values.iter();
        for head in self.heads.clone() {
            for (token, value) in self.tokens.clone().zip(&mut values) {
                all[head * strides[0] as usize + token * strides[1] as usize] = *value;
            }
        }
        Ok(())
    }
}
