//! The memory of a layer's KV cache on the host.

use crate::{
    abi::{CacheTensor, Tensor, TensorRole},
    cache::KvCacheSpec,
    dtype::DataType,
    error::BackendError,
    tensor::{TensorView, TensorViewMut},
};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

/// A cache that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvCacheError {
    /// The specification does not fit itself.
    #[error(
        "the cache tensor {role:?} of shape {shape:?} ({dtype}) with {num_blocks} blocks and alignment {alignment} is not possible"
    )]
    Impossible {
        /// What the tensor holds.
        role: TensorRole,
        /// Its shape.
        shape: Vec<i64>,
        /// Its element type.
        dtype: DataType,
        /// Blocks asked for.
        num_blocks: usize,
        /// Alignment asked for.
        alignment: u64,
    },
}

struct Allocation {
    pointer: *mut u8,
    layout: Layout,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `KvCache::allocate`.
        unsafe { dealloc(self.pointer, self.layout) };
    }
}

struct OneTensor {
    allocation: Allocation,
    role: TensorRole,
    dtype: DataType,
    shape: Vec<usize>,
    // What `abi` points to.
    dims: Box<[i64]>,
    strides: Box<[i64]>,
}

/// The cache of one layer, in host memory. New memory holds NaN patterns, not zeros, so that a
/// kernel that reads an unwritten slot is found out.
pub struct KvCache {
    tensors: Vec<OneTensor>,
    abi: Vec<CacheTensor>,
    num_blocks: usize,
}

// SAFETY: owns its memory; shared access only reads.
unsafe impl Send for KvCache {}
// SAFETY: as above.
unsafe impl Sync for KvCache {}

impl KvCache {
    /// Allocates a cache of `num_blocks` blocks.
    ///
    /// # Errors
    /// When a tensor's shape or alignment makes no sense or overflows.
    pub fn allocate(spec: &KvCacheSpec, num_blocks: usize) -> Result<Self, KvCacheError> {
        let mut tensors = Vec::new();
        for tensor in &spec.tensors {
            let impossible = || KvCacheError::Impossible {
                role: tensor.role,
                shape: tensor.shape.clone(),
                dtype: tensor.dtype,
                num_blocks,
                alignment: tensor.alignment,
            };
            let shape: Vec<usize> = tensor
                .shape
                .iter()
                .map(|size| if *size == -1 { Some(num_blocks) } else { usize::try_from(*size).ok() })
                .collect::<Option<_>>()
                .filter(|shape: &Vec<usize>| shape.len() <= crate::tensor::MAX_DIMS)
                .ok_or_else(impossible)?;
            let bytes = shape
                .iter()
                .try_fold(tensor.dtype.size(), |bytes, size| bytes.checked_mul(*size))
                .ok_or_else(impossible)?;
            let alignment = usize::try_from(tensor.alignment).ok().ok_or_else(impossible)?.max(64);
            let layout = Layout::from_size_align(bytes.max(1), alignment).map_err(|_| impossible())?;
            // SAFETY: the layout is not empty.
            let pointer = unsafe { alloc(layout) };
            if pointer.is_null() {
                handle_alloc_error(layout);
            }
            // SAFETY: `layout.size()` bytes were just allocated. 0xff is NaN in every float format.
            unsafe { pointer.write_bytes(0xff, layout.size()) };
            let allocation = Allocation { pointer, layout };
            let dims: Box<[i64]> = shape.iter().map(|size| *size as i64).collect();
            let mut strides = vec![1_i64; shape.len()].into_boxed_slice();
            for index in (0..shape.len().saturating_sub(1)).rev() {
                strides[index] = strides[index + 1] * dims[index + 1].max(1);
            }
            tensors.push(OneTensor { allocation, role: tensor.role, dtype: tensor.dtype, shape, dims, strides });
        }
        let abi = tensors
            .iter()
            .map(|tensor| CacheTensor {
                role: tensor.role,
                tensor: Tensor {
                    data: tensor.allocation.pointer.cast(),
                    device: crate::abi::DlDevice::CPU,
                    ndim: tensor.dims.len() as i32,
                    dtype: tensor.dtype.to_dl(),
                    shape: tensor.dims.as_ptr().cast_mut(),
                    strides: tensor.strides.as_ptr().cast_mut(),
                    byte_offset: 0,
                },
            })
            .collect();
        Ok(Self { tensors, abi, num_blocks })
    }

    /// Blocks.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.allocation.layout.size()).sum()
    }

    pub(super) fn as_abi(&self) -> &[CacheTensor] {
        &self.abi
    }

    fn find(&self, role: TensorRole) -> Result<&OneTensor, BackendError> {
        self.tensors
            .iter()
            .find(|tensor| tensor.role == role)
            .ok_or_else(|| BackendError::invalid(format!("the cache has no tensor of {role:?}")))
    }

    /// One tensor.
    ///
    /// # Errors
    /// When the cache has none of that role.
    pub fn tensor(&self, role: TensorRole) -> Result<TensorView<'_>, BackendError> {
        let tensor = self.find(role)?;
        let bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.size();
        // SAFETY: the allocation holds at least this many bytes, all written at creation.
        let bytes = unsafe { std::slice::from_raw_parts(tensor.allocation.pointer, bytes) };
        TensorView::from_bytes(bytes, tensor.dtype, &tensor.shape)
    }

    /// One tensor, to write.
    ///
    /// # Errors
    /// When the cache has none of that role.
    pub fn tensor_mut(&mut self, role: TensorRole) -> Result<TensorViewMut<'_>, BackendError> {
        let tensor = self.find(role)?;
        let bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.size();
        // SAFETY: as in `tensor`, and `self` is borrowed for writing.
        let bytes = unsafe { std::slice::from_raw_parts_mut(tensor.allocation.pointer, bytes) };
        TensorViewMut::from_bytes(bytes, tensor.dtype, &tensor.shape)
    }
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvCache").field("num_blocks", &self.num_blocks).field("bytes", &self.bytes()).finish()
    }
}
