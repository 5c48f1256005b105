//! The function table of a plugin, made from its safe traits.
//!
//! Handles are `Box<Box<dyn Backend>>`, `Box<Box<dyn Layer>>` and `Box<Box<dyn Plan>>` as raw
//! pointers. Every function is guarded.

use crate::{
    context::{ExecContext, HostServices},
    guard::{borrowed, guarded},
    trace,
    traits::{Backend, CacheView, CacheViewMut, ForwardArgs, Layer, Options, Plan},
};
use attache_core::{
    AttentionType, BackendError, BatchLimits, BatchView, Causality, DataType, DcpView, Device, Dtype, ErrorCode,
    KvCacheDtype, LayerConfig, LayerRequest, MlaConfig, TensorView, TensorViewMut,
    abi::{
        AbiSlice, AbiStr, Attribute, AttributeSink, BACKEND_INTERFACE_GENERATION, BACKEND_INTERFACE_ID,
        BackendInterfaceV1, BatchLimitsV1, BatchV1, CacheSpecSink, CacheTensor, CacheTensorSpecV1, ErrorSink,
        ExecContextV1, ForwardV1, HostServicesV1, InterfaceHandle, LayerConfigV1, Status, Tensor, TextSink,
    },
    descriptor::BackendDescriptor,
    error::Result,
};
use std::{cell::Cell, ffi::c_void};

/// One backend of a plugin.
pub struct BackendEntry {
    descriptor: fn() -> BackendDescriptor,
    create: fn(HostServices, &Options) -> Result<Box<dyn Backend>>,
}

/// The entry of a backend type.
#[must_use]
pub const fn entry<B: Backend>() -> BackendEntry {
    BackendEntry { descriptor: B::descriptor, create: |host, options| Ok(Box::new(B::create(host, options)?)) }
}

/// The backends of a plugin; implemented by the export macro.
pub trait PluginBackends: 'static {
    /// In the order in which they are listed.
    const ENTRIES: &'static [BackendEntry];
    /// Whether this is a library of its own, with its own copy of `tracing`.
    const IS_LIBRARY: bool;
}

struct Table<P>(std::marker::PhantomData<P>);

impl<P: PluginBackends> Table<P> {
    const TABLE: BackendInterfaceV1 = backend_table::<P>();
}

/// The getter of a plugin's interfaces.
///
/// # Safety
/// `id` must be readable and `out` writable.
pub unsafe extern "C" fn interface<P: PluginBackends>(
    id: AbiStr,
    generation: u32,
    out: *mut InterfaceHandle,
) -> Status {
    guarded(std::ptr::null(), || {
        // SAFETY: the caller lends the text.
        let known = unsafe { id.as_str() } == Some(BACKEND_INTERFACE_ID) && generation == BACKEND_INTERFACE_GENERATION;
        if !known {
            return Err(BackendError::new(ErrorCode::NotFound, "no such interface"));
        }
        // SAFETY: the caller gives a place to write to.
        unsafe { out.write(InterfaceHandle::of::<BackendInterfaceV1>(&Table::<P>::TABLE)) };
        Ok(())
    })
}

/// The table of a plugin.
#[must_use]
pub const fn backend_table<P: PluginBackends>() -> BackendInterfaceV1 {
    BackendInterfaceV1 {
        size: size_of::<BackendInterfaceV1>(),
        extensions: std::ptr::null(),
        backend_count: backend_count::<P>,
        descriptor: descriptor::<P>,
        create: create::<P>,
        destroy,
        probe,
        validate,
        kv_cache_spec,
        create_layer,
        destroy_layer,
        workspace_size,
        plan,
        update_plan,
        destroy_plan,
        write_kv,
        forward,
        forward_prefill,
        forward_decode,
        copy_blocks,
        swap_blocks,
    }
}

// Below, `unsafe` rests on the ABI's contract: pointers that the host passes are null or valid for
// the call, handles are what `create`, `create_layer` and `plan` gave, each destroyed once.

