//! Layers and plans, and the calls that run kernels.

use super::{backend::Backend, calls::call, kv_cache::KvCache, services::ExecContext};
use crate::{
    abi::{AbiSlice, BatchLimitsV1, BatchV1, ErrorSink, ExecContextV1, ForwardV1, Status, Tensor},
    batch::{BatchLimits, BatchView, Causality},
    error::{BackendError, ErrorCode, Result},
    tensor::{TensorView, TensorViewMut},
};
use std::{ffi::c_void, sync::Arc};

/// An attention layer. Usable from several threads at once.
pub struct Layer {
    backend: Arc<Backend>,
    handle: *mut c_void,
}

// SAFETY: the ABI requires layers to be usable from several threads at once.
unsafe impl Send for Layer {}
// SAFETY: as above.
unsafe impl Sync for Layer {}

/// The tensors of a forward call.
#[derive(Debug)]
pub struct Forward<'a> {
    /// `[tokens, num_heads, head_size]`; MLA: see [`Layer::forward`].
    pub q: TensorView<'a>,
    /// `[tokens, num_kv_heads, head_size]`: only for layers without a cache.
    pub k: Option<TensorView<'a>>,
    /// `[tokens, num_kv_heads, head_size_v]`: only for layers without a cache.
    pub v: Option<TensorView<'a>>,
    /// The cache; absent for layers without one.
    pub cache: Option<&'a KvCache>,
    /// A plan of this layer or of another of its group.
    pub plan: &'a Plan,
    /// `[tokens, num_heads, head_size_v]`.
    pub out: TensorViewMut<'a>,
    /// `[num_heads, tokens]` f32, natural logarithm.
    pub lse: Option<TensorViewMut<'a>>,
    /// `[tokens, k]` i32 row indices of sparse attention, −1 padded.
    pub topk_indices: Option<TensorView<'a>>,
}

type ForwardFunction =
    unsafe extern "C" fn(*mut c_void, *const ExecContextV1, *const ForwardV1, *const ErrorSink) -> Status;

fn pointer(tensor: Option<&Tensor>) -> *const Tensor {
    tensor.map_or(std::ptr::null(), std::ptr::from_ref)
}

impl Layer {
    pub(super) fn new(backend: Arc<Backend>, handle: *mut c_void) -> Self {
        Self { backend, handle }
    }

    /// The backend that runs it.
    #[must_use]
    pub fn backend(&self) -> &Arc<Backend> {
        &self.backend
    }

