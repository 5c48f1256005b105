//! Attaché's core: the backend ABI and the words that engines and plugins share; with the feature
//! `host`, also the selector, the registry and the loader.
//!
//! Data moves one way: request → candidates → verdicts → selection → loaded backend → layer → plan
//! → kernel. The selector never touches kernels, kernels never see policy, the loader knows neither.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod abi;
pub mod batch;
pub mod cache;
pub mod condition;
#[cfg(feature = "host")]
pub mod config;
pub mod descriptor;
pub mod device;
#[cfg(feature = "host")]
pub mod discovery;
pub mod dtype;
pub mod error;
pub mod kind;
pub mod kv_cache_dtype;
pub mod layer_config;
#[cfg(feature = "host")]
pub mod loader;
#[cfg(feature = "host")]
pub mod manifest;
#[cfg(feature = "host")]
pub mod plan;
pub mod plugin;
#[cfg(feature = "host")]
pub mod policy;
#[cfg(feature = "host")]
pub mod registry;
pub mod request;
#[cfg(feature = "host")]
pub mod runtime;
#[cfg(feature = "host")]
pub mod selector;
pub mod tensor;
#[cfg(feature = "host")]
pub mod verdict;

pub use batch::{BatchLimits, BatchView, Causality, DcpView, HostBatch, PrefixSpan};
pub use cache::{CacheTensorSpec, KvCacheSpec};
pub use condition::{Condition, NumberRule};
pub use descriptor::{BackendDescriptor, BlockSizes, Support};
pub use device::{Device, Platform};
pub use dtype::DataType;
pub use error::{BackendError, ErrorCode};
pub use kind::Kind;
pub use kv_cache_dtype::KvCacheDtype;
pub use layer_config::{LayerConfig, MlaConfig};
pub use plugin::{LinkedPlugin, PluginMetadata};
pub use request::{AttentionType, Dtype, LayerRequest, StateSpaceType};
pub use tensor::{Element, TensorView, TensorViewMut};

#[doc(hidden)]
pub mod private {
    //! For the SDK's macros only.
    pub use abi_stable;
    pub use inventory;
    pub use serde_json;
}
