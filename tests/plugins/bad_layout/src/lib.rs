//! A plugin whose `attache.backend` is another struct than the host's: as if a field had changed its
//! type without a new generation.

use abi_stable::StableAbi;
use attache_core::abi::{AbiStr, BACKEND_INTERFACE_ID, InterfaceHandle, Status};

/// Starts as the real one does and goes on otherwise.
#[repr(C)]
#[derive(StableAbi)]
pub struct OtherTable {
    /// Bytes of the struct, as the host expects them.
    pub size: usize,
    /// What the real table does not have.
    pub surprise: u64,
}

static TABLE: OtherTable = OtherTable { size: size_of::<attache_core::abi::BackendInterfaceV1>(), surprise: 17 };

/// Hands out the wrong table.
///
/// # Safety
/// `id` must be readable and `out` writable.
pub unsafe extern "C" fn interface(id: AbiStr, _generation: u32, out: *mut InterfaceHandle) -> Status {
    // SAFETY: the caller lends the text.
    if unsafe { id.as_str() } != Some(BACKEND_INTERFACE_ID) {
        return Status::NOT_FOUND;
    }
    // SAFETY: the caller gives a place to write to.
    unsafe { out.write(InterfaceHandle::of(&TABLE)) };
    Status::OK
}

attache_sdk::export_root! { name: "bad_layout", vendor: "Attaché tests", interface: interface }
