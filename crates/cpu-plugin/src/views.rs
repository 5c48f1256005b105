//! Tensors as the kernels' rows.
//!
//! Must not know what the rows hold.

use attache_cpu_kernels::{Elements, Rows, RowsError, RowsMut};
use attache_sdk::prelude::*;

fn reach(name: &str, error: &RowsError) -> BackendError {
    BackendError::invalid(format!("{name}: {error}"))
}

/// # Errors
/// When the elements of the innermost dimension have gaps.
pub(crate) fn expect_contiguous_rows(name: &str, tensor: &TensorView<'_>) -> Result<()> {
    let Some(last) = tensor.shape().len().checked_sub(1) else { return Ok(()) };
    if tensor.dim(last) > 1 && tensor.strides()[last] != 1 {
        return Err(BackendError::unsupported(format!(
            "the elements of a row of {name} are {} apart; they must be contiguous",
            tensor.strides()[last]
        )));
    }
    Ok(())
}

pub(crate) fn elements<'a>(name: &str, tensor: &TensorView<'a>) -> Result<Elements<'a>> {
    match tensor.dtype() {
        DataType::F32 => tensor.span().map(Elements::F32),
        DataType::F16 => tensor.span().map(Elements::F16),
        DataType::BF16 => tensor.span().map(Elements::Bf16),
        other => Err(BackendError::unsupported(format!("{name} holds {other}; f32, f16 and bf16 are supported"))),
    }
}

/// `[tokens, heads, size]` as query rows.
///
/// # Errors
/// For another element type than f32, f16 and bf16, and for gaps inside a row.
pub fn queries<'a>(name: &str, tensor: &TensorView<'a>) -> Result<Rows<'a>> {
    expect_contiguous_rows(name, tensor)?;
    let strides = [tensor.strides()[0] as usize, tensor.strides()[1] as usize, 0];
    let shape = [tensor.dim(0), tensor.dim(1), 1];
    Rows::new(elements(name, tensor)?, shape, strides, tensor.dim(2)).map_err(|error| reach(name, &error))
}

/// `[tokens, heads, size]` as one block of keys or values.
///
/// # Errors
/// As [`queries`].
pub fn dense<'a>(name: &str, tensor: &TensorView<'a>) -> Result<Rows<'a>> {
    expect_contiguous_rows(name, tensor)?;
    let strides = [0, tensor.strides()[0] as usize, tensor.strides()[1] as usize];
    let shape = [1, tensor.dim(0), tensor.dim(1)];
    Rows::new(elements(name, tensor)?, shape, strides, tensor.dim(2)).map_err(|error| reach(name, &error))
}

/// `[tokens, heads, size]` as rows to write.
///
/// # Errors
/// As [`queries`], and for rows that overlap.
pub fn output<'a>(name: &str, tensor: &'a mut TensorViewMut<'_>) -> Result<RowsMut<'a>> {
    let view = tensor.as_view();
    expect_contiguous_rows(name, &view)?;
    let shape = [view.dim(0), view.dim(1)];
    let strides = [view.strides()[0] as usize, view.strides()[1] as usize];
    let size = view.dim(2);
    match view.dtype() {
        DataType::F32 => RowsMut::f32(tensor.span_mut()?, shape, strides, size),
        DataType::F16 => RowsMut::f16(tensor.span_mut()?, shape, strides, size),
        DataType::BF16 => RowsMut::bf16(tensor.span_mut()?, shape, strides, size),
        other => {
            return Err(BackendError::unsupported(format!("{name} holds {other}; f32, f16 and bf16 are supported")));
        }
    }
    .map_err(|error| reach(name, &error))
}

/// `[heads, tokens]` f32 as rows of one value, by token and head.
///
/// # Errors
/// For another element type.
pub fn lse<'a>(tensor: &'a mut TensorViewMut<'_>) -> Result<RowsMut<'a>> {
    let view = tensor.as_view();
    let shape = [view.dim(1), view.dim(0)];
    let strides = [view.strides()[1] as usize, view.strides()[0] as usize];
    RowsMut::f32(tensor.span_mut()?, shape, strides, 1).map_err(|error| reach("lse", &error))
}