    /// Bytes of workspace that a call within `limits` can need.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn workspace_size(&self, limits: &BatchLimits) -> Result<usize> {
        let limits = BatchLimitsV1 {
            size: size_of::<BatchLimitsV1>(),
            extensions: std::ptr::null(),
            max_num_requests: limits.max_num_requests as u64,
            max_num_tokens: limits.max_num_tokens as u64,
            max_query_len: limits.max_query_len as u64,
            max_seq_len: limits.max_seq_len as u64,
            parallelism: limits.parallelism as u64,
        };
        let mut bytes = 0_u64;
        call("workspace_size", |error| {
            // SAFETY: the handle is ours, everything else lives for the call.
            unsafe { (self.backend.table().workspace_size)(self.handle, &raw const limits, &raw mut bytes, error) }
        })?;
        usize::try_from(bytes).map_err(|_| {
            BackendError::new(ErrorCode::OutOfMemory, format!("the layer asks for a workspace of {bytes} bytes"))
        })
    }

    /// Makes a plan for a batch. It serves every layer of the same backend and shape.
    ///
    /// # Errors
    /// When the batch breaks the contract; nothing is read through an id out of range.
    pub fn plan(&self, batch: &BatchView<'_>) -> Result<Plan> {
        let mut handle = std::ptr::null_mut();
        with_batch(batch, |batch| {
            call("plan", |error| {
                // SAFETY: the handle is ours, everything else lives for the call.
                unsafe { (self.backend.table().plan)(self.handle, batch, &raw mut handle, error) }
            })
        })?;
        if handle.is_null() {
            return Err(BackendError::new(ErrorCode::Internal, "plan gave no plan"));
        }
        Ok(Plan { backend: Arc::clone(&self.backend), handle })
    }

    /// Writes new tokens into the cache: `k` `[tokens, num_kv_heads, head_size]`, `v`
    /// `[tokens, num_kv_heads, head_size_v]`; MLA: `k` holds rows `[tokens, head_size]`, no `v`.
    /// `slot_mapping` is `[tokens]` i64: block · block_size + offset, −1 = not written.
    ///
    /// # Errors
    /// When shapes differ or a slot is out of range; then nothing was written.
    pub fn write_kv(
        &self,
        context: &mut ExecContext,
        k: &TensorView<'_>,
        v: Option<&TensorView<'_>>,
        slot_mapping: &TensorView<'_>,
        cache: &mut KvCache,
    ) -> Result<()> {
        let (k, v, slots) = (k.to_abi(), v.map(|v| v.to_abi()), slot_mapping.to_abi());
        let context = context.lend();
        call("write_kv", |error| {
            // SAFETY: the handle is ours; everything else lives for the call, and the cache is
            // borrowed for writing.
            unsafe {
                (self.backend.table().write_kv)(
                    self.handle,
                    &raw const context,
                    &raw const k,
                    pointer(v.as_ref()),
                    &raw const slots,
                    AbiSlice::new(cache.as_abi()),
                    error,
                )
            }
        })
    }

    /// Attention of a batch: q `[tokens, num_heads, head_size]` → out
    /// `[tokens, num_heads, head_size_v]`. MLA: q is not absorbed,
    /// `[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]`, and out is
    /// `[tokens, num_heads, v_head_dim]`; the backend chooses the absorbed or the other way.
    ///
    /// # Errors
    /// When shapes differ from the layer's or the plan's, or the kernel fails.
    pub fn forward(&self, context: &mut ExecContext, forward: Forward<'_>) -> Result<()> {
        self.run("forward", self.backend.table().forward, context, forward)
    }

    /// MLA, not absorbed: shapes as for [`Layer::forward`].
    ///
    /// # Errors
    /// As [`Layer::forward`]; also when the layer is not MLA.
    pub fn forward_prefill(&self, context: &mut ExecContext, forward: Forward<'_>) -> Result<()> {
        self.run("forward_prefill", self.backend.table().forward_prefill, context, forward)
    }

    /// MLA, absorbed: q `[tokens, num_heads, kv_lora_rank + qk_rope_head_dim]` → out
    /// `[tokens, num_heads, kv_lora_rank]`.
    ///
    /// # Errors
    /// As [`Layer::forward`]; also when the layer is not MLA.
    pub fn forward_decode(&self, context: &mut ExecContext, forward: Forward<'_>) -> Result<()> {
        self.run("forward_decode", self.backend.table().forward_decode, context, forward)
    }

    fn run(
        &self,
        what: &str,
        function: ForwardFunction,
        context: &mut ExecContext,
        forward: Forward<'_>,
    ) -> Result<()> {
        // A plan of another plugin is a pointer to something else altogether.
        if !Arc::ptr_eq(&self.backend, &forward.plan.backend) {
            return Err(BackendError::invalid(format!(
                "the plan was made by {}, the layer belongs to {}: make the plan with a layer of the same backend",
                forward.plan.backend.name(),
                self.backend.name()
            )));
        }
        let q = forward.q.to_abi();
        let (k, v) = (forward.k.as_ref().map(TensorView::to_abi), forward.v.as_ref().map(TensorView::to_abi));
        let (out, lse) = (forward.out.to_abi(), forward.lse.as_ref().map(TensorViewMut::to_abi));
        let topk = forward.topk_indices.as_ref().map(TensorView::to_abi);
        let abi = ForwardV1 {
            size: size_of::<ForwardV1>(),
            extensions: std::ptr::null(),
            q: &raw const q,
            k: pointer(k.as_ref()),
            v: pointer(v.as_ref()),
            cache: forward.cache.map_or(AbiSlice::EMPTY, |cache| AbiSlice::new(cache.as_abi())),
            plan: forward.plan.handle,
            out: &raw const out,
            lse: pointer(lse.as_ref()),
            topk_indices: pointer(topk.as_ref()),
        };
        let context = context.lend();
        call(what, |error| {
            // SAFETY: layer and plan are ours and of one backend; everything else lives for the
            // call; `out` and `lse` are borrowed for writing.
            unsafe { function(self.handle, &raw const context, &raw const abi, error) }
        })
    }

    /// Copies blocks within a cache: `pairs` is `[n, 2]` i64, source and destination.
    ///
    /// # Errors
    /// When a block is out of range; then nothing was copied.
    pub fn copy_blocks(&self, context: &mut ExecContext, cache: &mut KvCache, pairs: &TensorView<'_>) -> Result<()> {
        let (pairs, context) = (pairs.to_abi(), context.lend());
        call("copy_blocks", |error| {
            // SAFETY: the handle is ours; the cache is borrowed for writing.
            unsafe {
                (self.backend.table().copy_blocks)(
                    self.handle,
                    &raw const context,
                    AbiSlice::new(cache.as_abi()),
                    &raw const pairs,
                    error,
                )
            }
        })
    }

    /// Copies blocks from one cache to another: `pairs` is `[n, 2]` i64, source and destination.
    ///
    /// # Errors
    /// When a block is out of range; then nothing was copied.
    pub fn swap_blocks(
        &self,
        context: &mut ExecContext,
        source: &KvCache,
        destination: &mut KvCache,
        pairs: &TensorView<'_>,
    ) -> Result<()> {
        let (pairs, context) = (pairs.to_abi(), context.lend());
        call("swap_blocks", |error| {
            // SAFETY: the handle is ours; the destination is borrowed for writing.
            unsafe {
                (self.backend.table().swap_blocks)(
                    self.handle,
                    &raw const context,
                    AbiSlice::new(source.as_abi()),
                    AbiSlice::new(destination.as_abi()),
                    &raw const pairs,
                    error,
                )
            }
        })
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        let destroyed =
            call("destroy_layer", |error| unsafe { (self.backend.table().destroy_layer)(self.handle, error) });
        if let Err(error) = destroyed {
            tracing::warn!(backend = self.backend.name(), %error, "destroying a layer failed");
        }
    }
}