/// Borrows what a handle stands for.
///
/// # Safety
/// `handle` must be null or a handle for a `T`, alive for `'a`.
unsafe fn handle<'a, T: ?Sized>(handle: *mut c_void, name: &str) -> Result<&'a T> {
    if handle.is_null() {
        return Err(BackendError::invalid(format!("the {name} handle is null")));
    }
    // SAFETY: the caller vouches for it.
    Ok(unsafe { &**handle.cast::<Box<T>>() })
}

/// Gives an object away as a handle.
///
/// # Safety
/// `out` must be null or writable.
unsafe fn give<T: ?Sized>(object: Box<T>, out: *mut *mut c_void) -> Result<()> {
    if out.is_null() {
        return Err(BackendError::invalid("there is no place to write the handle to"));
    }
    // SAFETY: not null, and the caller vouches for it.
    unsafe { out.write(Box::into_raw(Box::new(object)).cast()) };
    Ok(())
}

/// Drops what a handle stands for.
///
/// # Safety
/// `handle` must be null or a handle for a `T` that is not used again.
unsafe fn destroy_handle<T: ?Sized>(handle: *mut c_void) {
    if !handle.is_null() {
        // SAFETY: the caller vouches for it.
        drop(unsafe { Box::from_raw(handle.cast::<Box<T>>()) });
    }
}

/// Copies attributes as pairs.
///
/// # Safety
/// The slice and its texts must be readable.
unsafe fn pairs(attributes: AbiSlice<Attribute>) -> Vec<(String, String)> {
    // SAFETY: the caller vouches for it.
    unsafe { attributes.as_slice() }
        .iter()
        // SAFETY: as above.
        .map(|attribute| unsafe { (attribute.key.to_string_lossy(), attribute.value.to_string_lossy()) })
        .collect()
}

fn borrowed_pairs(pairs: &[(String, String)]) -> impl Iterator<Item = (&str, &str)> {
    pairs.iter().map(|(key, value)| (key.as_str(), value.as_str()))
}

/// Reads the request of a call.
///
/// # Safety
/// As [`pairs`].
unsafe fn read_request(attributes: AbiSlice<Attribute>) -> Result<LayerRequest> {
    // SAFETY: the caller vouches for it.
    let attributes = unsafe { pairs(attributes) };
    LayerRequest::from_attributes(borrowed_pairs(&attributes))
        .map_err(|error| BackendError::unsupported(error.to_string()))
}

unsafe extern "C" fn backend_count<P: PluginBackends>() -> usize {
    P::ENTRIES.len()
}

fn entry_of<P: PluginBackends>(index: usize) -> Result<&'static BackendEntry> {
    P::ENTRIES.get(index).ok_or_else(|| {
        BackendError::out_of_range(format!("there is no backend {index}; the plugin has {}", P::ENTRIES.len()))
    })
}

unsafe extern "C" fn descriptor<P: PluginBackends>(
    index: usize,
    out: *const TextSink,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        let descriptor = (entry_of::<P>(index)?.descriptor)();
        let text = attache_core::private::serde_json::to_string(&descriptor)
            .map_err(|error| BackendError::new(ErrorCode::Internal, error.to_string()))?;
        // SAFETY: the host's sink lives for the call.
        unsafe { push_text(out, &text) }
    })
}

/// Hands a text to the host.
///
/// # Safety
/// `sink` must be null or alive.
unsafe fn push_text(sink: *const TextSink, text: &str) -> Result<()> {
    if sink.is_null() {
        return Err(BackendError::invalid("the text sink is null"));
    }
    // SAFETY: not null, and the caller vouches for it.
    unsafe { ((*sink).push)((*sink).context, AbiStr::new(text)) };
    Ok(())
}

