//! A plugin of a later release: it speaks generation 1 of `attache.backend`, which every host knows,
//! and a second generation with a new ability, the merge of two partial results.

use abi_stable::StableAbi;
use attache_core::abi::{AbiSlice, AbiStr, BACKEND_INTERFACE_ID, BackendInterfaceV1, InterfaceHandle, Status};
use attache_sdk::{
    prelude::*,
    private::{BackendEntry, PluginBackends, backend_table, entry, interface as generation_1},
};

/// The second generation: all of the first, and `merge`.
#[repr(C)]
#[derive(StableAbi)]
pub struct BackendInterfaceV2 {
    /// Bytes of this struct.
    pub size: usize,
    /// The first generation.
    pub v1: BackendInterfaceV1,
    /// Merges two partial results of one row: weights `exp(lse)`, normalised. `a` and `b` have one
    /// length; the merged row replaces `a`, and the merged LSE is returned through `a_lse`.
    pub merge: unsafe extern "C" fn(a: *mut f32, a_lse: *mut f32, b: AbiSlice<f32>, b_lse: f32) -> Status,
}

/// Merges two partial results; −∞ is an empty one.
pub fn merge(a: &mut [f32], a_lse: &mut f32, b: &[f32], b_lse: f32) {
    let max = a_lse.max(b_lse);
    if max == f32::NEG_INFINITY {
        return;
    }
    let (wa, wb) = ((*a_lse - max).exp(), (b_lse - max).exp());
    for (a, b) in a.iter_mut().zip(b) {
        *a = (*a * wa + b * wb) / (wa + wb);
    }
    *a_lse = max + (wa + wb).ln();
}

unsafe extern "C" fn merge_v2(a: *mut f32, a_lse: *mut f32, b: AbiSlice<f32>, b_lse: f32) -> Status {
    if a.is_null() || b.ptr.is_null() || a_lse.is_null() {
        return Status::INVALID_ARGUMENT;
    }
    // SAFETY: the caller lends all three for the call, and `a` is as long as `b`.
    unsafe {
        let b = std::slice::from_raw_parts(b.ptr, b.len);
        merge(std::slice::from_raw_parts_mut(a, b.len()), &mut *a_lse, b, b_lse);
    }
    Status::OK
}

/// The plugin's backend.
pub struct Newer;

impl Backend for Newer {
    fn descriptor() -> BackendDescriptor {
        attache_fixture_null::descriptor("NEWER")
    }
    fn create(_host: HostServices, _options: &Options) -> Result<Self> {
        Ok(Self)
    }
    fn probe(&self) -> Result<Vec<Device>> {
        Ok(vec![Device::host_cpu()])
    }
    fn validate(&self, _request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
    fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
        attache_fixture_null::kv_cache_spec(config)
    }
    fn create_layer(&self, _config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
        Ok(Box::new(attache_fixture_null::NullLayer))
    }
}

struct Exported;

impl PluginBackends for Exported {
    const ENTRIES: &'static [BackendEntry] = &[entry::<Newer>()];
    const IS_LIBRARY: bool = cfg!(feature = "dylib");
}

static TABLE: BackendInterfaceV2 =
    BackendInterfaceV2 { size: size_of::<BackendInterfaceV2>(), v1: backend_table::<Exported>(), merge: merge_v2 };

/// Hands out both generations.
///
/// # Safety
/// `id` must be readable and `out` writable.
pub unsafe extern "C" fn interface(id: AbiStr, generation: u32, out: *mut InterfaceHandle) -> Status {
    // SAFETY: the caller lends the text.
    if generation == 2 && unsafe { id.as_str() } == Some(BACKEND_INTERFACE_ID) {
        // SAFETY: the caller gives a place to write to.
        unsafe { out.write(InterfaceHandle::of(&TABLE)) };
        return Status::OK;
    }
    // SAFETY: handed on as they came.
    unsafe { generation_1::<Exported>(id, generation, out) }
}

attache_sdk::export_root! { name: "newer", vendor: "Attaché tests", interface: interface }
