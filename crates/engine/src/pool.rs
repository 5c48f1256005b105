//! The engine's one thread pool.
//!
//! Owns the worker threads, how tasks are handed out and how waiting threads sleep. Must not know
//! what a task is: models, plugins and kernels all come through [`Pool::run`].
//!
//! Waiting threads spin for a few microseconds at most and then sleep, so that a pool with more
//! threads than cores, or next to a busy neighbour, does not burn the time others need.

use attache_core::runtime::ThreadPool;
use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

/// Polls before a waiting thread goes to sleep: some microseconds, less than a wake-up costs.
const SPINS: u32 = 200;

thread_local! {
    /// The pool and the worker number that the current thread works as, while it does.
    static WORKING_AS: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

type Body = dyn Fn(usize, usize) + Sync;

/// One call of [`Pool::run`].
struct Job {
    /// Lives until the caller returns, which waits for every worker that entered.
    body: *const Body,
    tasks: usize,
    next: AtomicUsize,
    /// Workers inside the job, the caller not counted.
    inside: AtomicUsize,
    panicked: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `body` is `Sync` and outlives every use, see `Job::body`; the rest is thread-safe.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// Claims tasks until none is left. A panic ends the job early and is kept for the caller.
    fn work(&self, worker: usize) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= self.tasks || self.panicked.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: the caller of `run` keeps the body alive until all who entered have left.
            let body = unsafe { &*self.body };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| body(task, worker))) {
                self.panicked.store(true, Ordering::Relaxed);
                lock(&self.payload).get_or_insert(payload);
            }
        }
    }
}

#[derive(Default)]
struct State {
    job: Option<Arc<Job>>,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    /// Counts published jobs; read without the lock by spinning workers.
    generation: AtomicU64,
    work: Condvar,
    done: Condvar,
}

/// A fixed set of threads that share tasks; the calling thread takes part.
pub struct Pool {
    shared: Arc<Shared>,
    /// One job at a time: callers from several threads take turns.
    turn: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of threads that this process may keep busy: its affinity mask and its cgroup's CPU
/// quota (v1 and v2) are honoured, so a container with two CPUs on a large machine gives 2.
#[must_use]
pub fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

impl Pool {
    /// A pool that keeps `threads` threads busy, the caller's included; 0 = [`available_threads`].
    ///
    /// Should the system refuse a thread, the pool goes on with those that it has.
    #[must_use]
    pub fn new(threads: usize) -> Arc<Self> {
        let threads = if threads == 0 { available_threads() } else { threads };
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            generation: AtomicU64::new(0),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut handles = Vec::new();
        for worker in 1..threads {
            let shared = Arc::clone(&shared);
            let spawned =
                std::thread::Builder::new().name(format!("attache-{worker}")).spawn(move || serve(&shared, worker));
            match spawned {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    tracing::warn!(asked = threads, got = handles.len() + 1, %error, "the system refuses more threads");
                    break;
                }
            }
        }
        Arc::new(Self { shared, turn: Mutex::new(()), threads: handles })
    }

    /// Threads that may work at once, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    fn id(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    /// Calls `body(task, worker)` once for each task below `tasks` and returns when all are done;
    /// `worker` is below [`Pool::threads`]. A call from inside a body runs on that body's thread.
    ///
    /// # Panics
    /// With the first panic of a body, once no thread is inside any more.
    pub fn run(&self, tasks: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        if tasks == 0 {
            return;
        }
        if let Some((pool, worker)) = WORKING_AS.get()
            && pool == self.id()
        {
            // The other threads are busy with the outer call: waiting for them would never end.
            (0..tasks).for_each(|task| body(task, worker));
            return;
        }
        let _turn = lock(&self.turn);
        // SAFETY: only the lifetime is changed; `Job::body` says why it is not outlived.
        let body: *const Body =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), *const Body>(body) };
        let job = Arc::new(Job {
            body,
            tasks,
            next: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            payload: Mutex::new(None),
        });
        let shared = &*self.shared;
        let share = tasks > 1 && !self.threads.is_empty();
        if share {
            {
                let mut state = lock(&shared.state);
                state.job = Some(Arc::clone(&job));
                shared.generation.fetch_add(1, Ordering::Release);
            }
            if tasks > self.threads.len() {
                shared.work.notify_all();
            } else {
                (1..tasks).for_each(|_| shared.work.notify_one());
            }
        }
        let outer = WORKING_AS.replace(Some((self.id(), 0)));
        job.work(0);
        WORKING_AS.set(outer);
        if share {
            // Nobody enters from here on.
            lock(&shared.state).job = None;
            let mut spins = 0;
            while job.inside.load(Ordering::Acquire) > 0 {
                spins += 1;
                if spins < SPINS {
                    std::hint::spin_loop();
                    continue;
                }
                let state = lock(&shared.state);
                drop(
                    shared
                        .done
                        .wait_while(state, |_| job.inside.load(Ordering::Acquire) > 0)
                        .unwrap_or_else(PoisonError::into_inner),
                );
            }
        }
        let payload = lock(&job.payload).take();
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }

    /// Runs `body(start, end)` over consecutive pieces of `0..len`, each a multiple of `grain` long
    /// (but the last), several pieces a thread so that a late thread does not hold up the others.
    pub fn run_ranges(&self, len: usize, grain: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let grain = grain.max(1);
        let units = len.div_ceil(grain);
        let piece = units.div_ceil(self.threads() * 4).max(1) * grain;
        self.run(len.div_ceil(piece), &|task, _| body(task * piece, len.min((task + 1) * piece)));
    }
}

