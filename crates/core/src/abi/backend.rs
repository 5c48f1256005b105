//! The interface `attache.backend`, generation 1: how an engine makes and runs attention layers.
//!
//! Ownership: what a `create…` or `plan` function gives is given back to the matching `destroy…`,
//! once. Arguments are borrowed for the call. Backends, layers and plans may be used from several
//! threads at once, except that `update_plan` and the `destroy…` functions need exclusive use.

use super::{
    host::HostServicesV1,
    types::{
        AbiSlice, AbiStr, Attribute, AttributeSink, CacheTensor, DlDataType, ErrorSink, Extension, Status, Tensor,
        TensorRole, TextSink,
    },
};
use abi_stable::StableAbi;
use core::ffi::c_void;

/// Identifier of [`BackendInterfaceV1`].
pub const BACKEND_INTERFACE_ID: &str = "attache.backend";
/// Generation of [`BackendInterfaceV1`].
pub const BACKEND_INTERFACE_GENERATION: u32 = 1;

/// What a layer is. Lengths and sizes are in elements.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct LayerConfigV1 {
    /// Bytes of this struct.
    pub size: usize,
    /// Additions, or null.
    pub extensions: *const Extension,
    /// The request that the layer was selected by.
    pub request: AbiSlice<Attribute>,
    /// Options for this layer, by name.
    pub options: AbiSlice<Attribute>,
    /// The layer's name, for messages.
    pub name: AbiStr,
    /// Query heads.
    pub num_heads: u32,
    /// KV heads; divides `num_heads`.
    pub num_kv_heads: u32,
    /// Elements of a query or key head (MLA: kv_lora_rank + qk_rope_head_dim).
    pub head_size: u32,
    /// Elements of a value head (MLA: kv_lora_rank).
    pub head_size_v: u32,
    /// Element type of q, k, v and out.
    pub dtype: DlDataType,
    /// Name of the cache's element format, for instance `auto`.
    pub kv_cache_dtype: AbiStr,
    /// Name of the cache's layout, for instance `head_major`.
    pub layout: AbiStr,
    /// Tokens of a block.
    pub block_size: u32,
    /// decoder, encoder, encoder_only or encoder_decoder.
    pub attn_type: AbiStr,
    /// Softmax scale.
    pub scale: f64,
    /// Logit soft-cap; 0 or less = off.
    pub softcap: f64,
    /// Window in tokens, the current one included; 0 or less = off.
    pub sliding_window: i64,
    /// Tokens visible to the right of the current one without causal masking; -1 = as the window says.
    pub window_right: i64,
    /// Tokens of a chunk of chunked-local attention; 0 or less = off.
    pub chunked_local: i64,
    /// One logit per query head, or empty.
    pub sinks: AbiSlice<f32>,
    /// One slope per query head, or empty.
    pub alibi_slopes: AbiSlice<f32>,
    /// Scale of stored keys: empty = 1, one value, or one per KV head.
    pub k_scales: AbiSlice<f32>,
    /// Scale of stored values: likewise.
    pub v_scales: AbiSlice<f32>,
    /// MLA: elements of the latent part of a row; 0 = not MLA.
    pub kv_lora_rank: u32,
    /// MLA: elements of a head without rotary position.
    pub qk_nope_head_dim: u32,
    /// MLA: elements of a head with rotary position.
    pub qk_rope_head_dim: u32,
    /// MLA: elements of an up-projected value head.
    pub v_head_dim: u32,
    /// MLA: `[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]`, or null. Copied if kept.
    pub kv_b_proj: *const Tensor,
}

/// The most that a batch will hold, for worst-case answers.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct BatchLimitsV1 {
    /// Bytes of this struct.
    pub size: usize,
    /// Additions, or null.
    pub extensions: *const Extension,
    /// Requests.
    pub max_num_requests: u64,
    /// Query tokens of all requests together.
    pub max_num_tokens: u64,
    /// Query tokens of one request.
    pub max_query_len: u64,
    /// Tokens of one request in the cache.
    pub max_seq_len: u64,
    /// Threads that may run the tasks of one call.
    pub parallelism: u64,
}

