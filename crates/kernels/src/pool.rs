//! A pool whose jobs are shorter than a system call: threads meet at spin barriers.
//!
//! A decode step crosses some 300 barriers in 3 ms, so starting a job on a worker must cost less than
//! a microsecond. Workers spin for [`SPIN_TIME`] after their last job, then sleep on a condition
//! variable: hot between the layers of a step, cold when nobody generates.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker looks for its next job before it sleeps. Longer than sampling between two decode
/// steps, far shorter than a human notices on a battery.
const SPIN_TIME: Duration = Duration::from_micros(80);
/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 64;
/// How long the caller spins for its workers before it yields: beyond this a worker has probably lost
/// its core, and giving up ours is the quickest way to get it back.
const CALLER_SPIN_TIME: Duration = Duration::from_micros(200);

type Job<'a> = &'a (dyn Fn(usize) + Sync);

thread_local! {
    /// Set while this thread runs a job: a nested call must not wait for threads that wait for it.
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// Keeps a much-written word off its neighbours' cache lines (128 bytes: lines are fetched in pairs).
#[repr(align(128))]
struct OwnLine<T>(T);

struct Shared {
    /// Counts jobs; a change starts the workers.
    generation: OwnLine<AtomicUsize>,
    /// Workers that have not finished the current job.
    remaining: OwnLine<AtomicUsize>,
    /// Workers asleep or about to be.
    sleepers: OwnLine<AtomicUsize>,
    /// The job of the current generation. Written only by the caller that holds `turn`, while
    /// `remaining` is 0; read by workers between a new generation and their decrement of `remaining`.
    job: UnsafeCell<Option<Job<'static>>>,
    stop: AtomicBool,
    bed: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is the only field that is not Sync; `generation` (release) and `remaining` (acquire)
// order its writes and reads as its comment says.
unsafe impl Sync for Shared {}

/// A fixed set of threads that run one job together and meet again at its end.
pub struct BarrierPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One job at a time.
    turn: Mutex<()>,
}

impl BarrierPool {
    /// A pool of `threads` threads, the caller of [`run`](Self::run) being one of them: `threads - 1`
    /// are started now. 0 counts as 1. Should the system refuse a thread, the pool is smaller; see
    /// [`threads`](Self::threads).
    pub fn new(threads: usize) -> BarrierPool {
        let shared = Arc::new(Shared {
            generation: OwnLine(AtomicUsize::new(0)),
            remaining: OwnLine(AtomicUsize::new(0)),
            sleepers: OwnLine(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            bed: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        let workers = (1..threads)
            .map_while(|thread| {
                let shared = Arc::clone(&shared);
                let name = format!("reef-kernel-{thread}");
                let body = move || worker(&shared, thread);
                std::thread::Builder::new().name(name).spawn(body).ok()
            })
            .collect();
        BarrierPool { shared, workers, turn: Mutex::new(()) }
    }

    /// Threads that take part in a job, the caller included (at least 1).
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(thread)` once for every thread index in `0..threads()`, index 0 on the calling
    /// thread, and returns when all are done.
    ///
    /// A call from inside a job runs all indices one after another on the calling thread. Calls from
    /// several threads take turns.
    ///
    /// # Panics
    /// Carries on the first panic of a job after all threads are done; the pool stays usable.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || IN_JOB.get() {
            (0..self.threads()).for_each(job);
            return;
        }
        let turn = lock(&self.turn);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; no worker touches the job after `remaining` is 0, and we
        // do not return (or unwind) before that.
        let eternal = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: we hold `turn` and `remaining` is 0, so nobody reads the cell.
        unsafe { *shared.job.get() = Some(eternal) };
        shared.remaining.0.store(self.workers.len(), Ordering::Relaxed);
        // SeqCst with the worker's `sleepers` increment: either it sees this generation, or we see it.
        shared.generation.0.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.0.load(Ordering::SeqCst) > 0 {
            drop(lock(&shared.bed));
            shared.wake.notify_all();
        }
        let mine = guarded(job, 0);
        wait_for_zero(&shared.remaining.0);
        let theirs = lock(&shared.panic).take();
        drop(turn);
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Runs `job(item, thread)` for every item in `0..items`; threads take the next item from a shared
    /// cursor, so uneven items balance themselves.
    ///
    /// # Panics
    /// As [`run`](Self::run); items not yet started may be left undone then.
    pub fn for_each(&self, items: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let cursor = OwnLine(AtomicUsize::new(0));
        self.run(&|thread| {
            loop {
                let item = cursor.0.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    return;
                }
                job(item, thread);
            }
        });
    }
}

impl Drop for BarrierPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.generation.0.fetch_add(1, Ordering::SeqCst);
        drop(lock(&self.shared.bed));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs, so there is nothing to report here.
            let _ = worker.join();
        }
    }
}

/// The life of a worker: wait for a generation, run its job, report.
fn worker(shared: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        seen = next_generation(shared, seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: a new generation was acquired and `remaining` counts us, so the cell is not written.
        if let Some(job) = unsafe { *shared.job.get() }
            && let Err(panic) = guarded(job, thread)
        {
            lock(&shared.panic).get_or_insert(panic);
        }
        shared.remaining.0.fetch_sub(1, Ordering::Release);
    }
}

/// Waits until the generation is no longer `seen` and returns it: spins first, then sleeps.
fn next_generation(shared: &Shared, seen: usize) -> usize {
    let mut since = None;
    loop {
        for _ in 0..POLLS_PER_CLOCK {
            let generation = shared.generation.0.load(Ordering::Acquire);
            if generation != seen {
                return generation;
            }
            std::hint::spin_loop();
        }
        if since.get_or_insert_with(Instant::now).elapsed() > SPIN_TIME {
            return sleep(shared, seen);
        }
    }
}

/// Sleeps until the generation is no longer `seen` and returns it.
fn sleep(shared: &Shared, seen: usize) -> usize {
    let mut bed = lock(&shared.bed);
    shared.sleepers.0.fetch_add(1, Ordering::SeqCst);
    let generation = loop {
        let generation = shared.generation.0.load(Ordering::SeqCst);
        if generation != seen {
            break generation;
        }
        bed = shared.wake.wait(bed).unwrap_or_else(PoisonError::into_inner);
    };
    shared.sleepers.0.fetch_sub(1, Ordering::SeqCst);
    generation
}

/// Waits for the workers: spins first, then gives its core away between looks.
fn wait_for_zero(remaining: &AtomicUsize) {
    let mut since = None;
    let mut patient = false;
    loop {
        for _ in 0..POLLS_PER_CLOCK {
            if remaining.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        if patient {
            std::thread::yield_now();
        } else {
            patient = since.get_or_insert_with(Instant::now).elapsed() > CALLER_SPIN_TIME;
        }
    }
}

/// Runs one thread's share with nested calls turned inline; a panic comes back as a value.
fn guarded(job: Job<'_>, thread: usize) -> Result<(), Box<dyn Any + Send>> {
    IN_JOB.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| job(thread)));
    IN_JOB.set(false);
    result
}

/// The pool's mutexes guard nothing that a panic could leave half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_each_job_once() {
        for threads in 0..5 {
            let pool = BarrierPool::new(threads);
            assert_eq!(pool.threads(), threads.max(1));
            let counts: Vec<AtomicUsize> =
                (0..pool.threads()).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..=500 {
                pool.run(&|thread| {
                    counts[thread].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == round));
            }
        }
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = BarrierPool::new(3);
        let count = AtomicUsize::new(0);
        for pause_us in [0, 50, 75, 80, 85, 100, 500, 3000].repeat(5) {
            std::thread::sleep(Duration::from_micros(pause_us));
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(count.into_inner(), 3 * 40);
    }

    #[test]
    fn items_are_taken_once() {
        let pool = BarrierPool::new(3);
        for items in [0, 1, 2, 100] {
            let taken: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(items, &|item, thread| {
                assert!(thread < 3);
                taken[item].fetch_add(1, Ordering::Relaxed);
            });
            assert!(taken.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn nested_calls_run_inline() {
        let pool = BarrierPool::new(2);
        let count = AtomicUsize::new(0);
        pool.run(&|_| {
            let outer = std::thread::current().id();
            pool.run(&|_| {
                assert_eq!(std::thread::current().id(), outer);
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 4);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = BarrierPool::new(3);
        for guilty in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|thread| assert_ne!(thread, guilty, "guilty"));
            }));
            assert!(result.is_err());
            let count = AtomicUsize::new(0);
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        }
    }

    #[test]
    fn callers_take_turns() {
        let pool = BarrierPool::new(2);
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(&|_| {
                            assert!(inside.fetch_add(1, Ordering::SeqCst) < 2);
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
    }
}