fn serve(shared: &Shared, worker: usize) {
    WORKING_AS.set(Some((std::ptr::from_ref(shared).addr(), worker)));
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.generation.load(Ordering::Acquire) == seen && spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        }
        let job = {
            let mut state = lock(&shared.state);
            loop {
                if state.stop {
                    return;
                }
                let generation = shared.generation.load(Ordering::Acquire);
                // A job that was seen before has no task left for this thread.
                if let (true, Some(job)) = (generation != seen, &state.job) {
                    seen = generation;
                    job.inside.fetch_add(1, Ordering::Relaxed);
                    break Arc::clone(job);
                }
                seen = generation;
                state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        };
        job.work(worker);
        if job.inside.fetch_sub(1, Ordering::Release) == 1 {
            // Taking the lock orders this after a caller that is about to sleep.
            drop(lock(&shared.state));
            shared.done.notify_one();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // Bodies are guarded, so that a worker does not end by a panic.
            let _ = thread.join();
        }
    }
}

impl ThreadPool for Pool {
    fn parallelism(&self) -> usize {
        self.threads()
    }

    fn parallel_for(&self, tasks: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        self.run(tasks, body);
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

/// Memory that the tasks of one [`Pool::run`] write, each its own part.
#[derive(Clone, Copy)]
pub(crate) struct Shards<T> {
    pointer: *mut T,
    len: usize,
}

// SAFETY: parts are only handed out through `slice`, whose caller vouches that they do not overlap.
unsafe impl<T: Send> Send for Shards<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shards<T> {}

impl<T> Shards<T> {
    /// The memory to share out; the borrow must last while parts are in use.
    pub(crate) fn new(values: &mut [T]) -> Self {
        Self { pointer: values.as_mut_ptr(), len: values.len() }
    }

    /// `len` values from `start`.
    ///
    /// # Safety
    /// The slice that this was made of is still mutably borrowed, and no other part in use overlaps.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "a part outside its memory");
        // SAFETY: inside the memory; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }

    /// Writes one value.
    ///
    /// # Safety
    /// As [`Shards::slice`].
    pub(crate) unsafe fn write(&self, index: usize, value: T) {
        assert!(index < self.len, "a value outside its memory");
        // SAFETY: inside the memory; the caller vouches for the rest.
        unsafe { *self.pointer.add(index) = value };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_and_workers_are_never_shared() {
        let pool = Pool::new(4);
        assert_eq!(pool.threads(), 4);
        let busy: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        for tasks in [0, 1, 2, 3, 4, 5, 100, 1000] {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(tasks, &|task, worker| {
                assert_eq!(busy[worker].fetch_add(1, Ordering::SeqCst), 0, "worker {worker} runs twice");
                counts[task].fetch_add(1, Ordering::SeqCst);
                busy[worker].fetch_sub(1, Ordering::SeqCst);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::SeqCst) == 1), "{tasks} tasks");
        }
    }

    #[test]
    fn callers_from_several_threads_take_turns() {
        let pool = Pool::new(3);
        let busy: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for tasks in 1..60 {
                        pool.run(tasks, &|_, worker| {
                            assert_eq!(busy[worker].fetch_add(1, Ordering::SeqCst), 0);
                            total.fetch_add(1, Ordering::SeqCst);
                            busy[worker].fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::SeqCst), 6 * (1..60).sum::<usize>());
    }

    #[test]
    fn a_nested_call_ends() {
        let pool = Pool::new(3);
        let total = AtomicUsize::new(0);
        pool.run(8, &|_, outer| {
            pool.run(5, &|_, inner| {
                assert_eq!(outer, inner);
                total.fetch_add(1, Ordering::SeqCst);
            });
        });
        assert_eq!(total.load(Ordering::SeqCst), 40);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        for _ in 0..20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, &|task, _| assert!(task != 17, "task seventeen"));
            }));
            let payload = outcome.expect_err("the panic is not swallowed");
            let text = payload.downcast_ref::<String>().cloned().unwrap_or_default();
            assert!(text.is_empty() || text.contains("seventeen"), "{text}");
            let count = AtomicUsize::new(0);
            pool.run(10, &|_, _| {
                count.fetch_add(1, Ordering::SeqCst);
            });
            assert_eq!(count.load(Ordering::SeqCst), 10);
        }
    }

    #[test]
    fn more_threads_than_cores_make_progress() {
        let pool = Pool::new(16);
        let total = AtomicUsize::new(0);
        for _ in 0..200 {
            pool.run(64, &|task, _| {
                total.fetch_add(task, Ordering::Relaxed);
            });
        }
        assert_eq!(total.load(Ordering::Relaxed), 200 * (0..64).sum::<usize>());
    }
}