unsafe extern "C" fn create<P: PluginBackends>(
    index: usize,
    host: *const HostServicesV1,
    options: AbiSlice<Attribute>,
    out: *mut *mut c_void,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        let entry = entry_of::<P>(index)?;
        // SAFETY: the host's services live as long as the process.
        let host = HostServices { table: unsafe { borrowed(host, "the host's services") }? };
        if P::IS_LIBRARY {
            trace::forward_to(host);
        }
        // SAFETY: the host lends the options for the call.
        let options = Options(unsafe { pairs(options) });
        let backend = (entry.create)(host, &options)?;
        // SAFETY: the host gives a place to write to.
        unsafe { give(backend, out) }
    })
}

unsafe extern "C" fn destroy(backend: *mut c_void, error: *const ErrorSink) -> Status {
    guarded(error, || {
        // SAFETY: the host gives the handle back.
        unsafe { destroy_handle::<dyn Backend>(backend) };
        Ok(())
    })
}

unsafe extern "C" fn probe(backend: *mut c_void, out: *const AttributeSink, error: *const ErrorSink) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle.
        let backend = unsafe { handle::<dyn Backend>(backend, "backend") }?;
        if out.is_null() {
            return Err(BackendError::invalid("the sink is null"));
        }
        for device in backend.probe()? {
            let facts = device.to_attributes();
            let facts: Vec<Attribute> = borrowed_pairs(&facts)
                .map(|(key, value)| Attribute { key: AbiStr::new(key), value: AbiStr::new(value) })
                .collect();
            // SAFETY: the sink lives for the call.
            unsafe { ((*out).push)((*out).context, AbiSlice::new(&facts)) };
        }
        Ok(())
    })
}

unsafe extern "C" fn validate(
    backend: *mut c_void,
    request: AbiSlice<Attribute>,
    device: AbiSlice<Attribute>,
    out: *const TextSink,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle.
        let backend = unsafe { handle::<dyn Backend>(backend, "backend") }?;
        // SAFETY: the host lends the attributes for the call.
        let (request, device) = unsafe { (pairs(request), pairs(device)) };
        let request = match LayerRequest::from_attributes(borrowed_pairs(&request)) {
            Ok(request) => request,
            // A need that this plugin does not know is a reason against it, not a failure.
            // SAFETY: the sink lives for the call.
            Err(unknown) => return unsafe { push_text(out, &unknown.to_string()) },
        };
        let device =
            Device::from_attributes(borrowed_pairs(&device)).map_err(|e| BackendError::invalid(e.to_string()))?;
        for reason in backend.validate(&request, &device)? {
            // SAFETY: the sink lives for the call.
            unsafe { push_text(out, &reason) }?;
        }
        Ok(())
    })
}

/// Reads a layer's configuration.
///
/// # Safety
/// `config` must be null or a host's struct, alive for `'a` with all it points to.
unsafe fn read_config<'a>(config: *const LayerConfigV1) -> Result<LayerConfig<'a>> {
    // SAFETY: the caller vouches for it, here and below.
    let abi = unsafe { borrowed(config, "the layer's configuration") }?;
    let dtype = match DataType::from_dl(abi.dtype) {
        Some(DataType::F32) => Dtype::F32,
        Some(DataType::F16) => Dtype::F16,
        Some(DataType::BF16) => Dtype::BF16,
        other => return Err(BackendError::unsupported(format!("compute dtype {other:?}; valid: f32, f16, bf16"))),
    };
    // SAFETY: as above.
    let text = |text: AbiStr| unsafe { text.to_string_lossy() };
    // SAFETY: as above.
    let floats = |slice: AbiSlice<f32>| unsafe { slice.as_slice() }.to_vec();
    let kv_b_proj = if abi.kv_b_proj.is_null() {
        None
    } else {
        // SAFETY: as above.
        Some(unsafe { TensorView::from_abi(abi.kv_b_proj, "kv_b_proj") }?)
    };
    let config = LayerConfig {
        // SAFETY: as above.
        request: unsafe { read_request(abi.request) }?,
        name: text(abi.name),
        num_heads: abi.num_heads,
        num_kv_heads: abi.num_kv_heads,
        head_size: abi.head_size,
        head_size_v: abi.head_size_v,
        dtype,
        kv_cache_dtype: KvCacheDtype::register(&text(abi.kv_cache_dtype)),
        layout: text(abi.layout),
        block_size: abi.block_size,
        attn_type: AttentionType::parse(&text(abi.attn_type)),
        scale: abi.scale,
        softcap: abi.softcap,
        sliding_window: abi.sliding_window,
        window_right: abi.window_right,
        chunked_local: abi.chunked_local,
        sinks: floats(abi.sinks),
        alibi_slopes: floats(abi.alibi_slopes),
        k_scales: floats(abi.k_scales),
        v_scales: floats(abi.v_scales),
        mla: (abi.kv_lora_rank > 0).then_some(MlaConfig {
            kv_lora_rank: abi.kv_lora_rank,
            qk_nope_head_dim: abi.qk_nope_head_dim,
            qk_rope_head_dim: abi.qk_rope_head_dim,
            v_head_dim: abi.v_head_dim,
            kv_b_proj,
        }),
        // SAFETY: as above.
        options: unsafe { pairs(abi.options) },
    };
    config.check()?;
    Ok(config)
}

