//! The engine's side of the ABI: safe handles of what a plugin made.
//!
//! Owns the translation between Rust values and the tables of [`crate::abi`], and the lifetimes of
//! handles. Must not know: selection policy, files, kernels.

mod backend;
mod calls;
pub mod interface;
mod kv_cache;
mod layer;
pub mod pool;
mod services;
mod trace;

pub use backend::{Backend, descriptors};
pub use interface::InterfaceError;
pub use kv_cache::{KvCache, KvCacheError};
pub use layer::{Forward, Layer, Plan};
pub use pool::{InlinePool, ThreadPool};
pub use services::{ExecContext, HostServices};
