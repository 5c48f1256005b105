//! A thread pool for checks: plain, and of any size whatever the machine has.
//!
//! Must not know what runs on it.

use attache_core::runtime::{HostServices, ThreadPool};
use std::sync::{
    Arc, LazyLock,
    atomic::{AtomicUsize, Ordering},
};

/// Makes its threads anew for every call, so that idle workers never linger.
#[derive(Debug, Clone, Copy)]
pub struct ScopedThreads {
    threads: usize,
}

impl ScopedThreads {
    /// A pool of `threads` workers, at least 1.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self { threads: threads.max(1) }
    }
}

impl ThreadPool for ScopedThreads {
    fn parallelism(&self) -> usize {
        self.threads
    }

    fn parallel_for(&self, tasks: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let work = |worker: usize| {
            while let Some(task) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|task| *task < tasks) {
                body(task, worker);
            }
        };
        let work = &work;
        std::thread::scope(|scope| {
            for worker in 1..self.threads.min(tasks) {
                scope.spawn(move || work(worker));
            }
            work(0);
        });
    }
}

/// Services on three threads: not a power of two, and more than small machines have.
#[must_use]
pub fn three_threads() -> HostServices {
    static SERVICES: LazyLock<HostServices> = LazyLock::new(|| HostServices::new(Arc::new(ScopedThreads::new(3))));
    *SERVICES
}
