//! The root module: what is read first from a loaded library. Frozen for good.
//!
//! It holds identity, the range of ABI generations, and ONE getter of interfaces. Each interface's
//! layout is checked on its own, so that a new one never makes an old plugin unloadable.

use super::types::{AbiStr, Status};
use abi_stable::{
    StableAbi, library::RootModule, package_version_strings, sabi_types::VersionStrings, type_layout::TypeLayout,
};
use core::ffi::c_void;

/// First ABI generation that this crate can speak.
pub const ABI_GENERATION_MIN: u32 = 1;
/// Newest ABI generation that this crate can speak.
pub const ABI_GENERATION_MAX: u32 = 1;

/// The section of a library that holds its [metadata](METADATA_MAGIC), readable without opening it.
pub const METADATA_SECTION: &str = ".attache";
/// What the metadata starts with; a little-endian u32 length and that many bytes of JSON follow.
pub const METADATA_MAGIC: &[u8; 8] = b"ATTACHE\x01";

/// An interface that a plugin hands out: a table, and the layout that it was compiled with.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct InterfaceHandle {
    /// `abi_stable`'s description of the table's type; null from a plugin that is not in Rust.
    #[sabi(unsafe_opaque_field)]
    pub layout: *const TypeLayout,
    /// The table; lives as long as the library.
    pub table: *const c_void,
}

impl InterfaceHandle {
    /// No interface.
    pub const NONE: Self = Self { layout: core::ptr::null(), table: core::ptr::null() };

    /// The handle of a table that lives for ever.
    #[must_use]
    pub fn of<T: StableAbi>(table: &'static T) -> Self {
        Self { layout: T::LAYOUT, table: core::ptr::from_ref(table).cast() }
    }
}

// SAFETY: both pointers refer to data that lives as long as the library and is never written.
unsafe impl Send for InterfaceHandle {}
// SAFETY: as above.
unsafe impl Sync for InterfaceHandle {}

/// The getter of interfaces: `NOT_FOUND` for an id or generation that the plugin does not have.
pub type InterfaceGetter = unsafe extern "C" fn(id: AbiStr, generation: u32, out: *mut InterfaceHandle) -> Status;

/// The root module.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginRootRef, prefix_fields = PluginRootPrefix)))]
#[sabi(missing_field(panic))]
pub struct PluginRoot {
    /// The plugin's metadata as JSON, the same text as in [`METADATA_SECTION`]; `'static`.
    pub metadata: AbiStr,
    /// Oldest ABI generation that the plugin speaks.
    pub generation_min: u32,
    /// Newest ABI generation that the plugin speaks.
    pub generation_max: u32,
    /// Hands out interfaces.
    #[sabi(last_prefix_field)]
    pub interface: unsafe extern "C" fn(id: AbiStr, generation: u32, out: *mut InterfaceHandle) -> Status,
}

impl RootModule for PluginRootRef {
    abi_stable::declare_root_module_statics! {PluginRootRef}
    const BASE_NAME: &'static str = "attache_plugin";
    const NAME: &'static str = "attache_plugin";
    const VERSION_STRINGS: VersionStrings = package_version_strings!();
}
