//! Being told to stop.

use std::io;

use tokio::sync::watch;

/// How urgently the server is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stopping {
    /// Finish what is in flight first.
    Drain,
    /// At once.
    Now,
}

/// Hears that the server is to stop: from signals or from a [`Stopper`].
#[derive(Debug)]
pub struct Stop {
    source: Source,
    signals: u32,
}

#[derive(Debug)]
enum Source {
    Told(watch::Receiver<Option<Stopping>>),
    #[cfg(unix)]
    Signals {
        interrupt: tokio::signal::unix::Signal,
        terminate: tokio::signal::unix::Signal,
    },
    #[cfg(not(unix))]
    Interrupt,
}

/// Stops a server from within the program.
#[derive(Debug)]
pub struct Stopper(watch::Sender<Option<Stopping>>);

impl Stopper {
    /// Tells the server to stop; more urgent words outdo earlier ones.
    pub fn stop(&self, how: Stopping) {
        self.0.send_if_modified(|told| {
            let more = Some(how) > *told;
            *told = (*told).max(Some(how));
            more
        });
    }
}

impl Stop {
    /// SIGTERM or SIGINT (elsewhere: Ctrl-C) drains, a second one stops at once.
    ///
    /// # Errors
    /// The system does not let us listen for signals.
    pub fn on_signals() -> io::Result<Stop> {
        #[cfg(unix)]
        let source = {
            use tokio::signal::unix::{SignalKind, signal};
            Source::Signals {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
            }
        };
        #[cfg(not(unix))]
        let source = Source::Interrupt;
        Ok(Stop { source, signals: 0 })
    }

    /// For a server that is stopped from within the program. Dropping the [`Stopper`] drains.
    pub fn told() -> (Stopper, Stop) {
        let (sender, receiver) = watch::channel(None);
        (Stopper(sender), Stop { source: Source::Told(receiver), signals: 0 })
    }

    /// The next word. Cancel-safe.
    pub(super) async fn next(&mut self) -> Stopping {
        match &mut self.source {
            Source::Told(told) => {
                let changed = told.changed().await;
                let word = *told.borrow_and_update();
                match changed {
                    Ok(()) => return word.unwrap_or(Stopping::Drain),
                    Err(_) if self.signals == 0 => {}
                    // Told once that nobody is there any more.
                    Err(_) => std::future::pending().await,
                }
            }
            #[cfg(unix)]
            Source::Signals { interrupt, terminate } => {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
            }
            #[cfg(not(unix))]
            Source::Interrupt => {
                if tokio::signal::ctrl_c().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        }
        self.signals += 1;
        if self.signals == 1 { Stopping::Drain } else { Stopping::Now }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dropped_stopper_drains_once() {
        let (stopper, mut stop) = Stop::told();
        drop(stopper);
        assert_eq!(stop.next().await, Stopping::Drain);
        let again = tokio::time::timeout(std::time::Duration::from_millis(20), stop.next());
        assert!(again.await.is_err());
    }

    #[tokio::test]
    async fn the_more_urgent_word_counts() {
        let (stopper, mut stop) = Stop::told();
        stopper.stop(Stopping::Drain);
        assert_eq!(stop.next().await, Stopping::Drain);
        stopper.stop(Stopping::Now);
        stopper.stop(Stopping::Drain);
        assert_eq!(stop.next().await, Stopping::Now);
    }
}
