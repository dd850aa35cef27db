//! The engine on a thread of its own, and the door to it for any number of callers.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::admission::Refusal;
use crate::engine::{Engine, Progress};
use crate::event::{Event, FinishReason};
use crate::executor::model::panic_text;
use crate::executor::{ExecutorDead, Waker};
use crate::late::{HeldBack, LateEnds};
use crate::request::Request;
use crate::session::EngineError;
use crate::stats::EngineStats;
use crate::wakeup::Wakeup;

/// Commands that may wait for the engine's attention.
const COMMANDS: usize = 4096;
/// Commands obeyed between two turns: whoever floods the door does not stop those who are in.
const COMMANDS_A_TURN: usize = 64;
/// Whoever has news wakes the thread; this is against a wake-up that never comes, and how often deadlines
/// are looked at.
const LONGEST_WAIT: Duration = Duration::from_millis(20);
/// How often the invariants are checked while there is nothing to do.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// Hears what happens to a request, on the engine's thread: it must not block. `false`: nobody listens any
/// more; the request is ended and nothing more is told.
pub type Listener = Box<dyn FnMut(Event) -> bool + Send>;

/// A listener that hears one last event whatever happens, also where the engine goes before it has looked at
/// the request.
struct Ear {
    listener: Listener,
    open: bool,
}

impl Ear {
    /// `false`: nothing more is to be told.
    fn hear(&mut self, event: Event) -> bool {
        let last = matches!(event, Event::Finished(_) | Event::Failed(_));
        self.open = self.open && (self.listener)(event) && !last;
        self.open
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        if self.open {
            self.hear(Event::Failed(Arc::new(stopped())));
        }
    }
}

fn stopped() -> EngineError {
    ExecutorDead { reason: "the engine has stopped".into() }.into()
}

/// What is called with the engine between two of its turns; `None`: it has died, or was too busy.
pub type Glance = Box<dyn FnOnce(Option<&Engine>) + Send>;

/// A glance that is called once whatever happens: with `None` where it is dropped before.
struct Look(Option<Glance>);

impl Look {
    fn at(&mut self, engine: Option<&Engine>) {
        if let Some(glance) = self.0.take() {
            // It only reads: what it breaks is its own.
            let _ = catch_unwind(AssertUnwindSafe(|| glance(engine)));
        }
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        self.at(None);
    }
}

enum Command {
    Submit(u64, Box<Request>, Ear),
    End(u64, FinishReason),
    EndBranch(u64, u32, FinishReason),
    Look(Look),
    Stop,
}

/// A door to an engine that runs on its own thread. Dropping it stops the engine: what is going on is
/// ended as cancelled.
pub struct EngineHandle {
    commands: SyncSender<Command>,
    late_ends: Arc<LateEnds>,
    waker: Waker,
    next_key: AtomicU64,
    alive: Arc<AtomicBool>,
    /// When the engine's clock read 0.
    start: Instant,
    thread: Option<JoinHandle<()>>,
}

