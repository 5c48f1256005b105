//! What crosses the boundary between an engine and a plugin, and nothing else.
//!
//! Everything here is plain `#[repr(C)]`: function tables and data structs with their size first
//! and an extension chain, primitives, and pointer + length. No Rust enum, no `String`, no trait
//! object crosses. `abi_stable` guards the layouts; the calls themselves use nothing of it, so a C
//! header is a translation of this module. No field is ever appended: a new ability is a new
//! interface or a new generation of one (see `docs/architecture.md`).
//!
//! Must not know: selection policy, files, kernels.

pub mod backend;
pub mod host;
pub mod root;
pub mod types;

pub use backend::*;
pub use host::*;
pub use root::*;
pub use types::*;
