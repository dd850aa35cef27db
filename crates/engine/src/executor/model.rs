//! The model on a thread of its own: arrivals, cancels and completions of I/O are taken while a step is
//! being computed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use reef_kv::{EncodeJob, Sequence};

use super::inline::ModelWorker;
use super::{
    Completion, Executor, ExecutorDead, ExecutorFacts, Logits, Polled, StepCosts, StepWork, Waker,
};
use crate::wakeup::Wakeup;

/// Whoever has news wakes the thread; this is against a wake-up that never comes.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// [`ModelWorker`] on a thread of its own. Dropping it waits for the step in flight.
pub struct ThreadedExecutor {
    shared: Arc<Shared>,
    /// Wakes the thread.
    call: Waker,
    thread: Option<JoinHandle<()>>,
    facts: ExecutorFacts,
    costs: StepCosts,
}

struct Shared {
    /// Held by the thread while it computes, and between steps by the engine's, which then re-encodes
    /// and observes on the same compute threads.
    worker: Mutex<ModelWorker>,
    /// Held for moments only.
    mail: Mutex<Mail>,
}

/// What the two threads have for each other.
#[derive(Default)]
struct Mail {
    work: Option<StepWork>,
    done: Option<Done>,
    /// A step was handed over whose end has not been posted.
    busy: bool,
    /// Where the logits of a coming step go.
    spare: Option<Vec<f32>>,
    waker: Option<Waker>,
    dead: Option<ExecutorDead>,
    stop: bool,
}

/// A step that has ended.
struct Done {
    completions: Vec<Completion>,
    step: u64,
    elapsed_us: u64,
}

impl ThreadedExecutor {
    /// Moves `worker` to a thread. `costs` is what steps cost ([`super::calibrate`]).
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn spawn(worker: ModelWorker, costs: StepCosts) -> std::io::Result<ThreadedExecutor> {
        let facts = worker.facts();
        let mail = Mutex::new(Mail::default());
        let shared = Arc::new(Shared { worker: Mutex::new(worker), mail });
        let of_thread = shared.clone();
        let (sender, call) = channel();
        let run = move || {
            let wakeup = Wakeup::of_this_thread();
            // The one who spawned waits for it.
            let _ = sender.send(wakeup.waker());
            of_thread.serve(&wakeup);
        };
        let thread = std::thread::Builder::new().name("reef-model".into()).spawn(run)?;
        let call = call.recv().map_err(std::io::Error::other)?;
        Ok(ThreadedExecutor { shared, call, thread: Some(thread), facts, costs })
    }
}

impl Shared {
    fn mail(&self) -> MutexGuard<'_, Mail> {
        lock(&self.mail)
    }

    /// The life of the thread: steps until it is told to stop or a step panics.
    fn serve(&self, wakeup: &Wakeup) {
        loop {
            let (work, spare) = {
                let mut mail = self.mail();
                if mail.stop {
                    return;
                }
                (mail.work.take(), mail.spare.take())
            };
            let Some(work) = work else {
                if spare.is_some() {
                    self.mail().spare = spare;
                }
                wakeup.wait(LONGEST_WAIT);
                continue;
            };
            let ended = catch_unwind(AssertUnwindSafe(|| self.step(work, spare)));
            let result = ended.unwrap_or_else(|panic| {
                Err(ExecutorDead { reason: format!("a step panicked: {}", panic_text(&*panic)) })
            });
            if !self.post(result) {
                return;
            }
        }
    }

    fn step(&self, work: StepWork, spare: Option<Vec<f32>>) -> Result<Done, ExecutorDead> {
        let start = Instant::now();
        let step = work.step;
        let mut worker = lock(&self.worker);
        if let Some(spare) = spare {
            worker.recycle(Logits::new(Arc::new(spare), 0, 0, 0));
        }
        let completions = worker.compute(work)?;
        Ok(Done { completions, step, elapsed_us: start.elapsed().as_micros() as u64 })
    }

    /// Posts the end of a step and calls who waits for it. `false`: it was the last.
    fn post(&self, result: Result<Done, ExecutorDead>) -> bool {
        let mut mail = self.mail();
        mail.busy = false;
        let goes_on = result.is_ok();
        match result {
            Ok(done) => mail.done = Some(done),
            Err(dead) => mail.dead = Some(dead),
        }
        let waker = mail.waker.clone();
        drop(mail);
        if let Some(waker) = waker {
            waker();
        }
        goes_on
    }
}

impl Executor for ThreadedExecutor {
    fn facts(&self) -> ExecutorFacts {
        self.facts
    }

    fn costs(&self) -> StepCosts {
        self.costs
    }

    fn set_waker(&mut self, waker: Waker) {
        self.shared.mail().waker = Some(waker);
    }

    fn submit(&mut self, work: StepWork) -> Result<(), ExecutorDead> {
        let mut mail = self.shared.mail();
        if let Some(dead) = &mail.dead {
            return Err(dead.clone());
        }
        debug_assert!(!mail.busy, "one step at a time");
        mail.work = Some(work);
        mail.busy = true;
        drop(mail);
        (self.call)();
        Ok(())
    }

    fn poll(&mut self) -> Result<Polled, ExecutorDead> {
        let mut mail = self.shared.mail();
        if let Some(dead) = &mail.dead {
            return Err(dead.clone());
        }
        let idle = !mail.busy;
        Ok(match mail.done.take() {
            Some(Done { completions, step, elapsed_us }) => {
                Polled { completions, idle, elapsed_us: Some((step, elapsed_us)) }
            }
            None => Polled { idle, ..Polled::default() },
        })
    }

    fn encode(&mut self, jobs: &mut [EncodeJob<'_>]) {
        lock(&self.shared.worker).encode(jobs);
    }

    fn observe_masses(&mut self, place: usize, sequence: &mut Sequence, decay: f32) {
        lock(&self.shared.worker).observe_masses(place, sequence, decay);
    }

    fn observe_keys(&mut self, sequence: &mut Sequence, before: usize) {
        lock(&self.shared.worker).observe_keys(sequence, before);
    }

    fn recycle(&mut self, logits: Logits) {
        // The worker may be in a step: its thread takes the buffer when it begins the next.
        if let Some(buffer) = logits.into_buffer() {
            self.shared.mail().spare = Some(buffer);
        }
    }
}

impl Drop for ThreadedExecutor {
    fn drop(&mut self) {
        self.shared.mail().stop = true;
        (self.call)();
        if let Some(thread) = self.thread.take() {
            // What it panicked with was told by `poll`.
            let _ = thread.join();
        }
    }
}

/// A panic is told by `dead`, after which nobody computes; nothing else can be half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
