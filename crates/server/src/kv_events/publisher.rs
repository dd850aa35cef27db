//! The sockets, on a thread of their own.

use std::cell::RefCell;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use reef_engine::{Engine, PrefixListener};
use reef_kv::prefix::PrefixEvent;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use zeromq::{PubSocket, RouterRecvHalf, RouterSendHalf, RouterSocket, ZmqMessage};
use zeromq::{Socket, SocketRecv, SocketSend};

use super::advertised::{Advertised, AdvertisedRoot};
use super::ring::Ring;
use super::wire::{WireEvent, encode};
use super::{Endpoint, EventFormat, KvEventSettings};

/// Turns of the engine whose events may wait for this thread; then they wait in the cache.
const WAITING_TURNS: usize = 16;
/// Events of a batch at most; vllm-router refuses longer ones.
const BATCH_EVENTS: usize = 4096;
/// Tokens of a batch at most, unless one event has more: at most 5 MB. vllm-router refuses 16 MiB.
const BATCH_TOKENS: usize = 1 << 20;
/// How long a subscriber that asked for a replay may take to read one message of it.
const REPLAY_PATIENCE: Duration = Duration::from_secs(1);
/// How long the last batch may take to leave.
const LINGER: Duration = Duration::from_millis(100);
/// Ends a replay in place of a number: −1.
const END: [u8; 8] = [0xff; 8];

/// The sockets could not be had.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The system gives no thread or no runtime.
    #[error("KV events: {0}")]
    Thread(#[from] std::io::Error),
    /// An endpoint could not be bound.
    #[error("KV events: cannot listen at {endpoint}: {reason}")]
    Bind {
        /// Where.
        endpoint: Endpoint,
        /// Why.
        reason: String,
    },
}

/// Publishes what the prefix cache of one engine holds. Goes with a last `AllBlocksCleared` when it is
/// dropped.
#[derive(Debug)]
pub struct KvPublisher {
    endpoint: Endpoint,
    replay: Option<Endpoint>,
    /// Dropped: stop.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl KvPublisher {
    /// Binds the sockets and has `engine` tell them what its prefix cache does.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn attach(
        settings: &KvEventSettings,
        engine: &mut Engine,
    ) -> Result<KvPublisher, BindError> {
        let tenants = engine.config().tenants.iter();
        let told = tenants.zip(engine.prefix_roots()).filter_map(|(tenant, &root)| {
            let private = !tenant.salt.is_empty();
            let name = private.then(|| tenant.name.clone());
            (settings.private || !private).then_some(AdvertisedRoot { root, tenant: name })
        });
        let (publisher, listener) = KvPublisher::bind(settings, told.collect())?;
        engine.set_prefix_listener(listener);
        Ok(publisher)
    }

    /// Binds the sockets for texts that begin at `roots`. What the listener hears is published.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(
        settings: &KvEventSettings,
        roots: Vec<AdvertisedRoot>,
    ) -> Result<(KvPublisher, Box<dyn PrefixListener>), BindError> {
        let (sender, events) = mpsc::channel(WAITING_TURNS);
        let (stop, stopped) = oneshot::channel();
        let (binding, bound) = std::sync::mpsc::channel();
        let (settings, state) = (settings.clone(), Batches::new(settings, roots));
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(binding.send(Err(error.into()))),
            };
            runtime.block_on(async {
                let sockets = Sockets::bind(&settings).await;
                match sockets {
                    Ok((sockets, endpoints)) => {
                        // Who asked waits for it.
                        let _ = binding.send(Ok(endpoints));
                        serve(RefCell::new(state), sockets, events, stopped).await;
                    }
                    Err(error) => drop(binding.send(Err(error))),
                }
            });
        };
        let thread = std::thread::Builder::new().name("reef-kv-events".into()).spawn(run)?;
        let (endpoint, replay) = bound.recv().map_err(std::io::Error::other)??;
        let publisher = KvPublisher { endpoint, replay, stop: Some(stop), thread: Some(thread) };
        Ok((publisher, Box::new(Tap { sender })))
    }

    /// Where the PUB socket listens.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// Where replays are asked for.
    pub fn replay_endpoint(&self) -> Option<Endpoint> {
        self.replay
    }
}

impl Drop for KvPublisher {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // It has panicked where that fails; nobody waits for its word.
            let _ = thread.join();
        }
    }
}

