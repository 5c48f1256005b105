//! The engine's services, as a plugin sees them.

use crate::guard::panic_text;
use attache_core::{
    BackendError, ErrorCode,
    abi::{AbiStr, ExecContextV1, HostServicesV1, ParallelBody, Status},
    error::Result,
};
use std::{
    cell::Cell,
    ffi::c_void,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
};

/// The engine's services: its thread pool and memory. They live as long as the process.
#[derive(Clone, Copy)]
pub struct HostServices {
    pub(crate) table: &'static HostServicesV1,
}

struct Body<'a> {
    function: &'a (dyn Fn(usize, usize) -> Result<()> + Sync),
    first_error: Mutex<Option<BackendError>>,
}

unsafe extern "C" fn run_task(context: *mut c_void, task: usize, worker: usize) -> i32 {
    // SAFETY: `parallel_for` below lends its `Body` until all tasks are done.
    let body = unsafe { &*context.cast::<Body<'_>>() };
    let error = match catch_unwind(AssertUnwindSafe(|| (body.function)(task, worker))) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(payload) => {
            let error =
                BackendError::new(ErrorCode::Panic, format!("panicked in task {task}: {}", panic_text(&*payload)));
            // Dropping a payload may panic too; that must not cross either.
            if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                std::mem::forget(second);
            }
            error
        }
    };
    body.first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    1
}

impl HostServices {
    /// Workers of the engine's pool.
    #[must_use]
    pub fn parallelism(&self) -> usize {
        // SAFETY: the table is the host's and lives as long as the process.
        unsafe { (self.table.parallelism)(self.table.context) }.max(1)
    }

    /// Calls `function(task, worker)` once for each task below `tasks`, on the engine's pool, and
    /// returns when all are done. Calls that overlap in time never share `worker`. Not to be nested.
    ///
    /// # Errors
    /// The first error of a task; a panic of a task becomes [`ErrorCode::Panic`].
    pub fn parallel_for(&self, tasks: usize, function: impl Fn(usize, usize) -> Result<()> + Sync) -> Result<()> {
        let body = Body { function: &function, first_error: Mutex::new(None) };
        let abi = ParallelBody { context: std::ptr::from_ref(&body).cast_mut().cast(), run: run_task };
        // SAFETY: the host returns only when no task runs any more, so `body` outlives its use.
        let status = unsafe { (self.table.parallel_for)(self.table.context, tasks, abi) };
        match (body.first_error.into_inner().unwrap_or_else(PoisonError::into_inner), status) {
            (Some(error), _) => Err(error),
            (None, Status::OK) => Ok(()),
            (None, status) => Err(BackendError::new(
                ErrorCode::from_status(status),
                "the engine's thread pool failed to run the tasks",
            )),
        }
    }

    /// A further service of the host, or `None` where this host does not have it.
    #[must_use]
    pub fn service(&self, id: &str, generation: u32) -> Option<*const c_void> {
        // SAFETY: the table is the host's and lives as long as the process.
        let pointer = unsafe { (self.table.service)(self.table.context, AbiStr::new(id), generation) };
        (!pointer.is_null()).then_some(pointer)
    }
}

impl std::fmt::Debug for HostServices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostServices").finish_non_exhaustive()
    }
}

/// What a kernel call runs in.
pub struct ExecContext<'a> {
    host: HostServices,
    stream: *mut c_void,
    workspace: Cell<(*mut u8, usize)>,
    lifetime: PhantomData<&'a mut [u8]>,
}

impl<'a> ExecContext<'a> {
    pub(crate) fn new(abi: &'a ExecContextV1, host: HostServices) -> Self {
        let workspace =
            if abi.workspace.is_null() { (std::ptr::null_mut(), 0) } else { (abi.workspace, abi.workspace_bytes) };
        Self { host, stream: abi.stream, workspace: Cell::new(workspace), lifetime: PhantomData }
    }

    /// The engine's services.
    #[must_use]
    pub fn host(&self) -> HostServices {
        self.host
    }

    /// The engine's stream; null on the CPU.
    #[must_use]
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }

    /// Takes the first `bytes` of what is left of the workspace, aligned to 64 bytes. Its contents
    /// are undefined.
    ///
    /// # Errors
    /// When the engine gave less than `workspace_size` asked for.
    pub fn take_workspace(&self, bytes: usize) -> Result<&'a mut [u8]> {
        let (pointer, len) = self.workspace.get();
        let bytes = bytes.next_multiple_of(64);
        let padding = pointer.align_offset(64);
        if bytes == 0 {
            return Ok(&mut []);
        }
        if pointer.is_null() || padding.checked_add(bytes).is_none_or(|needed| needed > len) {
            return Err(BackendError::new(
                ErrorCode::OutOfMemory,
                format!(
                    "the workspace has {len} bytes left; this call needs {bytes}: ask workspace_size and reserve that much"
                ),
            ));
        }
        // SAFETY: `padding + bytes` fits in what is left, and nobody else has it: it is cut off here.
        let slice = unsafe { std::slice::from_raw_parts_mut(pointer.add(padding), bytes) };
        self.workspace.set((pointer.wrapping_add(padding + bytes), len - padding - bytes));
        Ok(slice)
    }

    /// As [`HostServices::parallel_for`].
    ///
    /// # Errors
    /// As [`HostServices::parallel_for`].
    pub fn parallel_for(&self, tasks: usize, function: impl Fn(usize, usize) -> Result<()> + Sync) -> Result<()> {
        self.host.parallel_for(tasks, function)
    }

    /// As [`HostServices::parallelism`].
    #[must_use]
    pub fn parallelism(&self) -> usize {
        self.host.parallelism()
    }
}
