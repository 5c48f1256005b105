//! What a plugin author uses: implement [`Backend`] and [`Layer`], write one [`export_backends!`]
//! line, and the plugin can be linked in or loaded as a library.
//!
//! ```
//! use attache_sdk::prelude::*;
//!
//! struct Refuses;
//!
//! impl Backend for Refuses {
//!     fn descriptor() -> BackendDescriptor {
//!         BackendDescriptor::builder("REFUSES").platform("cpu").build()
//!     }
//!     fn create(_host: HostServices, _options: &Options) -> Result<Self> {
//!         Ok(Self)
//!     }
//!     fn probe(&self) -> Result<Vec<Device>> {
//!         Ok(vec![Device::host_cpu()])
//!     }
//!     fn validate(&self, _request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
//!         Ok(vec!["this backend refuses everything".to_owned()])
//!     }
//!     fn kv_cache_spec(&self, _config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
//!         Ok(KvCacheSpec::default())
//!     }
//!     fn create_layer(&self, _config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
//!         Err(BackendError::unsupported("this backend refuses everything"))
//!     }
//! }
//!
//! attache_sdk::export_backends! { name: "refuses", vendor: "Example", backends: [Refuses] }
//! # fn main() {}
//! ```
//!
//! No panic leaves a plugin: every function of the table, destruction included, and every body of a
//! `parallel_for` is guarded here. A plugin built with `panic = "abort"` loses that guard.
#![deny(unsafe_op_in_unsafe_fn)]

mod adapter;
mod context;
mod export;
mod guard;
mod trace;
mod traits;

pub use attache_core as core;
pub use attache_core::{
    AttentionType, BackendError, BatchLimits, BatchView, CacheTensorSpec, Causality, DataType, DcpView, Device, Dtype,
    Element, ErrorCode, HostBatch, Kind, KvCacheDtype, KvCacheSpec, LayerConfig, LayerRequest, MlaConfig, PrefixSpan,
    TensorView, TensorViewMut,
    abi::TensorRole,
    cache::{LAYOUT_HEAD_MAJOR, LAYOUT_LATENT, LAYOUT_TOKEN_MAJOR},
    descriptor::BackendDescriptor,
    error::Result,
};
pub use context::{ExecContext, HostServices};
pub use traits::{Backend, CacheView, CacheViewMut, ForwardArgs, Layer, Options, Plan};

/// Everything that a plugin usually needs.
pub mod prelude {
    pub use crate::{
        AttentionType, Backend, BackendDescriptor, BackendError, BatchLimits, BatchView, CacheTensorSpec, CacheView,
        CacheViewMut, DataType, Device, Dtype, ErrorCode, ExecContext, ForwardArgs, HostBatch, HostServices, Kind,
        KvCacheDtype, KvCacheSpec, LAYOUT_HEAD_MAJOR, LAYOUT_LATENT, LAYOUT_TOKEN_MAJOR, Layer, LayerConfig,
        LayerRequest, MlaConfig, Options, Plan, Result, TensorRole, TensorView, TensorViewMut,
    };
}

#[doc(hidden)]
pub mod private {
    //! For [`export_backends!`](crate::export_backends) only.
    pub use crate::{
        adapter::{BackendEntry, PluginBackends, backend_table, entry, interface},
        export::{metadata_json, metadata_json_len, metadata_section, root},
    };
    pub use attache_core::{
        LinkedPlugin,
        abi::PluginRootRef,
        private::{abi_stable, inventory},
    };
}

/// The example of docs/vendors.md, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/vendors.md")]
struct VendorsDocument;
