//! At the cut-off requests end with what they have: their streams say so, and are whole.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use reef_engine::event::Event;
use reef_engine::handle::Listener;
use reef_engine::{EngineError, FinishReason, Request};

use crate::door::{Door, Look};

/// The door whose requests are ended at the cut-off, once there is one.
#[derive(Default)]
pub(super) struct LastWords(OnceLock<Arc<EndingDoor>>);

impl LastWords {
    /// A door to what is behind `door`, whose requests this can end. Only the first one is heard of.
    pub(super) fn watch(&self, door: Arc<dyn Door>) -> Arc<dyn Door> {
        let (next, live) = (AtomicU64::new(0), Arc::default());
        self.0.get_or_init(|| Arc::new(EndingDoor { door, next, live })).clone()
    }

    /// Ends all that is going on.
    pub(super) fn end_all(&self) {
        if let Some(door) = self.0.get() {
            let keys: Vec<u64> = door.live().values().filter_map(|key| *key).collect();
            keys.into_iter().for_each(|key| door.door.end(key, FinishReason::Cancelled));
        }
    }
}

impl fmt::Debug for LastWords {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let live = self.0.get().map(|door| door.live().len());
        formatter.debug_struct("LastWords").field("live", &live).finish()
    }
}

/// Keys of requests that have not ended, by a number of ours: the engine may tell of the end before it has
/// told the key.
type LiveRequests = Mutex<HashMap<u64, Option<u64>>>;

/// Knows who has not ended.
struct EndingDoor {
    door: Arc<dyn Door>,
    next: AtomicU64,
    live: Arc<LiveRequests>,
}

impl EndingDoor {
    fn live(&self) -> MutexGuard<'_, HashMap<u64, Option<u64>>> {
        lock(&self.live)
    }
}

fn lock(live: &LiveRequests) -> MutexGuard<'_, HashMap<u64, Option<u64>>> {
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Door for EndingDoor {
    fn submit(&self, request: Request, mut listener: Listener) -> Result<u64, EngineError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.live().insert(number, None);
        let live = self.live.clone();
        let listener = Box::new(move |event| {
            let last = matches!(event, Event::Finished(_) | Event::Failed(_));
            let listens = listener(event);
            if last || !listens {
                lock(&live).remove(&number);
            }
            listens
        });
        let submitted = self.door.submit(request, listener);
        let mut live = self.live();
        match &submitted {
            Ok(key) => {
                // None: it has ended meanwhile.
                live.get_mut(&number).into_iter().for_each(|of| *of = Some(*key));
            }
            Err(_) => {
                live.remove(&number);
            }
        }
        submitted
    }

    fn end(&self, key: u64, reason: FinishReason) {
        self.door.end(key, reason);
    }

    fn end_branch(&self, key: u64, branch: u32, reason: FinishReason) {
        self.door.end_branch(key, branch, reason);
    }

    fn look(&self, look: Look) {
        self.door.look(look);
    }

    fn now_us(&self) -> u64 {
        self.door.now_us()
    }

    fn is_alive(&self) -> bool {
        self.door.is_alive()
    }
}