unsafe extern "C" fn kv_cache_spec(
    backend: *mut c_void,
    layer: *const LayerConfigV1,
    out: *const CacheSpecSink,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle and struct.
        let (backend, config) = unsafe { (handle::<dyn Backend>(backend, "backend")?, read_config(layer)?) };
        if out.is_null() {
            return Err(BackendError::invalid("the sink is null"));
        }
        for tensor in backend.kv_cache_spec(&config)?.tensors {
            let spec = CacheTensorSpecV1 {
                size: size_of::<CacheTensorSpecV1>(),
                extensions: std::ptr::null(),
                role: tensor.role,
                dtype: tensor.dtype.to_dl(),
                shape: AbiSlice::new(&tensor.shape),
                alignment: tensor.alignment,
                bytes_per_block: tensor.bytes_per_block,
            };
            // SAFETY: the sink lives for the call.
            unsafe { ((*out).push)((*out).context, &raw const spec) };
        }
        Ok(())
    })
}

unsafe extern "C" fn create_layer(
    backend: *mut c_void,
    layer: *const LayerConfigV1,
    out: *mut *mut c_void,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle and struct.
        let (backend, config) = unsafe { (handle::<dyn Backend>(backend, "backend")?, read_config(layer)?) };
        // SAFETY: the host gives a place to write to.
        unsafe { give(backend.create_layer(&config)?, out) }
    })
}

unsafe extern "C" fn destroy_layer(layer: *mut c_void, error: *const ErrorSink) -> Status {
    guarded(error, || {
        // SAFETY: the host gives the handle back.
        unsafe { destroy_handle::<dyn Layer>(layer) };
        Ok(())
    })
}

unsafe extern "C" fn workspace_size(
    layer: *mut c_void,
    limits: *const BatchLimitsV1,
    out: *mut u64,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle and struct.
        let (layer, limits) = unsafe { (handle::<dyn Layer>(layer, "layer")?, borrowed(limits, "the limits")?) };
        let limits = BatchLimits {
            max_num_requests: size_from(limits.max_num_requests, "max_num_requests")?,
            max_num_tokens: size_from(limits.max_num_tokens, "max_num_tokens")?,
            max_query_len: size_from(limits.max_query_len, "max_query_len")?,
            max_seq_len: size_from(limits.max_seq_len, "max_seq_len")?,
            parallelism: size_from(limits.parallelism, "parallelism")?.max(1),
        };
        let bytes = layer.workspace_size(&limits)?;
        if out.is_null() {
            return Err(BackendError::invalid("there is no place to write the size to"));
        }
        // SAFETY: the host gives a place to write to.
        unsafe { out.write(bytes as u64) };
        Ok(())
    })
}

