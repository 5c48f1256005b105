//! Checked views of DLPack tensors: the one place where a raw tensor becomes something safe to use.

use crate::{
    abi,
    abi::DlDevice,
    dtype::DataType,
    error::{BackendError, Result},
};
use half::{bf16, f16};
use std::{ffi::c_void, marker::PhantomData};

/// Most dimensions of a tensor that crosses the ABI.
pub const MAX_DIMS: usize = 6;

/// A Rust type that a tensor's elements can be read as.
///
/// # Safety
/// Every bit pattern must be a value, and `matches` must only accept types of the same size.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The element type of tensors made from slices of this type.
    const DTYPE: DataType;
    /// Whether a tensor of that element type may be read as this type.
    fn matches(dtype: DataType) -> bool {
        dtype == Self::DTYPE
    }
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {
        $(
            // SAFETY: every bit pattern is a value, and the sizes agree.
            unsafe impl Element for $rust {
                const DTYPE: DataType = DataType::$dtype;
            }
        )*
    };
}
element!(f32 => F32, f16 => F16, bf16 => BF16, i8 => I8, i32 => I32, i64 => I64);

// SAFETY: every bit pattern is a value, and only types of one byte are accepted.
unsafe impl Element for u8 {
    const DTYPE: DataType = DataType::U8;
    fn matches(dtype: DataType) -> bool {
        dtype.size() == 1
    }
}

/// A read-only view of a tensor. Shape and strides were checked: sizes are not negative, strides
/// are not negative, and the extent fits in the address space.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    data: *const u8,
    dtype: DataType,
    device: DlDevice,
    ndim: usize,
    shape: [i64; MAX_DIMS],
    strides: [i64; MAX_DIMS],
    /// Elements from the first to one past the last that the view can reach; 0 when it is empty.
    extent: usize,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: the view only gives shared access to memory that is not written while it is borrowed.
unsafe impl Send for TensorView<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorView<'_> {}

fn compact_strides(shape: &[i64], strides: &mut [i64; MAX_DIMS]) -> Option<()> {
    let mut step = 1_i64;
    for (index, size) in shape.iter().enumerate().rev() {
        strides[index] = step;
        step = step.checked_mul((*size).max(1))?;
    }
    Some(())
}

fn extent_of(shape: &[i64], strides: &[i64]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let mut last = 0_i64;
    for (size, stride) in shape.iter().zip(strides) {
        last = last.checked_add((size - 1).checked_mul(*stride)?)?;
    }
    usize::try_from(last).ok()?.checked_add(1)
}

impl<'a> TensorView<'a> {
    /// A compact view of `values`, row-major.
    ///
    /// # Errors
    /// When `shape` has too many dimensions or does not hold exactly `values.len()` elements.
    pub fn from_slice<T: Element>(values: &'a [T], shape: &[usize]) -> Result<Self> {
        let mut strides = [0; MAX_DIMS];
        let dims = to_dims(shape)?;
        compact_strides(&dims[..shape.len()], &mut strides).ok_or_else(|| too_large(shape))?;
        let view = Self::strided(values, shape, &strides[..shape.len()])?;
        if view.num_elements() != values.len() {
            return Err(BackendError::invalid(format!("shape {shape:?} does not hold {} elements", values.len())));
        }
        Ok(view)
    }

    /// A strided view of `values`; strides in elements.
    ///
    /// # Errors
    /// When the view would reach outside `values`, has too many dimensions or a negative stride.
    pub fn strided<T: Element>(values: &'a [T], shape: &[usize], strides: &[i64]) -> Result<Self> {
        if shape.len() != strides.len() {
            return Err(BackendError::invalid(format!("shape {shape:?} and strides {strides:?} differ in length")));
        }
        let dims = to_dims(shape)?;
        let mut all_strides = [0; MAX_DIMS];
        all_strides[..strides.len()].copy_from_slice(strides);
        let view = Self::checked(values.as_ptr().cast(), T::DTYPE, DlDevice::CPU, shape.len(), dims, all_strides)?;
        if view.extent > values.len() {
            return Err(BackendError::out_of_range(format!(
                "shape {shape:?} with strides {strides:?} reaches {} elements; the buffer has {}",
                view.extent,
                values.len()
            )));
        }
        Ok(view)
    }

