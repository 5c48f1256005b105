//! What the engine offers a plugin: its thread pool, memory and trace sink.

use super::types::{AbiSlice, AbiStr, Attribute, Extension, Status};
use abi_stable::StableAbi;
use core::ffi::c_void;

/// The body of a `parallel_for`.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct ParallelBody {
    /// Handed back to `run`.
    pub context: *mut c_void,
    /// Called once for each index below the count. `worker` is below `parallelism`, and no two
    /// calls that overlap in time share it. Returns 0, or 1 to say that the task failed (the body
    /// keeps the reason itself). Never unwinds.
    pub run: unsafe extern "C" fn(context: *mut c_void, task: usize, worker: usize) -> i32,
}

/// Levels of a trace event.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, StableAbi)]
pub struct TraceLevel(pub u32);

impl TraceLevel {
    /// `tracing::Level::ERROR`.
    pub const ERROR: Self = Self(1);
    /// `tracing::Level::WARN`.
    pub const WARN: Self = Self(2);
    /// `tracing::Level::INFO`.
    pub const INFO: Self = Self(3);
    /// `tracing::Level::DEBUG`.
    pub const DEBUG: Self = Self(4);
    /// `tracing::Level::TRACE`.
    pub const TRACE: Self = Self(5);
}

/// Identifier of the services below.
pub const HOST_SERVICES_ID: &str = "attache.host_services";
/// Generation of [`HostServicesV1`].
pub const HOST_SERVICES_GENERATION: u32 = 1;

/// The engine's services. The table and its context live as long as the process: a plugin's thread
/// may log after the engine is gone. All functions may be called from any thread.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct HostServicesV1 {
    /// Bytes of this struct.
    pub size: usize,
    /// Additions of a newer host, or null.
    pub extensions: *const Extension,
    /// Handed back to every function.
    pub context: *mut c_void,
    /// Workers of the engine's pool; at least 1.
    pub parallelism: unsafe extern "C" fn(context: *mut c_void) -> usize,
    /// Runs `body` for each of `tasks` indices on the engine's pool and returns when all are done.
    /// Not to be nested. `INTERNAL` when a task returned non-zero.
    pub parallel_for: unsafe extern "C" fn(context: *mut c_void, tasks: usize, body: ParallelBody) -> Status,
    /// Host memory that outlives a call; null when there is none. Freed by `free` only.
    pub allocate: unsafe extern "C" fn(context: *mut c_void, bytes: usize, alignment: usize) -> *mut u8,
    /// Gives back what `allocate` gave, with the same size and alignment.
    pub free: unsafe extern "C" fn(context: *mut c_void, pointer: *mut u8, bytes: usize, alignment: usize),
    /// 1 when somebody listens to events of this level and target.
    pub trace_enabled: unsafe extern "C" fn(context: *mut c_void, level: TraceLevel, target: AbiStr) -> u8,
    /// Hands an event, with its fields, to the engine's `tracing` subscriber.
    pub trace: unsafe extern "C" fn(
        context: *mut c_void,
        level: TraceLevel,
        target: AbiStr,
        message: AbiStr,
        fields: AbiSlice<Attribute>,
    ),
    /// A further service by name and generation, or null when this host does not have it.
    pub service: unsafe extern "C" fn(context: *mut c_void, id: AbiStr, generation: u32) -> *const c_void,
}

// SAFETY: a table is functions and a context that its maker made usable from any thread.
unsafe impl Send for HostServicesV1 {}
// SAFETY: as above.
unsafe impl Sync for HostServicesV1 {}