/// A ragged batch. Each tensor says where it lies. Pointers may be null where said.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct BatchV1 {
    /// Bytes of this struct.
    pub size: usize,
    /// Additions, or null.
    pub extensions: *const Extension,
    /// Requests, `n`.
    pub num_requests: u64,
    /// Blocks of the cache: every id in use is below.
    pub num_blocks: u64,
    /// Most query tokens of a request.
    pub max_query_len: u64,
    /// Most tokens of a request in the cache.
    pub max_seq_len: u64,
    /// `[n + 1]` i32.
    pub query_start_loc: *const Tensor,
    /// `[n]` i32: tokens in the cache, the new ones included.
    pub seq_lens: *const Tensor,
    /// `[n, max_blocks]` i32, or null when the layer has no cache.
    pub block_table: *const Tensor,
    /// 1 = causal, 0 = not, 2 = per request.
    pub causal: u32,
    /// `[n]` u8 when `causal` is 2, else null.
    pub causal_per_request: *const Tensor,
    /// `[m, 3]` i32 (request, first position, one past the last) of multimodal prefixes, or null.
    pub prefix_spans: *const Tensor,
    /// `[n]` i32: encoder tokens of each request, or null.
    pub encoder_seq_lens: *const Tensor,
    /// Ranks of the decode context parallel group; 0 or 1 = off.
    pub dcp_world_size: u32,
    /// This rank.
    pub dcp_rank: u32,
    /// `[n]` i32: tokens of each request that this rank holds, or null.
    pub dcp_local_seq_lens: *const Tensor,
}

/// What every kernel call gets.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct ExecContextV1 {
    /// Bytes of this struct.
    pub size: usize,
    /// Additions, or null.
    pub extensions: *const Extension,
    /// The engine's stream; null on the CPU.
    pub stream: *mut c_void,
    /// Scratch memory for this call, on the layer's device.
    pub workspace: *mut u8,
    /// Bytes of `workspace`.
    pub workspace_bytes: usize,
    /// The engine's services.
    pub host: *const HostServicesV1,
}

/// The tensors of a forward call.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct ForwardV1 {
    /// Bytes of this struct.
    pub size: usize,
    /// Additions, or null.
    pub extensions: *const Extension,
    /// `[tokens, num_heads, head_size]`.
    pub q: *const Tensor,
    /// `[tokens, num_kv_heads, head_size]`, or null: only for layers without a cache.
    pub k: *const Tensor,
    /// `[tokens, num_kv_heads, head_size_v]`, or null.
    pub v: *const Tensor,
    /// The cache.
    pub cache: AbiSlice<CacheTensor>,
    /// A plan that this layer, or another of its group, made.
    pub plan: *mut c_void,
    /// `[tokens, num_heads, head_size_v]`, written.
    pub out: *const Tensor,
    /// `[num_heads, tokens]` f32, written, or null.
    pub lse: *const Tensor,
    /// `[tokens, k]` i32 row indices of sparse attention, -1 padded, or null.
    pub topk_indices: *const Tensor,
}

/// One tensor of the cache as a layer wants it.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct CacheTensorSpecV1 {
    /// Bytes of this struct.
    pub size: usize,
    /// Additions, or null.
    pub extensions: *const Extension,
    /// What it holds.
    pub role: TensorRole,
    /// Element type.
    pub dtype: DlDataType,
    /// Sizes; the one that counts blocks is -1.
    pub shape: AbiSlice<i64>,
    /// Alignment of its first byte.
    pub alignment: u64,
    /// Bytes of one block in this tensor.
    pub bytes_per_block: u64,
}

/// Receives the tensors of a cache specification, one a call.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct CacheSpecSink {
    /// Bytes of this struct.
    pub size: usize,
    /// Handed back to `push`.
    pub context: *mut c_void,
    /// Receives one specification; the receiver copies it.
    pub push: unsafe extern "C" fn(context: *mut c_void, spec: *const CacheTensorSpecV1),
}