    /// A view of bytes that hold elements of `dtype`.
    ///
    /// # Errors
    /// When `shape` does not fit `bytes` exactly, or the bytes are not aligned for `dtype`.
    pub fn from_bytes(bytes: &'a [u8], dtype: DataType, shape: &[usize]) -> Result<Self> {
        let dims = to_dims(shape)?;
        let mut strides = [0; MAX_DIMS];
        compact_strides(&dims[..shape.len()], &mut strides).ok_or_else(|| too_large(shape))?;
        let view = Self::checked(bytes.as_ptr(), dtype, DlDevice::CPU, shape.len(), dims, strides)?;
        if view.num_elements().checked_mul(dtype.size()) != Some(bytes.len()) {
            return Err(BackendError::invalid(format!(
                "shape {shape:?} of {dtype} does not hold {} bytes",
                bytes.len()
            )));
        }
        Ok(view)
    }

    /// Reads a tensor that came over the ABI.
    ///
    /// # Safety
    /// `tensor` must point to a `Tensor` whose `shape` and `strides` (unless null) have `ndim`
    /// values, and whose memory is valid, for reading, over the shape for `'a`.
    ///
    /// # Errors
    /// For a null pointer, an unknown element type, too many dimensions, a negative size or stride,
    /// or data that is null or misaligned.
    pub unsafe fn from_abi(tensor: *const abi::Tensor, name: &str) -> Result<Self> {
        if tensor.is_null() {
            return Err(BackendError::invalid(format!("{name} is missing")));
        }
        // SAFETY: not null, and the caller vouches for it.
        let tensor = unsafe { &*tensor };
        let dtype = DataType::from_dl(tensor.dtype).ok_or_else(|| {
            BackendError::invalid(format!(
                "{name} has the unknown element type (code {}, {} bits, {} lanes)",
                tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
            ))
        })?;
        let ndim = usize::try_from(tensor.ndim).ok().filter(|n| *n <= MAX_DIMS).ok_or_else(|| {
            BackendError::invalid(format!("{name} has {} dimensions; at most {MAX_DIMS} are valid", tensor.ndim))
        })?;
        let mut shape = [0; MAX_DIMS];
        let mut strides = [0; MAX_DIMS];
        if ndim > 0 {
            if tensor.shape.is_null() {
                return Err(BackendError::invalid(format!("{name} has no shape")));
            }
            // SAFETY: the caller vouches for `ndim` sizes.
            shape[..ndim].copy_from_slice(unsafe { std::slice::from_raw_parts(tensor.shape, ndim) });
            if tensor.strides.is_null() {
                compact_strides(&shape[..ndim], &mut strides)
                    .ok_or_else(|| BackendError::invalid(format!("{name}: shape {:?} is too large", &shape[..ndim])))?;
            } else {
                // SAFETY: the caller vouches for `ndim` strides.
                strides[..ndim].copy_from_slice(unsafe { std::slice::from_raw_parts(tensor.strides, ndim) });
            }
        }
        let offset = usize::try_from(tensor.byte_offset)
            .map_err(|_| BackendError::invalid(format!("{name}: byte_offset {} is too large", tensor.byte_offset)))?;
        // Wrapping: the result is checked for null and alignment below and only read over the shape.
        let data = if tensor.data.is_null() {
            std::ptr::null()
        } else {
            tensor.data.cast::<u8>().cast_const().wrapping_add(offset)
        };
        Self::checked(data, dtype, tensor.device, ndim, shape, strides).map_err(|mut error| {
            error.message = format!("{name}: {}", error.message);
            error
        })
    }

    fn checked(
        data: *const u8,
        dtype: DataType,
        device: DlDevice,
        ndim: usize,
        shape: [i64; MAX_DIMS],
        strides: [i64; MAX_DIMS],
    ) -> Result<Self> {
        let (dims, steps) = (&shape[..ndim], &strides[..ndim]);
        if dims.iter().any(|size| *size < 0) || steps.iter().any(|stride| *stride < 0) {
            return Err(BackendError::invalid(format!(
                "shape {dims:?} with strides {steps:?}: neither may be negative"
            )));
        }
        let extent = extent_of(dims, steps)
            .filter(|extent| extent.checked_mul(dtype.size()).is_some_and(|bytes| isize::try_from(bytes).is_ok()))
            .ok_or_else(|| BackendError::invalid(format!("shape {dims:?} with strides {steps:?} is too large")))?;
        if extent > 0 && data.is_null() {
            return Err(BackendError::invalid(format!("shape {dims:?} has elements, and data is null")));
        }
        if extent > 0 && !data.addr().is_multiple_of(dtype.size()) {
            return Err(BackendError::invalid(format!("data is not aligned for {dtype}")));
        }
        Ok(Self { data, dtype, device, ndim, shape, strides, extent, lifetime: PhantomData })
    }