struct Sockets {
    publish: PubSocket,
    replay: Option<RouterSocket>,
}

impl Sockets {
    /// The sockets, and where they listen.
    async fn bind(
        settings: &KvEventSettings,
    ) -> Result<(Sockets, (Endpoint, Option<Endpoint>)), BindError> {
        let mut publish = PubSocket::new();
        let endpoint = bind(&mut publish, settings.endpoint).await?;
        let (mut replay, mut replay_endpoint) = (None, None);
        if let Some(endpoint) = settings.replay {
            let mut socket = RouterSocket::new();
            replay_endpoint = Some(bind(&mut socket, endpoint).await?);
            replay = Some(socket);
        }
        Ok((Sockets { publish, replay }, (endpoint, replay_endpoint)))
    }
}

async fn bind(socket: &mut impl Socket, endpoint: Endpoint) -> Result<Endpoint, BindError> {
    let failed = |reason: String| BindError::Bind { endpoint, reason };
    let bound = socket.bind(&endpoint.to_string()).await;
    bound.map_err(|error| failed(error.to_string()))?.to_string().parse().map_err(failed)
}

/// The engine's side.
struct Tap {
    sender: mpsc::Sender<Vec<PrefixEvent>>,
}

impl PrefixListener for Tap {
    fn is_ready(&self) -> bool {
        // Only this side fills the channel. Where nobody listens any more, nothing need be recorded.
        self.sender.capacity() > 0 && !self.sender.is_closed()
    }

    fn hear(&mut self, events: Vec<PrefixEvent>) {
        // There was room, and without a receiver nobody wants them.
        let _ = self.sender.try_send(events);
    }
}

/// What is sent, and what was.
#[derive(Debug)]
struct Batches {
    topic: Bytes,
    format: EventFormat,
    advertised: Advertised,
    ring: Ring,
}

impl Batches {
    fn new(settings: &KvEventSettings, roots: Vec<AdvertisedRoot>) -> Batches {
        Batches {
            topic: settings.topic.clone().into_bytes().into(),
            format: settings.format,
            advertised: Advertised::new(roots),
            ring: Ring::default(),
        }
    }

    /// The messages that tell of `events`.
    fn messages(&mut self, events: &[WireEvent]) -> Vec<ZmqMessage> {
        let mut messages = Vec::new();
        for part in parts(events) {
            let Some(payload) = self.encode(part) else { continue };
            let number = Bytes::copy_from_slice(&self.ring.next().to_be_bytes());
            self.ring.push(payload.clone());
            messages.extend(ZmqMessage::try_from(vec![self.topic.clone(), number, payload]));
        }
        messages
    }

    fn encode(&self, events: &[WireEvent]) -> Option<Bytes> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let encoded = encode(events, now.as_secs_f64(), self.format);
        encoded.inspect_err(|error| tracing::error!("a batch of KV events: {error}")).ok()
    }

    /// The batches from number `start` on; where they are not all kept, as many as it takes to tell
    /// everything, under the latest numbers.
    fn since(&self, start: u64) -> Vec<(u64, Bytes)> {
        if let Some(kept) = self.ring.since(start) {
            return kept;
        }
        let everything = self.advertised.everything();
        let (next, mut parts) = (self.ring.next(), parts(&everything));
        if parts.len() as u64 > next - start {
            // Too few numbers.
            parts = vec![&everything];
        }
        let first = next - parts.len() as u64;
        let payloads = parts.into_iter().map_while(|part| self.encode(part));
        (first..).zip(payloads).collect()
    }

    /// One message of a replay to `client`.
    fn replayed(&self, client: &Bytes, topic: &Bytes, number: &[u8], payload: Bytes) -> ZmqMessage {
        let mut message = ZmqMessage::from(client.clone());
        message.push_back(Bytes::new());
        if self.format == EventFormat::Map {
            message.push_back(topic.clone());
        }
        message.push_back(Bytes::copy_from_slice(number));
        message.push_back(payload);
        message
    }
}

/// `events` in runs that a subscriber takes as one batch.
fn parts(events: &[WireEvent]) -> Vec<&[WireEvent]> {
    let mut parts = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (index, event) in events.iter().enumerate() {
        let full = index - start >= BATCH_EVENTS || tokens + event.tokens() > BATCH_TOKENS;
        if full && index > start {
            parts.push(&events[start..index]);
            (start, tokens) = (index, 0);
        }
        tokens += event.tokens();
    }
    if start < events.len() {
        parts.push(&events[start..]);
    }
    parts
}

