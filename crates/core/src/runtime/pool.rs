//! What an engine's thread pool must offer, and the simplest one.

/// The engine's thread pool. Plugins bring none of their own.
pub trait ThreadPool: Send + Sync + 'static {
    /// Workers that may run at once, the caller included; at least 1.
    fn parallelism(&self) -> usize;

    /// Calls `body(task, worker)` once for each task below `tasks` and returns when all are done.
    /// `worker` is below [`ThreadPool::parallelism`]; calls that overlap in time never share it.
    /// `body` does not panic.
    fn parallel_for(&self, tasks: usize, body: &(dyn Fn(usize, usize) + Sync));
}

/// Runs every task on the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct InlinePool;

impl ThreadPool for InlinePool {
    fn parallelism(&self) -> usize {
        1
    }

    fn parallel_for(&self, tasks: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        for task in 0..tasks {
            body(task, 0);
        }
    }
}