    /// The tensor as it crosses the ABI; its shape and strides point into `self`.
    #[must_use]
    pub fn to_abi(&self) -> abi::Tensor {
        abi::Tensor {
            data: self.data.cast_mut().cast::<c_void>(),
            device: self.device,
            ndim: self.ndim as i32,
            dtype: self.dtype.to_dl(),
            shape: self.shape.as_ptr().cast_mut(),
            strides: self.strides.as_ptr().cast_mut(),
            byte_offset: 0,
        }
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// Where the memory lies.
    #[must_use]
    pub fn device(&self) -> DlDevice {
        self.device
    }

    /// Sizes.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        &self.shape[..self.ndim]
    }

    /// Strides in elements.
    #[must_use]
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.ndim]
    }

    /// Size of dimension `index`; 1 beyond the last.
    #[must_use]
    pub fn dim(&self, index: usize) -> usize {
        self.shape().get(index).map_or(1, |size| *size as usize)
    }

    /// Number of elements.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape().iter().map(|size| *size as usize).product()
    }

    /// Whether the elements lie one after another, row-major, without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        for (size, stride) in self.shape().iter().zip(self.strides()).rev() {
            if *size != 1 && *stride != step {
                return false;
            }
            step *= (*size).max(1);
        }
        true
    }

    /// The first element.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// All memory from the first element to the last that the view reaches, gaps included: index it
    /// with the strides.
    ///
    /// # Errors
    /// When the element type is another one or the memory is not the host's.
    pub fn span<T: Element>(&self) -> Result<&'a [T]> {
        self.check_readable::<T>()?;
        if self.extent == 0 {
            return Ok(&[]);
        }
        // SAFETY: `extent` elements from `data` are valid for `'a` and aligned; checked at creation.
        Ok(unsafe { std::slice::from_raw_parts(self.data.cast::<T>(), self.extent) })
    }

    /// The elements of a contiguous tensor.
    ///
    /// # Errors
    /// As [`TensorView::span`], and when there are gaps.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        if !self.is_contiguous() {
            return Err(BackendError::unsupported(format!(
                "a tensor of shape {:?} with strides {:?} is not contiguous",
                self.shape(),
                self.strides()
            )));
        }
        self.span()
    }

    fn check_readable<T: Element>(&self) -> Result<()> {
        if !T::matches(self.dtype) {
            return Err(BackendError::invalid(format!("element type {} where {} is expected", self.dtype, T::DTYPE)));
        }
        if self.device.device_type != DlDevice::CPU.device_type {
            return Err(BackendError::unsupported(format!(
                "the tensor lies on device type {}, not in host memory",
                self.device.device_type
            )));
        }
        Ok(())
    }

    /// The sub-tensor at `index` of the first dimension, or `None` outside it.
    #[must_use]
    pub fn index(&self, index: usize) -> Option<TensorView<'a>> {
        if self.ndim == 0 || index >= self.dim(0) {
            return None;
        }
        let mut view = *self;
        let offset = index * self.strides[0] as usize;
        view.data = self.data.wrapping_add(offset * self.dtype.size());
        view.ndim -= 1;
        view.shape = [0; MAX_DIMS];
        view.strides = [0; MAX_DIMS];
        view.shape[..view.ndim].copy_from_slice(&self.shape()[1..]);
        view.strides[..view.ndim].copy_from_slice(&self.strides()[1..]);
        view.extent = extent_of(view.shape(), view.strides()).unwrap_or(0);
        Some(view)
    }

    /// Checks the shape; −1 accepts any size.
    ///
    /// # Errors
    /// Names the tensor, what was found and what is expected.
    pub fn expect_shape(&self, name: &str, expected: &[i64]) -> Result<()> {
        let found = self.shape();
        let fits = found.len() == expected.len() && found.iter().zip(expected).all(|(f, e)| *e == -1 || f == e);
        if fits {
            Ok(())
        } else {
            Err(BackendError::invalid(format!("{name} has shape {found:?}; expected {expected:?} (-1 = any)")))
        }
    }
}

fn to_dims(shape: &[usize]) -> Result<[i64; MAX_DIMS]> {
    if shape.len() > MAX_DIMS {
        return Err(BackendError::invalid(format!("{} dimensions; at most {MAX_DIMS} are valid", shape.len())));
    }
    let mut dims = [0; MAX_DIMS];
    for (to, from) in dims.iter_mut().zip(shape) {
        *to = i64::try_from(*from).map_err(|_| too_large(shape))?;
    }
    Ok(dims)
}

fn too_large(shape: &[usize]) -> BackendError {
    BackendError::invalid(format!("shape {shape:?} is too large"))
}

/// A view of a tensor that may be written; nobody else reads or writes it meanwhile.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    view: TensorView<'a>,
    lifetime: PhantomData<&'a mut [u8]>,
}

