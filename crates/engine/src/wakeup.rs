//! A thread that sleeps until somebody has something for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::executor::Waker;

/// How long to look before sleeping: a step of a small model may end sooner than a sleeping thread wakes.
const SPIN_TIME: Duration = Duration::from_micros(20);

/// Wakes the thread it was made on; a call before the wait is not lost.
#[derive(Clone)]
pub struct Wakeup {
    called: Arc<AtomicBool>,
    thread: Thread,
}

impl Wakeup {
    /// For the calling thread.
    pub fn of_this_thread() -> Wakeup {
        Wakeup { called: Arc::new(AtomicBool::new(false)), thread: std::thread::current() }
    }

    /// What others call.
    pub fn waker(&self) -> Waker {
        let Wakeup { called, thread } = self.clone();
        Arc::new(move || {
            called.store(true, Ordering::Release);
            thread.unpark();
        })
    }

    /// Waits until the waker was called since the last wait, at most `longest`.
    pub fn wait(&self, longest: Duration) {
        let start = Instant::now();
        while !self.called.swap(false, Ordering::Acquire) {
            let waited = start.elapsed();
            if waited >= longest {
                return;
            }
            if waited < SPIN_TIME {
                std::hint::spin_loop();
            } else {
                std::thread::park_timeout(longest - waited);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_before_the_wait_is_not_lost() {
        let wakeup = Wakeup::of_this_thread();
        let waker = wakeup.waker();
        waker();
        let start = Instant::now();
        wakeup.wait(Duration::from_secs(60));
        std::thread::spawn(move || waker());
        wakeup.wait(Duration::from_secs(60));
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