impl std::fmt::Debug for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layer").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// A batch as a backend laid it out for its kernels: its own copy of the metadata and how the work
/// is cut.
pub struct Plan {
    backend: Arc<Backend>,
    handle: *mut c_void,
}

// SAFETY: the ABI requires plans to be usable from several threads at once; `update` takes `&mut`.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Plan {
    /// Replaces the batch in place.
    ///
    /// # Errors
    /// When the batch breaks the contract; then the plan is unchanged.
    pub fn update(&mut self, batch: &BatchView<'_>) -> Result<()> {
        with_batch(batch, |batch| {
            call("update_plan", |error| {
                // SAFETY: the handle is ours and borrowed for writing.
                unsafe { (self.backend.table().update_plan)(self.handle, batch, error) }
            })
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        let destroyed =
            call("destroy_plan", |error| unsafe { (self.backend.table().destroy_plan)(self.handle, error) });
        if let Err(error) = destroyed {
            tracing::warn!(backend = self.backend.name(), %error, "destroying a plan failed");
        }
    }
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// Lends a batch to `function` as it crosses the ABI.
fn with_batch<T>(batch: &BatchView<'_>, function: impl FnOnce(*const BatchV1) -> Result<T>) -> Result<T> {
    let (starts, lens) = (batch.query_start_loc.to_abi(), batch.seq_lens.to_abi());
    let table = batch.block_table.as_ref().map(TensorView::to_abi);
    let spans = batch.prefix_spans.as_ref().map(TensorView::to_abi);
    let encoder = batch.encoder_seq_lens.as_ref().map(TensorView::to_abi);
    let (causal, flags) = match &batch.causality {
        Causality::NonCausal => (0, None),
        Causality::Causal => (1, None),
        Causality::PerRequest(flags) => (2, Some(flags.to_abi())),
    };
    let local = batch.dcp.as_ref().map(|dcp| dcp.local_seq_lens.to_abi());
    let abi = BatchV1 {
        size: size_of::<BatchV1>(),
        extensions: std::ptr::null(),
        num_requests: batch.num_requests as u64,
        num_blocks: batch.num_blocks as u64,
        max_query_len: batch.max_query_len as u64,
        max_seq_len: batch.max_seq_len as u64,
        query_start_loc: &raw const starts,
        seq_lens: &raw const lens,
        block_table: pointer(table.as_ref()),
        causal,
        causal_per_request: pointer(flags.as_ref()),
        prefix_spans: pointer(spans.as_ref()),
        encoder_seq_lens: pointer(encoder.as_ref()),
        dcp_world_size: batch.dcp.as_ref().map_or(0, |dcp| dcp.world_size),
        dcp_rank: batch.dcp.as_ref().map_or(0, |dcp| dcp.rank),
        dcp_local_seq_lens: pointer(local.as_ref()),
    };
    function(&raw const abi)
}