/// The function table.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct BackendInterfaceV1 {
    /// Bytes of this struct.
    pub size: usize,
    /// Additions, or null.
    pub extensions: *const Extension,
    /// Backends in this plugin.
    pub backend_count: unsafe extern "C" fn() -> usize,
    /// Pushes the descriptor of backend `index` as JSON.
    pub descriptor: unsafe extern "C" fn(index: usize, out: *const TextSink, error: *const ErrorSink) -> Status,
    /// Makes a backend. `host` lives as long as the process.
    pub create: unsafe extern "C" fn(
        index: usize,
        host: *const HostServicesV1,
        options: AbiSlice<Attribute>,
        out: *mut *mut c_void,
        error: *const ErrorSink,
    ) -> Status,
    /// Unmakes a backend whose layers are gone.
    pub destroy: unsafe extern "C" fn(backend: *mut c_void, error: *const ErrorSink) -> Status,
    /// Pushes the facts of each device that the backend can use here.
    pub probe: unsafe extern "C" fn(backend: *mut c_void, out: *const AttributeSink, error: *const ErrorSink) -> Status,
    /// Pushes each reason why the backend cannot serve the request on the device; none = it can.
    pub validate: unsafe extern "C" fn(
        backend: *mut c_void,
        request: AbiSlice<Attribute>,
        device: AbiSlice<Attribute>,
        out: *const TextSink,
        error: *const ErrorSink,
    ) -> Status,
    /// Pushes each tensor of the layer's cache.
    pub kv_cache_spec: unsafe extern "C" fn(
        backend: *mut c_void,
        layer: *const LayerConfigV1,
        out: *const CacheSpecSink,
        error: *const ErrorSink,
    ) -> Status,
    /// Makes a layer.
    pub create_layer: unsafe extern "C" fn(
        backend: *mut c_void,
        layer: *const LayerConfigV1,
        out: *mut *mut c_void,
        error: *const ErrorSink,
    ) -> Status,
    /// Unmakes a layer.
    pub destroy_layer: unsafe extern "C" fn(layer: *mut c_void, error: *const ErrorSink) -> Status,
    /// Bytes of workspace that a call within `limits` can need.
    pub workspace_size: unsafe extern "C" fn(
        layer: *mut c_void,
        limits: *const BatchLimitsV1,
        out: *mut u64,
        error: *const ErrorSink,
    ) -> Status,
    /// Makes a plan for a batch; serves all layers of the same shape.
    pub plan: unsafe extern "C" fn(
        layer: *mut c_void,
        batch: *const BatchV1,
        out: *mut *mut c_void,
        error: *const ErrorSink,
    ) -> Status,
    /// Replaces a plan's batch in place.
    pub update_plan: unsafe extern "C" fn(plan: *mut c_void, batch: *const BatchV1, error: *const ErrorSink) -> Status,
    /// Unmakes a plan.
    pub destroy_plan: unsafe extern "C" fn(plan: *mut c_void, error: *const ErrorSink) -> Status,
    /// Writes new tokens into the cache. MLA: `k` holds `[tokens, head_size]` rows, `v` is null.
    pub write_kv: unsafe extern "C" fn(
        layer: *mut c_void,
        context: *const ExecContextV1,
        k: *const Tensor,
        v: *const Tensor,
        slot_mapping: *const Tensor,
        cache: AbiSlice<CacheTensor>,
        error: *const ErrorSink,
    ) -> Status,
    /// Attention. MLA: q `[tokens, num_heads, qk_nope + qk_rope]`, out `[tokens, num_heads, v_head_dim]`.
    pub forward: unsafe extern "C" fn(
        layer: *mut c_void,
        context: *const ExecContextV1,
        forward: *const ForwardV1,
        error: *const ErrorSink,
    ) -> Status,
    /// MLA, not absorbed: shapes as for `forward`.
    pub forward_prefill: unsafe extern "C" fn(
        layer: *mut c_void,
        context: *const ExecContextV1,
        forward: *const ForwardV1,
        error: *const ErrorSink,
    ) -> Status,
    /// MLA, absorbed: q `[tokens, num_heads, head_size]`, out `[tokens, num_heads, kv_lora_rank]`.
    pub forward_decode: unsafe extern "C" fn(
        layer: *mut c_void,
        context: *const ExecContextV1,
        forward: *const ForwardV1,
        error: *const ErrorSink,
    ) -> Status,
    /// Copies blocks within a cache. `pairs` is `[n, 2]` i64: source, destination.
    pub copy_blocks: unsafe extern "C" fn(
        layer: *mut c_void,
        context: *const ExecContextV1,
        cache: AbiSlice<CacheTensor>,
        pairs: *const Tensor,
        error: *const ErrorSink,
    ) -> Status,
    /// Copies blocks from one cache to another (device to host and back).
    pub swap_blocks: unsafe extern "C" fn(
        layer: *mut c_void,
        context: *const ExecContextV1,
        source: AbiSlice<CacheTensor>,
        destination: AbiSlice<CacheTensor>,
        pairs: *const Tensor,
        error: *const ErrorSink,
    ) -> Status,
}

// SAFETY: a table is functions and a pointer to data that is never written.
unsafe impl Send for BackendInterfaceV1 {}
// SAFETY: as above.
unsafe impl Sync for BackendInterfaceV1 {}