impl<'a> TensorViewMut<'a> {
    /// A compact view of `values`, row-major.
    ///
    /// # Errors
    /// As [`TensorView::from_slice`].
    pub fn from_slice<T: Element>(values: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let data = values.as_mut_ptr();
        let mut view = TensorView::from_slice(&*values, shape)?;
        // Keep the pointer that may write.
        view.data = data.cast_const().cast();
        Ok(Self { view, lifetime: PhantomData })
    }

    /// A strided view of `values`; strides in elements.
    ///
    /// # Errors
    /// As [`TensorView::strided`].
    pub fn strided<T: Element>(values: &'a mut [T], shape: &[usize], strides: &[i64]) -> Result<Self> {
        let data = values.as_mut_ptr();
        let mut view = TensorView::strided(&*values, shape, strides)?;
        view.data = data.cast_const().cast();
        Ok(Self { view, lifetime: PhantomData })
    }

    /// A view of bytes that hold elements of `dtype`.
    ///
    /// # Errors
    /// As [`TensorView::from_bytes`].
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DataType, shape: &[usize]) -> Result<Self> {
        let data = bytes.as_mut_ptr();
        let mut view = TensorView::from_bytes(&*bytes, dtype, shape)?;
        view.data = data.cast_const();
        Ok(Self { view, lifetime: PhantomData })
    }

    /// Reads a tensor that came over the ABI.
    ///
    /// # Safety
    /// As [`TensorView::from_abi`], for writing, with no other access for `'a`.
    ///
    /// # Errors
    /// As [`TensorView::from_abi`].
    pub unsafe fn from_abi(tensor: *const abi::Tensor, name: &str) -> Result<Self> {
        // SAFETY: the caller vouches for more than is needed.
        let view = unsafe { TensorView::from_abi(tensor, name) }?;
        Ok(Self { view, lifetime: PhantomData })
    }

    /// The same tensor, read-only.
    #[must_use]
    pub fn as_view(&self) -> TensorView<'_> {
        self.view
    }

    /// The first element.
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.view.data.cast_mut()
    }

    /// As [`TensorView::span`], for writing.
    ///
    /// # Errors
    /// As [`TensorView::span`].
    pub fn span_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        self.view.check_readable::<T>()?;
        if self.view.extent == 0 {
            return Ok(&mut []);
        }
        // SAFETY: `extent` elements from `data` are valid, aligned, and ours alone while borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.view.data.cast_mut().cast::<T>(), self.view.extent) })
    }

    /// The tensor as it crosses the ABI; its shape and strides point into `self`.
    #[must_use]
    pub fn to_abi(&self) -> abi::Tensor {
        self.view.to_abi()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_never_reach_outside_their_buffer() {
        let values = [0_f32; 12];
        assert!(TensorView::from_slice(&values, &[3, 4]).is_ok());
        assert!(TensorView::from_slice(&values, &[3, 5]).is_err());
        assert!(TensorView::strided(&values, &[3, 2], &[5, 1]).is_ok());
        assert!(TensorView::strided(&values, &[3, 3], &[5, 1]).is_err());
        assert!(TensorView::strided(&values, &[3], &[-1]).is_err());
        assert!(TensorView::strided(&values, &[usize::MAX, 4], &[i64::MAX, 4]).is_err());
        let view = TensorView::strided(&values, &[3, 2], &[5, 1]).unwrap();
        assert!(!view.is_contiguous());
        assert!(view.as_slice::<f32>().is_err());
        assert_eq!(view.span::<f32>().unwrap().len(), 12);
        assert!(view.span::<f16>().is_err());
        assert_eq!(view.index(2).unwrap().shape(), [2]);
        assert!(view.index(3).is_none());
    }

    #[test]
    fn a_tensor_from_outside_is_checked() {
        let values = [1_f32; 4];
        let view = TensorView::from_slice(&values, &[4]).unwrap();
        let good = view.to_abi();
        // SAFETY: `good` and the changed copies point to live memory, or are refused before use.
        unsafe {
            assert!(TensorView::from_abi(&good, "q").is_ok());
            assert!(TensorView::from_abi(std::ptr::null(), "q").unwrap_err().message.contains('q'));
            let unknown = abi::Tensor { dtype: abi::DlDataType { code: 255, bits: 32, lanes: 1 }, ..good };
            assert!(TensorView::from_abi(&unknown, "q").is_err());
            let null = abi::Tensor { data: std::ptr::null_mut(), ..good };
            assert!(TensorView::from_abi(&null, "q").is_err());
            let odd = abi::Tensor { byte_offset: 1, ..good };
            assert!(TensorView::from_abi(&odd, "q").is_err());
            for ndim in [-1, 7, i32::MAX] {
                assert!(TensorView::from_abi(&abi::Tensor { ndim, ..good }, "q").is_err());
            }
        }
    }
}
