//! What CPU plugins share: the SDK's tensors as the kernels' rows, and paged caches in host memory.
//!
//! Must not know: attention, options, which plugin uses it.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod cache;
mod numbers;
mod views;

pub use cache::{CacheRows, Layout, block_pairs, element_type, slots};
pub use numbers::Number;
pub use views::{dense, lse, output, queries};

use attache_cpu_kernels::{CallError, Isa, IsaError};
use attache_sdk::{BackendError, ErrorCode, Result, core::descriptor::OptionSpec};

/// The option `isa`, of a plugin or of a layer.
#[must_use]
pub fn isa_option() -> OptionSpec {
    OptionSpec {
        description: "instruction set; auto = the best one here, or what ATTACHE_CPU_ISA says".to_owned(),
        default: Some("auto".to_owned()),
        choices: std::iter::once("auto").chain(Isa::ALL.map(Isa::name)).map(str::to_owned).collect(),
        ..OptionSpec::default()
    }
}

/// The instruction set that an option `isa` names.
///
/// # Errors
/// For an unknown name, and for one that this machine does not have.
pub fn isa(name: &str) -> Result<Isa> {
    let found = if name == "auto" { Isa::chosen() } else { Isa::named(name) };
    found.map_err(|error| match error {
        IsaError::Unknown { .. } => BackendError::invalid(format!("isa: {error} or auto")),
        IsaError::Missing { .. } => BackendError::unsupported(format!("isa: {error}")),
    })
}

/// A refused call of the kernels as the ABI's error.
#[must_use]
pub fn call_error(error: &CallError) -> BackendError {
    let code = match error {
        CallError::Mismatch { .. } => ErrorCode::InvalidArgument,
        CallError::Block { .. } => ErrorCode::OutOfRange,
        CallError::Workspace { .. } => ErrorCode::OutOfMemory,
        CallError::Pool { .. } => ErrorCode::Internal,
    };
    BackendError::new(code, error.to_string())
}

/// Workspace as f32 values.
///
/// # Errors
/// When it is not aligned to them.
pub fn as_f32(bytes: &mut [u8]) -> Result<&mut [f32]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(|error| {
        BackendError::new(ErrorCode::Internal, format!("the workspace cannot hold f32 values: {error}"))
    })
}