async fn serve(
    state: RefCell<Batches>,
    sockets: Sockets,
    mut events: mpsc::Receiver<Vec<PrefixEvent>>,
    stopped: oneshot::Receiver<()>,
) {
    let Sockets { mut publish, replay } = sockets;
    let publishing = async {
        while let Some(first) = events.recv().await {
            let mut out = Vec::new();
            state.borrow_mut().advertised.follow(first, &mut out);
            while let Ok(next) = events.try_recv() {
                state.borrow_mut().advertised.follow(next, &mut out);
            }
            send(&state, &mut publish, &out).await;
        }
        // The engine has gone, and its cache with it.
        withdraw(&state, &mut publish).await;
        std::future::pending::<()>().await;
    };
    let replaying = async {
        if let Some(socket) = replay {
            let (sending, receiving) = socket.split();
            serve_replays(&state, sending, receiving).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = publishing => {}
        () = replaying => {}
        _ = stopped => {}
    }
    withdraw(&state, &mut publish).await;
    tokio::time::sleep(LINGER).await;
}

/// Publishes a batch. Subscribers that do not keep up lose it; their queues are bounded.
async fn send(state: &RefCell<Batches>, publish: &mut PubSocket, events: &[WireEvent]) {
    let messages = state.borrow_mut().messages(events);
    for message in messages {
        if let Err(error) = publish.send(message).await {
            tracing::warn!("KV events: {error}");
        }
    }
}

/// Tells that nothing is there any more, where anything was.
async fn withdraw(state: &RefCell<Batches>, publish: &mut PubSocket) {
    let mut out = Vec::new();
    if state.borrow().advertised.count() > 0 {
        state.borrow_mut().advertised.follow(vec![PrefixEvent::Cleared], &mut out);
    }
    send(state, publish, &out).await;
}

/// Answers those who ask for past batches, one after another.
async fn serve_replays(
    state: &RefCell<Batches>,
    mut sending: RouterSendHalf,
    mut receiving: RouterRecvHalf,
) {
    loop {
        let frames = match receiving.recv().await {
            Ok(message) => message.into_vec(),
            Err(error) => {
                tracing::warn!("KV events, replay: {error}");
                return;
            }
        };
        // Who asks, an empty frame (of which a DEALER must send one itself), a number.
        let [client, _, start] = &frames[..] else {
            tracing::debug!("KV events: a replay request of {} frames", frames.len());
            continue;
        };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]) else {
            tracing::debug!("KV events: a replay request whose number has {} bytes", start.len());
            continue;
        };
        let messages = {
            let state = state.borrow();
            let batches = state.since(u64::from_be_bytes(start));
            let past = batches.into_iter().map(|(number, payload)| {
                state.replayed(client, &state.topic, &number.to_be_bytes(), payload)
            });
            let end = state.replayed(client, &Bytes::new(), &END, Bytes::new());
            past.chain([end]).collect::<Vec<ZmqMessage>>()
        };
        for message in messages {
            match timeout(REPLAY_PATIENCE, sending.send(message)).await {
                Ok(Ok(())) => {}
                // It has gone, or does not read.
                Ok(Err(_)) | Err(_) => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_cut_where_subscribers_refuse_longer_ones() {
        let event = |tokens: usize| WireEvent::stored(1, None, &vec![0; tokens], None);
        let sizes = |events: &[WireEvent]| parts(events).iter().map(|part| part.len()).collect();
        let sizes: &dyn Fn(&[WireEvent]) -> Vec<usize> = &sizes;
        assert_eq!(sizes(&[]), [0; 0]);
        let many: Vec<WireEvent> = (0..2 * BATCH_EVENTS + 1).map(|_| event(1)).collect();
        assert_eq!(sizes(&many), [BATCH_EVENTS, BATCH_EVENTS, 1]);
        let (third, more) = (BATCH_TOKENS / 3, BATCH_TOKENS + 1);
        let long: Vec<WireEvent> = [third, third, third, third, more, 1].map(event).into();
        assert_eq!(sizes(&long), [3, 1, 1, 1]);
    }
}
