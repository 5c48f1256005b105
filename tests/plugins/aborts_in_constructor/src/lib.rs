//! `ABORTS`: a static constructor runs inside `dlopen`, before any check of the host, and ends the
//! process. What is refused by version, policy or selection must therefore never be opened.

use attache_sdk::prelude::*;

#[cfg(feature = "dylib")]
extern "C" fn constructor() {
    std::process::abort();
}

#[cfg(feature = "dylib")]
#[used]
// SAFETY: the section holds pointers to functions of this type.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

/// Refuses every layer.
pub struct Refuses;

impl Backend for Refuses {
    fn descriptor() -> BackendDescriptor {
        attache_fixture_null::descriptor("ABORTS")
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
        Err(BackendError::unsupported("this backend refuses everything"))
    }
}

attache_sdk::export_backends! { name: "aborts", vendor: "Attaché tests", backends: [Refuses] }
