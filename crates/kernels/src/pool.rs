//! A pool whose jobs are shorter than a system call: threads meet at spin barriers.
//!
//! A decode step crosses some 300 barriers in 3 ms, so starting a job on a worker must cost less than
//! a microsecond. Workers spin for `SPIN_TIME` after their last job, then sleep on a condition
//! variable: hot between the layers of a step, cold when nobody generates.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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
const CALLER_SPIN_TIME: Duration = Duration::from_micros(100);

/// Set in a ticket when its job takes no more workers.
const CLOSED: u64 = 1 << 31;
/// The bits of a ticket that count the workers that joined.
const JOINED: u64 = CLOSED - 1;
/// The lowest bit of a ticket's generation.
const GENERATION: u64 = 1 << 32;

type Job<'a> = &'a (dyn Fn(usize) + Sync);

thread_local! {
    /// Set while this thread runs a job: a nested call must not wait for threads that wait for it.
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// Keeps a much-written word off its neighbours' cache lines (128 bytes: lines are fetched in pairs).
#[repr(align(128))]
struct OwnLine<T>(T);

struct Shared {
    /// Generation, [`CLOSED`] and [`JOINED`] of the current job. A worker that sees a new generation
    /// adds 1: it has joined, unless the value it added to was closed.
    ticket: OwnLine<AtomicU64>,
    /// Workers that joined the current job and are done.
    finished: OwnLine<AtomicUsize>,
    /// Workers asleep or about to be.
    sleepers: OwnLine<AtomicUsize>,
    /// The current job. Written only by the caller that holds `turn`, while the ticket is closed and
    /// all who joined have finished; read by workers between joining and finishing.
    job: UnsafeCell<Option<Job<'static>>>,
    stop: AtomicBool,
    bed: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is the only field that is not Sync; `ticket` and `finished` order its writes and reads
// as its comment says.
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
            ticket: OwnLine(AtomicU64::new(CLOSED)),
            finished: OwnLine(AtomicUsize::new(0)),
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
        self.start(job, true);
    }

    /// Runs `job(item, thread)` for every item in `0..items`; threads take the next item from a shared
    /// cursor, so uneven items balance themselves, and a worker that has lost its core is not waited for
    /// before it has taken one.
    ///
    /// # Panics
    /// As [`run`](Self::run); items not yet started may be left undone then.
    pub fn for_each(&self, items: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let cursor = OwnLine(AtomicUsize::new(0));
        let take_items = |thread| {
            loop {
                let item = cursor.0.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    return;
                }
                job(item, thread);
            }
        };
        self.start(&take_items, false);
    }

    /// Runs `job` on the calling thread and the workers: on `all`, or on those that come before the
    /// caller is done.
    fn start(&self, job: Job<'_>, all: bool) {
        if self.workers.is_empty() || IN_JOB.get() {
            (0..self.threads()).for_each(job);
            return;
        }
        let turn = lock(&self.turn);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; no worker touches the job once the ticket is closed and all
        // who joined have finished, and we do not return (or unwind) before that.
        let eternal = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: we hold `turn` and the last job is over, so nobody reads the cell.
        unsafe { *shared.job.get() = Some(eternal) };
        shared.finished.0.store(0, Ordering::Relaxed);
        shared.next_ticket(0);
        let mine = guarded(job, 0);
        if all {
            wait_until(|| {
                shared.ticket.0.load(Ordering::Acquire) & JOINED == self.workers.len() as u64
            });
        }
        let joined = shared.ticket.0.fetch_or(CLOSED, Ordering::AcqRel) & JOINED;
        wait_until(|| shared.finished.0.load(Ordering::Acquire) as u64 == joined);
        let theirs = lock(&shared.panic).take();
        drop(turn);
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

impl Drop for BarrierPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.next_ticket(CLOSED);
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs, so there is nothing to report here.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Issues the ticket of the next generation and wakes who sleeps.
    fn next_ticket(&self, flags: u64) {
        let generation =
            (self.ticket.0.load(Ordering::Relaxed) & !(GENERATION - 1)).wrapping_add(GENERATION);
        // SeqCst with a worker's `sleepers` increment: either it sees this ticket, or we see it. Nobody
        // adds to a closed ticket anything that counts, so a plain store is right.
        self.ticket.0.store(generation | flags, Ordering::SeqCst);
        if self.sleepers.0.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.bed));
            self.wake.notify_all();
        }
    }
}

/// The life of a worker: wait for a ticket, join, run the job, report.
fn worker(shared: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        wait_for_ticket(shared, seen);
        let ticket = shared.ticket.0.fetch_add(1, Ordering::AcqRel);
        seen = ticket / GENERATION;
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        if ticket & CLOSED != 0 {
            continue;
        }
        // SAFETY: we joined, so the cell is not written before we finish.
        if let Some(job) = unsafe { *shared.job.get() }
            && let Err(panic) = guarded(job, thread)
        {
            lock(&shared.panic).get_or_insert(panic);
        }
        shared.finished.0.fetch_add(1, Ordering::Release);
    }
}

/// Waits until the generation is no longer `seen`: spins first, then sleeps.
fn wait_for_ticket(shared: &Shared, seen: u64) {
    let mut since = None;
    loop {
        for _ in 0..POLLS_PER_CLOCK {
            if shared.ticket.0.load(Ordering::Acquire) / GENERATION != seen {
                return;
            }
            std::hint::spin_loop();
        }
        if since.get_or_insert_with(Instant::now).elapsed() > SPIN_TIME {
            return sleep(shared, seen);
        }
    }
}

/// Sleeps until the generation is no longer `seen`.
fn sleep(shared: &Shared, seen: u64) {
    let mut bed = lock(&shared.bed);
    shared.sleepers.0.fetch_add(1, Ordering::SeqCst);
    while shared.ticket.0.load(Ordering::SeqCst) / GENERATION == seen {
        bed = shared.wake.wait(bed).unwrap_or_else(PoisonError::into_inner);
    }
    shared.sleepers.0.fetch_sub(1, Ordering::SeqCst);
}

/// Waits for the workers: spins first, then gives its core away between looks.
fn wait_until(done: impl Fn() -> bool) {
    let mut since = None;
    let mut patient = false;
    loop {
        for _ in 0..POLLS_PER_CLOCK {
            if done() {
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
