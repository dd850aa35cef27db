//! Whether requests can be served now.

use std::future::Future;

use tokio::sync::watch;

/// Where the server is in its life. It only ever goes forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// The model is being loaded.
    Loading,
    /// Requests are served.
    Ready,
    /// Told to stop: requests in flight finish, new ones are refused.
    Draining,
    /// The time for draining is over: streams end now, with what they have.
    CutOff,
    /// The engine has died: nothing more can be served.
    Dead,
}

impl State {
    /// One word, for `/health` and logs.
    pub fn name(self) -> &'static str {
        match self {
            State::Loading => "loading",
            State::Ready => "ready",
            State::Draining => "draining",
            State::CutOff => "stopping",
            State::Dead => "dead",
        }
    }
}

/// The [`State`], seen by all parts of the server.
#[derive(Debug)]
pub struct Readiness {
    state: watch::Sender<State>,
}

impl Default for Readiness {
    fn default() -> Readiness {
        Readiness { state: watch::Sender::new(State::Loading) }
    }
}

impl Readiness {
    /// The state now.
    pub fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Goes forward to `state`; going back is ignored: a server that drains does not become ready because
    /// its model has just been loaded.
    pub fn set(&self, state: State) {
        self.state.send_if_modified(|now| {
            let forward = state > *now;
            if forward {
                *now = state;
            }
            forward
        });
    }

    /// Whether `/health` is 200.
    pub fn is_ready(&self) -> bool {
        self.state() == State::Ready
    }

    /// Resolves as soon as the state is `state` or later. A stream races it for [`State::CutOff`] to tell
    /// its client why it ends.
    pub fn reached(&self, state: State) -> impl Future<Output = ()> + Send + use<> {
        let mut receiver = self.state.subscribe();
        async move {
            if receiver.wait_for(|now| *now >= state).await.is_err() {
                // The server is gone, and with it whoever would act on this.
                std::future::pending::<()>().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn states_go_forward_only_and_those_who_wait_hear_of_it() {
        let readiness = Readiness::default();
        assert!(!readiness.is_ready());
        let cut_off = tokio::spawn(readiness.reached(State::CutOff));
        readiness.set(State::Ready);
        assert!(readiness.is_ready());
        readiness.set(State::Draining);
        readiness.set(State::Ready);
        assert_eq!(readiness.state(), State::Draining);
        tokio::task::yield_now().await;
        assert!(!cut_off.is_finished());
        readiness.set(State::Dead);
        cut_off.await.unwrap();
        // Whoever asks late is answered at once.
        readiness.reached(State::Ready).await;
    }
}
