//! Getting a typed interface out of a plugin, with its layout checked.

use crate::abi::{
    AbiStr, BACKEND_INTERFACE_GENERATION, BACKEND_INTERFACE_ID, BackendInterfaceV1, InterfaceGetter, InterfaceHandle,
    Status,
};
use abi_stable::{StableAbi, abi_stability::abi_checking::check_layout_compatibility};

/// Why a plugin's interface cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InterfaceError {
    /// The plugin does not have it.
    #[error("the plugin does not offer the interface {id} in generation {generation}")]
    Absent {
        /// The interface.
        id: String,
        /// The generation.
        generation: u32,
    },
    /// The plugin was compiled with another definition of the interface.
    #[error(
        "the plugin's interface {id}/{generation} has another layout than this host's; rebuild the plugin with the SDK of this ABI generation"
    )]
    Layout {
        /// The interface.
        id: String,
        /// The generation.
        generation: u32,
        /// The layout checker's own words; long.
        detail: String,
    },
    /// A table that says it is smaller or larger than its type.
    #[error("the plugin's interface {id}/{generation} says its size is {found} bytes; this host expects {expected}")]
    Size {
        /// The interface.
        id: String,
        /// The generation.
        generation: u32,
        /// Size by this host's definition.
        expected: usize,
        /// Size by the plugin's word.
        found: usize,
    },
    /// The getter failed in another way, or gave a null table.
    #[error("the plugin failed to hand out the interface {id}/{generation} (status {status})")]
    Failed {
        /// The interface.
        id: String,
        /// The generation.
        generation: u32,
        /// The code that it returned.
        status: i32,
    },
}

/// Asks a plugin for an interface and checks its layout.
///
/// # Safety
/// `get` must be the getter of a plugin that stays loaded for the life of the process, and `T`
/// must begin with its size as `usize`.
///
/// # Errors
/// When the plugin does not have it, or has another layout.
pub unsafe fn interface<T: StableAbi>(
    get: InterfaceGetter,
    id: &str,
    generation: u32,
) -> Result<&'static T, InterfaceError> {
    let mut handle = InterfaceHandle::NONE;
    // SAFETY: the getter is the plugin's, and both pointers are valid for the call.
    let status = unsafe { get(AbiStr::new(id), generation, &raw mut handle) };
    let id = id.to_owned();
    match status {
        Status::OK if !handle.table.is_null() => {}
        Status::NOT_FOUND => return Err(InterfaceError::Absent { id, generation }),
        Status(status) => return Err(InterfaceError::Failed { id, generation, status }),
    }
    if !handle.layout.is_null() {
        // SAFETY: a non-null layout is `abi_stable`'s, of a library that stays loaded.
        let layout = unsafe { &*handle.layout };
        check_layout_compatibility(T::LAYOUT, layout).map_err(|errors| InterfaceError::Layout {
            id: id.clone(),
            generation,
            detail: errors.to_string(),
        })?;
    }
    // SAFETY: every table starts with its size.
    let found = unsafe { *handle.table.cast::<usize>() };
    let expected = size_of::<T>();
    if found != expected {
        return Err(InterfaceError::Size { id, generation, expected, found });
    }
    // SAFETY: the layout or, from a plugin in another language, the size was checked; the table
    // lives as long as the library.
    Ok(unsafe { &*handle.table.cast::<T>() })
}

/// Asks a plugin for the newest generation of `attache.backend` that this host knows.
///
/// # Errors
/// As [`interface`].
pub fn backend_interface(get: InterfaceGetter) -> Result<&'static BackendInterfaceV1, InterfaceError> {
    // SAFETY: getters come from linked-in plugins or from the loader, which never unloads.
    unsafe { interface(get, BACKEND_INTERFACE_ID, BACKEND_INTERFACE_GENERATION) }
}