impl EngineHandle {
    /// Moves `engine` to a thread.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn spawn(engine: Engine) -> std::io::Result<EngineHandle> {
        let (commands, received) = sync_channel(COMMANDS);
        let (wakers, waker) = channel();
        let alive = Arc::new(AtomicBool::new(true));
        let is_alive = alive.clone();
        let late_ends = Arc::new(LateEnds::default());
        let late = late_ends.clone();
        let start = Instant::now();
        let run = move || {
            let wakeup = Wakeup::of_this_thread();
            // The one who spawned waits for it.
            let _ = wakers.send(wakeup.waker());
            let (listeners, held) = (HashMap::new(), HeldBack::default());
            let mut server = Server { engine, listeners, late, held, start };
            let ended = catch_unwind(AssertUnwindSafe(|| server.run(&received, &wakeup)));
            is_alive.store(false, Ordering::Release);
            let error = match ended {
                Ok(Ok(())) => return server.cancel_all(),
                Ok(Err(error)) => error,
                Err(panic) => ExecutorDead { reason: panic_text(&*panic) }.into(),
            };
            server.fail_all(error);
        };
        let thread = std::thread::Builder::new().name("reef-engine".into()).spawn(run)?;
        let waker = waker.recv().map_err(std::io::Error::other)?;
        let next_key = AtomicU64::new(0);
        let thread = Some(thread);
        Ok(EngineHandle { commands, late_ends, waker, next_key, alive, start, thread })
    }

    /// Hands a request over; returns its key. `listener` hears everything from [`Event::Accepted`] on, a
    /// refusal as [`Event::Failed`] with [`EngineError::Refused`].
    ///
    /// # Errors
    /// The engine does not keep up with what it is told, or has died.
    pub fn submit(&self, request: Request, listener: Listener) -> Result<u64, EngineError> {
        if !self.is_alive() {
            return Err(stopped());
        }
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        let ear = Ear { listener, open: true };
        let refused = match self.commands.try_send(Command::Submit(key, Box::new(request), ear)) {
            Ok(()) => {
                (self.waker)();
                return Ok(key);
            }
            Err(refused) => refused,
        };
        let (mut command, error) = match refused {
            TrySendError::Full(command) => {
                let full = Refusal::QueueFull { waiting: COMMANDS, most: COMMANDS };
                (command, full.into())
            }
            TrySendError::Disconnected(command) => (command, stopped()),
        };
        if let Command::Submit(_, _, ear) = &mut command {
            // The caller is told.
            ear.open = false;
        }
        Err(error)
    }

    /// Ends a request at any state: a stop string was found, the client has gone. Never waits; a key that
    /// was not given out, or whose request has ended, is ignored.
    pub fn end(&self, key: u64, reason: FinishReason) {
        if key >= self.next_key.load(Ordering::Relaxed) {
            return;
        }
        // An engine that has died has ended it.
        if let Err(TrySendError::Full(_)) = self.commands.try_send(Command::End(key, reason))
            && self.is_alive()
        {
            self.late_ends.leave(key, reason);
        }
        (self.waker)();
    }

    /// Ends one of several continuations of a request, which a stop string has ended. Never waits; where the
    /// engine does not keep up it goes on in vain until its limit.
    pub fn end_branch(&self, key: u64, branch: u32, reason: FinishReason) {
        let _ = self.commands.try_send(Command::EndBranch(key, branch, reason));
        (self.waker)();
    }

    /// Calls `glance` with the engine, on its thread, between two of its turns: it must be short, for nothing
    /// is computed meanwhile. It is called once in any case: with `None`, maybe at once on this thread, where
    /// the engine has died, is stopped before it comes to it, or does not keep up with what it is told. A
    /// panic in it is contained.
    pub fn look(&self, glance: Glance) {
        // What is refused is dropped, and is called by that.
        let _ = self.commands.try_send(Command::Look(Look(Some(glance))));
        (self.waker)();
    }

    /// How the engine is doing; waits for its turn to end. `None` as in [`look`](Self::look).
    pub fn stats(&self) -> Option<EngineStats> {
        let (sender, stats) = channel();
        // Whoever asked waits for it.
        self.look(Box::new(move |engine| drop(sender.send(engine.map(Engine::stats)))));
        stats.recv().ok()?
    }

    /// The engine's time: what [`Request::deadline_us`] is compared with.
    pub fn now_us(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    /// Whether the engine's loop is running.
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        (self.waker)();
        if let Some(thread) = self.thread.take() {
            // Its panics were told to the listeners.
            let _ = thread.join();
        }
    }
}

struct Server {
    engine: Engine,
    listeners: HashMap<u64, Ear>,
    late: Arc<LateEnds>,
    held: HeldBack,
    start: Instant,
}

impl Server {
    fn run(&mut self, commands: &Receiver<Command>, wakeup: &Wakeup) -> Result<(), EngineError> {
        self.engine.set_waker(wakeup.waker());
        let mut checked = Instant::now();
        loop {
            self.held.collect(&self.late, COMMANDS);
            let mut obeyed = 0;
            for command in commands.try_iter().take(COMMANDS_A_TURN) {
                obeyed += 1;
                if !self.obey(command) {
                    return Ok(());
                }
            }
            for (key, reason) in self.held.due(obeyed, obeyed < COMMANDS_A_TURN) {
                self.engine.end(key, reason);
            }
            let progress = self.engine.turn(self.start.elapsed().as_micros() as u64)?;
            self.deliver();
            if progress == Progress::Idle && checked.elapsed() > CHECK_EVERY {
                // Violations are counted where metrics see them.
                self.engine.check();
                checked = Instant::now();
            }
            if progress != Progress::Worked && obeyed < COMMANDS_A_TURN {
                wakeup.wait(LONGEST_WAIT);
            }
        }
    }

    /// `false`: stop.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(key, request, mut ear) => match self.engine.submit(key, *request) {
                Ok(()) if ear.hear(Event::Accepted) => {
                    self.listeners.insert(key, ear);
                }
                Ok(()) => self.engine.end(key, FinishReason::Cancelled),
                Err(refusal) => {
                    ear.hear(Event::Failed(Arc::new(refusal.into())));
                }
            },
            Command::End(key, reason) => self.engine.end(key, reason),
            Command::EndBranch(key, branch, reason) => self.engine.end_branch(key, branch, reason),
            Command::Look(mut look) => look.at(Some(&self.engine)),
            Command::Stop => return false,
        }
        true
    }

    fn deliver(&mut self) {
        for told in self.engine.take_events() {
            let last = matches!(told.event, Event::Finished(_) | Event::Failed(_));
            let Some(ear) = self.listeners.get_mut(&told.request) else { continue };
            let listens = ear.hear(told.event);
            if !listens {
                self.listeners.remove(&told.request);
            }
            if !listens && !last {
                self.engine.end(told.request, FinishReason::Cancelled);
            }
        }
    }

    fn cancel_all(&mut self) {
        let keys: Vec<u64> = self.listeners.keys().copied().collect();
        keys.into_iter().for_each(|key| self.engine.end(key, FinishReason::Cancelled));
        self.deliver();
    }

    fn fail_all(&mut self, error: EngineError) {
        let error = Arc::new(error);
        for (_, mut ear) in self.listeners.drain() {
            ear.hear(Event::Failed(error.clone()));
        }
    }
}
