//! A backend that a plugin made.

use super::{
    calls::{Attributes, attribute_lists, cache_specs, call, texts},
    layer::Layer,
    services::HostServices,
};
use crate::{
    abi::{AbiSlice, AbiStr, BackendInterfaceV1, LayerConfigV1, Tensor},
    cache::KvCacheSpec,
    descriptor::BackendDescriptor,
    device::Device,
    error::{BackendError, ErrorCode, Result},
    layer_config::LayerConfig,
    plugin::PluginMetadata,
    request::LayerRequest,
};
use std::{ffi::c_void, sync::Arc};

/// The descriptors of a plugin's backends, in the plugin's order.
///
/// # Errors
/// When the plugin fails, or its text is not a descriptor.
pub fn descriptors(table: &'static BackendInterfaceV1) -> Result<Vec<BackendDescriptor>> {
    // SAFETY: the table's layout was checked and its library stays loaded.
    let count = unsafe { (table.backend_count)() };
    let mut found = Vec::new();
    for index in 0..count {
        let parts = texts("descriptor", |sink, error| {
            // SAFETY: both sinks live for the call.
            unsafe { (table.descriptor)(index, sink, error) }
        })?;
        let descriptor = serde_json::from_str(&parts.concat()).map_err(|error| {
            BackendError::new(ErrorCode::Internal, format!("the descriptor of backend {index} cannot be read: {error}"))
        })?;
        found.push(descriptor);
    }
    Ok(found)
}

/// A backend: makes layers. Usable from several threads at once.
pub struct Backend {
    table: &'static BackendInterfaceV1,
    handle: *mut c_void,
    descriptor: Arc<BackendDescriptor>,
    plugin: PluginMetadata,
    source: String,
}

// SAFETY: the ABI requires backends to be usable from several threads at once.
unsafe impl Send for Backend {}
// SAFETY: as above.
unsafe impl Sync for Backend {}

impl Backend {
    /// Makes backend `index` of a plugin. `source` says where the plugin comes from, for people.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn create(
        table: &'static BackendInterfaceV1,
        index: usize,
        descriptor: Arc<BackendDescriptor>,
        plugin: PluginMetadata,
        source: String,
        options: &[(String, String)],
    ) -> Result<Arc<Self>> {
        let options = Attributes::new(options);
        let mut handle = std::ptr::null_mut();
        call("create", |error| {
            // SAFETY: every pointer lives for the call; the services live as long as the process.
            unsafe { (table.create)(index, HostServices::inline().table(), options.as_abi(), &raw mut handle, error) }
        })?;
        if handle.is_null() {
            return Err(BackendError::new(ErrorCode::Internal, "create gave no backend"));
        }
        Ok(Arc::new(Self { table, handle, descriptor, plugin, source }))
    }

    /// The backend's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.descriptor.name
    }

    /// What it can do.
    #[must_use]
    pub fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }

    /// The plugin that it is from.
    #[must_use]
    pub fn plugin(&self) -> &PluginMetadata {
        &self.plugin
    }

    /// Where the plugin comes from: `linked in`, or a file.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    pub(super) fn table(&self) -> &'static BackendInterfaceV1 {
        self.table
    }

    /// The devices that it can use here.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn probe(&self) -> Result<Vec<Device>> {
        attribute_lists("probe", |sink, error| {
            // SAFETY: the handle is ours, the sinks live for the call.
            unsafe { (self.table.probe)(self.handle, sink, error) }
        })?
        .iter()
        .map(|facts| {
            Device::from_attributes(facts.iter().map(|(key, value)| (key.as_str(), value.as_str()))).map_err(|error| {
                BackendError::new(ErrorCode::Internal, format!("probe gave a device that cannot be read: {error}"))
            })
        })
        .collect()
    }

    /// Why it cannot serve the request on the device, beyond its descriptor; empty = it can.
    ///
    /// # Errors
    /// What the plugin reports.
    pub fn validate(&self, request: &LayerRequest, device: &Device) -> Result<Vec<String>> {
        let (request, device) = (request.to_attributes(), device.to_attributes());
        let (request, device) = (Attributes::new(&request), Attributes::new(&device));
        texts("validate", |sink, error| {
            // SAFETY: the handle is ours, everything else lives for the call.
            unsafe { (self.table.validate)(self.handle, request.as_abi(), device.as_abi(), sink, error) }
        })
    }

    /// The tensors of a layer's cache.
    ///
    /// # Errors
    /// When the configuration is not valid, or the plugin refuses it.
    pub fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
        with_config(config, |config| {
            cache_specs("kv_cache_spec", |sink, error| {
                // SAFETY: the handle is ours, everything else lives for the call.
                unsafe { (self.table.kv_cache_spec)(self.handle, config, sink, error) }
            })
        })
        .map(|tensors| KvCacheSpec { tensors })
    }

    /// Makes a layer.
    ///
    /// # Errors
    /// When the configuration is not valid, or the plugin refuses it.
    pub fn create_layer(self: &Arc<Self>, config: &LayerConfig<'_>) -> Result<Layer> {
        let mut handle = std::ptr::null_mut();
        with_config(config, |config| {
            call("create_layer", |error| {
                // SAFETY: the handle is ours, everything else lives for the call.
                unsafe { (self.table.create_layer)(self.handle, config, &raw mut handle, error) }
            })
        })?;
        if handle.is_null() {
            return Err(BackendError::new(ErrorCode::Internal, "create_layer gave no layer"));
        }
        Ok(Layer::new(Arc::clone(self), handle))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: layers hold an `Arc` of the backend, so none is left; the handle is not used again.
        let destroyed = call("destroy", |error| unsafe { (self.table.destroy)(self.handle, error) });
        if let Err(error) = destroyed {
            tracing::warn!(backend = self.name(), %error, "destroying a backend failed");
        }
    }
}

