//! Parts of tensors, and buffers of the workspace, as the kernels' rows.
//!
//! Must not know what the rows hold.

use attache_cpu_kernels::{Elements, Output, Rows, RowsError, RowsMut};
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
    /// A slice that holds bf16 as such.
    fn as_bf16(values: &mut [Self]) -> Option<&mut [bf16]>;
}

impl Held for f32 {
    fn buffer(memory: &mut [f32]) -> &mut [Self] {
        memory
    }
    fn elements(values: &[Self]) -> Elements<'_> {
        Elements::F32(values)
    }
    fn as_bf16(_values: &mut [Self]) -> Option<&mut [bf16]> {
        None
    }
}

impl Held for bf16 {
    fn buffer(memory: &mut [f32]) -> &mut [Self] {
        bytemuck::cast_slice_mut(memory)
    }
    fn elements(values: &[Self]) -> Elements<'_> {
        Elements::Bf16(values)
    }
    fn as_bf16(values: &mut [Self]) -> Option<&mut [bf16]> {
        Some(values)
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
}

/// Where the results of a call go.
pub struct Target<'a> {
    /// `[tokens, num_heads, size]`.
    pub out: TensorViewMut<'a>,
    /// `[num_heads, tokens]` f32.
    pub lse: Option<TensorViewMut<'a>>,
}

impl Target<'_> {
    /// A part as rows to write. It must lie inside the tensors and not be empty.
    ///
    /// # Errors
    /// When rows overlap or would reach outside the tensors.
    pub fn output(&mut self, part: &Part) -> Result<Output<'_>> {
        let view = self.out.as_view();
        let (at, size, dtype) = (part.offset(view.strides()), view.dim(2), view.dtype());
        let strides = [view.strides()[0] as usize, view.strides()[1] as usize];
        let shape = [part.tokens.len(), part.heads.len()];
        let out = match dtype {
            DataType::F16 => RowsMut::f16(&mut self.out.span_mut()?[at..], shape, strides, size),
            DataType::BF16 => RowsMut::bf16(&mut self.out.span_mut()?[at..], shape, strides, size),
            _ => RowsMut::f32(&mut self.out.span_mut()?[at..], shape, strides, size),
        }
        .map_err(reach)?;
        let lse = match &mut self.lse {
            None => None,
            Some(lse) => {
                let (head, token) = (lse.as_view().strides()[0] as usize, lse.as_view().strides()[1] as usize);
                let at = part.tokens.start * token + part.heads.start * head;
                Some(RowsMut::f32(&mut lse.span_mut()?[at..], shape, [token, head], 1).map_err(reach)?)
            }
        };
        Ok(Output { out, lse })
    }

    /// Writes a part: rows `[heads][tokens][size]`, rounded to the output's type, and their LSE
    /// `[heads][tokens]`.
    ///
    /// # Errors
    /// For an element type that is no float.
    pub fn write(&mut self, part: &Part, rows: &[f32], lse: &[f32]) -> Result<()> {
        let view = self.out.as_view();
        let (size, dtype) = (view.dim(2), view.dtype());
        let (token_stride, head_stride) = (view.strides()[0] as usize, view.strides()[1] as usize);
        let places = || part.heads.clone().flat_map(|head| part.tokens.clone().map(move |token| (token, head)));
        with_number!(dtype, T => {
            let all = self.out.span_mut::<T>()?;
            for ((token, head), row) in places().zip(rows.chunks_exact(size)) {
                let to = &mut all[token * token_stride + head * head_stride..][..size];
                to.iter_mut().zip(row).for_each(|(to, value)| *to = T::from_f32(*value));
            }
            Ok(())
        })?;
        if let Some(to) = &mut self.lse {
            let (head_stride, token_stride) = (to.as_view().strides()[0] as usize, to.as_view().strides()[1] as usize);
            let all = to.span_mut::<f32>()?;
            places().zip(lse).for_each(|((token, head), lse)| all[head * head_stride + token * token_stride] = *lse);
        }
        Ok(())
    }
}
