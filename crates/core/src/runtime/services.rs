//! The engine's services as a plugin calls them, and the context of a kernel call.

use super::{
    pool::{InlinePool, ThreadPool},
    trace,
};
use crate::abi::{AbiSlice, AbiStr, Attribute, ExecContextV1, HostServicesV1, ParallelBody, Status, TraceLevel};
use std::{
    alloc::Layout,
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
};

struct Context {
    pool: Arc<dyn ThreadPool>,
}

/// The engine's services. The table lives as long as the process, so that a plugin's thread may log
/// after the engine is gone; making one is therefore for start-up, not for every call.
#[derive(Clone, Copy)]
pub struct HostServices {
    table: &'static HostServicesV1,
}

static DEFAULT: LazyLock<HostServices> = LazyLock::new(|| HostServices::new(Arc::new(InlinePool)));

impl HostServices {
    /// Services on an engine's pool.
    #[must_use]
    pub fn new(pool: Arc<dyn ThreadPool>) -> Self {
        let context: &'static Context = Box::leak(Box::new(Context { pool }));
        let table = Box::leak(Box::new(HostServicesV1 {
            size: size_of::<HostServicesV1>(),
            extensions: std::ptr::null(),
            context: std::ptr::from_ref(context).cast_mut().cast(),
            parallelism,
            parallel_for,
            allocate,
            free,
            trace_enabled,
            trace: trace_event,
            service,
        }));
        Self { table }
    }

    /// Services on the calling thread: what a backend gets when it is created.
    #[must_use]
    pub fn inline() -> Self {
        *DEFAULT
    }

    /// Threads of the engine's pool.
    #[must_use]
    pub fn parallelism(self) -> usize {
        // SAFETY: the table and its context live as long as the process.
        unsafe { (self.table.parallelism)(self.table.context) }
    }

    pub(super) fn table(self) -> &'static HostServicesV1 {
        self.table
    }
}

impl std::fmt::Debug for HostServices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostServices").finish_non_exhaustive()
    }
}

/// The context behind a table made by [`HostServices::new`].
///
/// # Safety
/// `context` must be such a table's.
unsafe fn context<'a>(context: *mut c_void) -> &'a Context {
    // SAFETY: leaked by `HostServices::new`, never freed.
    unsafe { &*context.cast::<Context>() }
}

// A panic in the engine's code must not cross into the plugin: every function below is guarded.

unsafe extern "C" fn parallelism(pointer: *mut c_void) -> usize {
    // SAFETY: the table's own context.
    let context = unsafe { context(pointer) };
    catch_unwind(AssertUnwindSafe(|| context.pool.parallelism().max(1))).unwrap_or(1)
}

/// The body as the pool calls it: it may be called from any of its threads.
struct SharedBody(ParallelBody);
// SAFETY: the plugin's body is made for calls from any thread, see `HostServicesV1::parallel_for`.
unsafe impl Sync for SharedBody {}

impl SharedBody {
    fn run(&self, task: usize, worker: usize) -> i32 {
        // SAFETY: the plugin keeps the body alive until `parallel_for` returns.
        unsafe { (self.0.run)(self.0.context, task, worker) }
    }
}

unsafe extern "C" fn parallel_for(pointer: *mut c_void, tasks: usize, body: ParallelBody) -> Status {
    // SAFETY: the table's own context.
    let context = unsafe { context(pointer) };
    let failed = AtomicBool::new(false);
    let body = SharedBody(body);
    let run = |task: usize, worker: usize| {
        if body.run(task, worker) != 0 {
            failed.store(true, Ordering::Relaxed);
        }
    };
    let ran = catch_unwind(AssertUnwindSafe(|| context.pool.parallel_for(tasks, &run)));
    if ran.is_err() || failed.load(Ordering::Relaxed) { Status::INTERNAL } else { Status::OK }
}

unsafe extern "C" fn allocate(_context: *mut c_void, bytes: usize, alignment: usize) -> *mut u8 {
    match Layout::from_size_align(bytes, alignment.max(1)) {
        // SAFETY: the layout is not empty.
        Ok(layout) if bytes > 0 => unsafe { std::alloc::alloc(layout) },
        _ => std::ptr::null_mut(),
    }
}

unsafe extern "C" fn free(_context: *mut c_void, pointer: *mut u8, bytes: usize, alignment: usize) {
    if pointer.is_null() || bytes == 0 {
        return;
    }
    if let Ok(layout) = Layout::from_size_align(bytes, alignment.max(1)) {
        // SAFETY: by the ABI's contract `allocate` gave the pointer for this layout.
        unsafe { std::alloc::dealloc(pointer, layout) };
    }
}

unsafe extern "C" fn trace_enabled(_context: *mut c_void, level: TraceLevel, target: AbiStr) -> u8 {
    catch_unwind(|| {
        // SAFETY: the plugin lends the text for the call.
        let target = unsafe { target.to_string_lossy() };
        u8::from(trace::enabled(level, &target))
    })
    .unwrap_or(0)
}

unsafe extern "C" fn trace_event(
    _context: *mut c_void,
    level: TraceLevel,
    target: AbiStr,
    message: AbiStr,
    fields: AbiSlice<Attribute>,
) {
    let outcome = catch_unwind(|| {
        // SAFETY: the plugin lends the texts and the fields for the call.
        let (target, message, fields) =
            unsafe { (target.to_string_lossy(), message.to_string_lossy(), fields.as_slice()) };
        let fields: Vec<(String, String)> = fields
            .iter()
            // SAFETY: as above.
            .map(|field| unsafe { (field.key.to_string_lossy(), field.value.to_string_lossy()) })
            .collect();
        trace::emit(level, &target, &message, &fields);
    });
    // A subscriber that panics loses the event; the plugin's work goes on.
    drop(outcome);
}

unsafe extern "C" fn service(_context: *mut c_void, _id: AbiStr, _generation: u32) -> *const c_void {
    // This host has no further services: absent.
    std::ptr::null()
}

/// What kernel calls run in: the engine's services, a workspace and a stream. One per thread that
/// makes calls.
pub struct ExecContext {
    host: HostServices,
    workspace: Vec<Line>,
    stream: *mut c_void,
}

/// A cache line, so that the workspace is aligned.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

// SAFETY: the stream is an opaque handle that the engine made usable from its threads.
unsafe impl Send for ExecContext {}

impl ExecContext {
    /// A context without workspace and stream.
    #[must_use]
    pub fn new(host: HostServices) -> Self {
        Self { host, workspace: Vec::new(), stream: std::ptr::null_mut() }
    }

    /// Makes the workspace at least `bytes` large. Its contents are undefined; new memory holds NaN
    /// patterns, so that a kernel that reads what it did not write is found out.
    pub fn reserve_workspace(&mut self, bytes: usize) {
        let lines = bytes.div_ceil(64);
        if lines > self.workspace.len() {
            self.workspace.resize(lines, Line([0xff; 64]));
        }
    }

    /// Bytes of the workspace.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.len() * 64
    }

    /// Threads that may run the tasks of one call.
    #[must_use]
    pub fn parallelism(&self) -> usize {
        self.host.parallelism()
    }

    /// Uses the engine's stream for the calls to come.
    pub fn set_stream(&mut self, stream: *mut c_void) {
        self.stream = stream;
    }

    pub(super) fn lend(&mut self) -> ExecContextV1 {
        ExecContextV1 {
            size: size_of::<ExecContextV1>(),
            extensions: std::ptr::null(),
            stream: self.stream,
            workspace: self.workspace.as_mut_ptr().cast(),
            workspace_bytes: self.workspace_bytes(),
            host: self.host.table(),
        }
    }
}