fn size_from(value: u64, name: &str) -> Result<usize> {
    // Beyond this, sums of sizes could overflow in a backend.
    usize::try_from(value)
        .ok()
        .filter(|value| *value <= usize::MAX >> 16)
        .ok_or_else(|| BackendError::invalid(format!("{name} is {value}: too large")))
}

/// Reads an optional tensor.
///
/// # Safety
/// `tensor` must be null or the host's, alive for `'a`.
unsafe fn optional<'a>(tensor: *const Tensor, name: &str) -> Result<Option<TensorView<'a>>> {
    if tensor.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller vouches for it.
    unsafe { TensorView::from_abi(tensor, name) }.map(Some)
}

/// Reads a batch.
///
/// # Safety
/// `batch` must be null or a host's struct, alive for `'a` with all it points to.
unsafe fn read_batch<'a>(batch: *const BatchV1) -> Result<BatchView<'a>> {
    // SAFETY: the caller vouches for it, here and below.
    unsafe {
        let abi = borrowed(batch, "the batch")?;
        Ok(BatchView {
            num_requests: size_from(abi.num_requests, "num_requests")?,
            num_blocks: size_from(abi.num_blocks, "num_blocks")?,
            max_query_len: size_from(abi.max_query_len, "max_query_len")?,
            max_seq_len: size_from(abi.max_seq_len, "max_seq_len")?,
            query_start_loc: TensorView::from_abi(abi.query_start_loc, "query_start_loc")?,
            seq_lens: TensorView::from_abi(abi.seq_lens, "seq_lens")?,
            block_table: optional(abi.block_table, "block_table")?,
            causality: match abi.causal {
                0 => Causality::NonCausal,
                1 => Causality::Causal,
                2 => Causality::PerRequest(TensorView::from_abi(abi.causal_per_request, "causal_per_request")?),
                other => return Err(BackendError::invalid(format!("causal is {other}; valid: 0, 1, 2"))),
            },
            prefix_spans: optional(abi.prefix_spans, "prefix_spans")?,
            encoder_seq_lens: optional(abi.encoder_seq_lens, "encoder_seq_lens")?,
            dcp: match abi.dcp_world_size {
                0 | 1 => None,
                world_size => Some(DcpView {
                    world_size,
                    rank: abi.dcp_rank,
                    local_seq_lens: TensorView::from_abi(abi.dcp_local_seq_lens, "dcp_local_seq_lens")?,
                }),
            },
        })
    }
}

unsafe extern "C" fn plan(
    layer: *mut c_void,
    batch: *const BatchV1,
    out: *mut *mut c_void,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle and struct, and a place to write to.
        unsafe {
            let (layer, batch) = (handle::<dyn Layer>(layer, "layer")?, read_batch(batch)?);
            give(layer.plan(&batch)?, out)
        }
    })
}

unsafe extern "C" fn update_plan(plan: *mut c_void, batch: *const BatchV1, error: *const ErrorSink) -> Status {
    guarded(error, || {
        if plan.is_null() {
            return Err(BackendError::invalid("the plan handle is null"));
        }
        // SAFETY: the host's handle, not used by anybody else meanwhile, and its struct.
        let (plan, batch) = unsafe { (&mut *plan.cast::<Box<dyn Plan>>(), read_batch(batch)?) };
        plan.update(&batch)
    })
}

unsafe extern "C" fn destroy_plan(plan: *mut c_void, error: *const ErrorSink) -> Status {
    guarded(error, || {
        // SAFETY: the host gives the handle back.
        unsafe { destroy_handle::<dyn Plan>(plan) };
        Ok(())
    })
}

/// Reads the context of a kernel call.
///
/// # Safety
/// `context` must be null or a host's struct, alive for `'a`; its services as long as the process.
unsafe fn read_context<'a>(context: *const ExecContextV1) -> Result<ExecContext<'a>> {
    // SAFETY: the caller vouches for it.
    unsafe {
        let abi = borrowed(context, "the context")?;
        let host = HostServices { table: borrowed(abi.host, "the host's services")? };
        Ok(ExecContext::new(abi, host))
    }
}

