//! What the server needs of an engine.

use reef_engine::handle::Listener;
use reef_engine::{Engine, EngineError, EngineHandle, FinishReason, Request};

/// What is done with an engine on its own thread; `None`: it has died.
pub type Look = Box<dyn FnOnce(Option<&Engine>) + Send>;

/// An engine that runs on a thread of its own. Nothing here waits for it.
pub trait Door: Send + Sync {
    /// Hands a request over; returns its key. `listener` hears everything that happens to it, on the
    /// engine's thread.
    ///
    /// # Errors
    /// The engine does not keep up with what it is told, or has died.
    fn submit(&self, request: Request, listener: Listener) -> Result<u64, EngineError>;

    /// Ends a request at any state.
    fn end(&self, key: u64, reason: FinishReason);

    /// Ends one of several continuations of a request; the others go on.
    fn end_branch(&self, key: u64, branch: u32, reason: FinishReason);

    /// Has `look` called with the engine, between two of its turns.
    fn look(&self, look: Look);

    /// Microseconds since the engine's start: the clock of deadlines.
    fn now_us(&self) -> u64;

    /// Whether the engine's loop is running.
    fn is_alive(&self) -> bool;
}

impl Door for EngineHandle {
    fn submit(&self, request: Request, listener: Listener) -> Result<u64, EngineError> {
        EngineHandle::submit(self, request, listener)
    }

    fn end(&self, key: u64, reason: FinishReason) {
        EngineHandle::end(self, key, reason);
    }

    fn end_branch(&self, key: u64, branch: u32, reason: FinishReason) {
        EngineHandle::end_branch(self, key, branch, reason);
    }

    fn look(&self, look: Look) {
        EngineHandle::look(self, look)
    }

    fn now_us(&self) -> u64 {
        EngineHandle::now_us(self)
    }

    fn is_alive(&self) -> bool {
        EngineHandle::is_alive(self)
    }
}