impl std::fmt::Debug for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backend").field("name", &self.name()).field("source", &self.source).finish_non_exhaustive()
    }
}

/// Checks a configuration and lends it to `function` as it crosses the ABI.
fn with_config<T>(config: &LayerConfig<'_>, function: impl FnOnce(*const LayerConfigV1) -> Result<T>) -> Result<T> {
    config.check()?;
    let request = config.request.to_attributes();
    let (request, options) = (Attributes::new(&request), Attributes::new(&config.options));
    let mla = config.mla.as_ref();
    let projection: Option<Tensor> = mla.and_then(|mla| mla.kv_b_proj.as_ref()).map(|tensor| tensor.to_abi());
    let abi = LayerConfigV1 {
        size: size_of::<LayerConfigV1>(),
        extensions: std::ptr::null(),
        request: request.as_abi(),
        options: options.as_abi(),
        name: AbiStr::new(&config.name),
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_size: config.head_size,
        head_size_v: config.head_size_v,
        dtype: config.dtype.data_type().to_dl(),
        kv_cache_dtype: AbiStr::new(config.kv_cache_dtype.name()),
        layout: AbiStr::new(&config.layout),
        block_size: config.block_size,
        attn_type: AbiStr::new(config.attn_type.name()),
        scale: config.scale,
        softcap: config.softcap,
        sliding_window: config.sliding_window,
        window_right: config.window_right,
        chunked_local: config.chunked_local,
        sinks: AbiSlice::new(&config.sinks),
        alibi_slopes: AbiSlice::new(&config.alibi_slopes),
        k_scales: AbiSlice::new(&config.k_scales),
        v_scales: AbiSlice::new(&config.v_scales),
        kv_lora_rank: mla.map_or(0, |mla| mla.kv_lora_rank),
        qk_nope_head_dim: mla.map_or(0, |mla| mla.qk_nope_head_dim),
        qk_rope_head_dim: mla.map_or(0, |mla| mla.qk_rope_head_dim),
        v_head_dim: mla.map_or(0, |mla| mla.v_head_dim),
        kv_b_proj: projection.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
    };
    function(&raw const abi)
}
