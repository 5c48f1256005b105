//! Checked shape arithmetic and allocation, private to the crate.
//!
//! Must not know what the tensors mean.

use crate::error::ReferenceError;

/// Number of elements of `shape`, or [`ReferenceError::TooLarge`].
pub(crate) fn elements(tensor: &'static str, shape: &[usize]) -> Result<usize, ReferenceError> {
    shape
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d))
        .ok_or_else(|| ReferenceError::TooLarge { tensor, shape: shape.to_vec() })
}

/// Refuses a slice whose length is not that of `shape`.
pub(crate) fn check_len(tensor: &'static str, shape: &[usize], found: usize) -> Result<(), ReferenceError> {
    let expected = elements(tensor, shape)?;
    if expected == found {
        return Ok(());
    }
    Err(ReferenceError::Length { tensor, shape: shape.to_vec(), expected, found })
}

/// Refuses a dimension of 0.
pub(crate) fn check_nonzero(name: &'static str, value: usize) -> Result<(), ReferenceError> {
    if value == 0 {
        return Err(ReferenceError::Zero { name });
    }
    Ok(())
}

/// Refuses NaN and infinities in a list of parameters.
pub(crate) fn check_finite(name: &'static str, values: &[f64]) -> Result<(), ReferenceError> {
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(index) => Err(ReferenceError::Value { name, index, value: values[index], rule: "it must be finite" }),
    }
}

/// A tensor of zeros, or [`ReferenceError::TooLarge`] where the allocator refuses.
pub(crate) fn zeros(tensor: &'static str, shape: &[usize]) -> Result<Vec<f64>, ReferenceError> {
    let n = elements(tensor, shape)?;
    let mut data = Vec::new();
    data.try_reserve_exact(n).map_err(|_| ReferenceError::TooLarge { tensor, shape: shape.to_vec() })?;
    data.resize(n, 0.0);
    Ok(data)
}