/// The cache of a call, to write.
///
/// # Safety
/// The slice must be readable for `'a` and its tensors not used by anybody else.
unsafe fn cache_mut<'a>(cache: AbiSlice<CacheTensor>) -> CacheViewMut<'a> {
    // SAFETY: the caller vouches for it.
    CacheViewMut { tensors: unsafe { cache.as_slice() }, taken: Cell::new(0) }
}

unsafe extern "C" fn write_kv(
    layer: *mut c_void,
    context: *const ExecContextV1,
    k: *const Tensor,
    v: *const Tensor,
    slot_mapping: *const Tensor,
    cache: AbiSlice<CacheTensor>,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle, structs and tensors, alive for the call.
        unsafe {
            let (layer, context) = (handle::<dyn Layer>(layer, "layer")?, read_context(context)?);
            let (k, v) = (TensorView::from_abi(k, "k")?, optional(v, "v")?);
            let slot_mapping = TensorView::from_abi(slot_mapping, "slot_mapping")?;
            layer.write_kv(&context, &k, v.as_ref(), &slot_mapping, &cache_mut(cache))
        }
    })
}

/// Reads the tensors of a forward call.
///
/// # Safety
/// `forward` must be null or a host's struct, alive for `'a` with all it points to.
unsafe fn read_forward<'a>(forward: *const ForwardV1) -> Result<ForwardArgs<'a>> {
    // SAFETY: the caller vouches for it.
    unsafe {
        let abi = borrowed(forward, "the forward call")?;
        Ok(ForwardArgs {
            q: TensorView::from_abi(abi.q, "q")?,
            k: optional(abi.k, "k")?,
            v: optional(abi.v, "v")?,
            cache: CacheView { tensors: abi.cache.as_slice() },
            any_plan: handle::<dyn Plan>(abi.plan, "plan")?,
            out: TensorViewMut::from_abi(abi.out, "out")?,
            lse: if abi.lse.is_null() { None } else { Some(TensorViewMut::from_abi(abi.lse, "lse")?) },
            topk_indices: optional(abi.topk_indices, "topk_indices")?,
        })
    }
}

macro_rules! forward_functions {
    ($($name:ident),*) => {
        $(unsafe extern "C" fn $name(
            layer: *mut c_void,
            context: *const ExecContextV1,
            forward: *const ForwardV1,
            error: *const ErrorSink,
        ) -> Status {
            guarded(error, || {
                // SAFETY: the host's handle, structs and tensors, alive for the call.
                unsafe {
                    let (layer, context) = (handle::<dyn Layer>(layer, "layer")?, read_context(context)?);
                    layer.$name(&context, read_forward(forward)?)
                }
            })
        })*
    };
}
forward_functions!(forward, forward_prefill, forward_decode);

unsafe extern "C" fn copy_blocks(
    layer: *mut c_void,
    context: *const ExecContextV1,
    cache: AbiSlice<CacheTensor>,
    pairs: *const Tensor,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle, structs and tensors, alive for the call.
        unsafe {
            let (layer, context) = (handle::<dyn Layer>(layer, "layer")?, read_context(context)?);
            layer.copy_blocks(&context, &cache_mut(cache), &TensorView::from_abi(pairs, "pairs")?)
        }
    })
}

unsafe extern "C" fn swap_blocks(
    layer: *mut c_void,
    context: *const ExecContextV1,
    source: AbiSlice<CacheTensor>,
    destination: AbiSlice<CacheTensor>,
    pairs: *const Tensor,
    error: *const ErrorSink,
) -> Status {
    guarded(error, || {
        // SAFETY: the host's handle, structs and tensors, alive for the call.
        unsafe {
            let (layer, context) = (handle::<dyn Layer>(layer, "layer")?, read_context(context)?);
            let source = CacheView { tensors: source.as_slice() };
            layer.swap_blocks(&context, &source, &cache_mut(destination), &TensorView::from_abi(pairs, "pairs")?)
        }
    })
}
