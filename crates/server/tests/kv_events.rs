//! KV events over real sockets, as a router's subscriber sees them.

use std::time::Duration;

use bytes::Bytes;
use reef_engine::PrefixListener;
use reef_kv::Fidelity;
use reef_kv::prefix::{BlockHash, PrefixEvent, PrefixRoot};
use reef_server::kv_events::advertised::AdvertisedRoot;
use reef_server::kv_events::{EventFormat, KvEventSettings, KvPublisher};
use serde_json::{Value, json};
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

const ROOT: [u8; 32] = [9; 32];
const PATIENCE: Duration = Duration::from_secs(20);

fn settings(format: EventFormat, topic: &str) -> KvEventSettings {
    let any = "tcp://127.0.0.1:0".parse().unwrap();
    KvEventSettings {
        endpoint: any,
        replay: Some(any),
        topic: topic.into(),
        format,
        private: false,
    }
}

fn publisher(settings: &KvEventSettings) -> (KvPublisher, Box<dyn PrefixListener>) {
    let root = AdvertisedRoot { root: PrefixRoot(ROOT), tenant: None };
    KvPublisher::bind(settings, vec![root]).unwrap()
}

/// A block of two tokens; its name to subscribers is `number` in each of 8 bytes.
fn stored(number: u8, parent: Option<u8>) -> PrefixEvent {
    PrefixEvent::Stored {
        hash: BlockHash([number; 32]),
        parent: BlockHash(parent.map_or(ROOT, |parent| [parent; 32])),
        tokens: vec![u32::from(number), 70_000],
        fidelity: Fidelity::Exact,
        whole: true,
    }
}

fn name(number: u8) -> u64 {
    u64::from_be_bytes([number; 8])
}

fn number_of(frame: &Bytes) -> i64 {
    i64::from_be_bytes(frame[..].try_into().unwrap())
}

async fn receive(socket: &mut impl SocketRecv) -> Vec<Bytes> {
    timeout(PATIENCE, socket.recv()).await.expect("nothing comes").unwrap().into_vec()
}

/// Number and events of a batch.
fn batch(frames: &[Bytes]) -> (i64, Value) {
    let [number, payload] = frames else { panic!("{} frames", frames.len()) };
    let payload: Value = rmp_serde::from_slice(payload).unwrap();
    let [time, events, rank] = &payload.as_array().unwrap()[..] else { panic!("{payload}") };
    assert!(time.as_f64().unwrap() > 1.6e9 && rank == 0, "{payload}");
    (number_of(number), events.clone())
}

/// Says something until the subscriber hears it: before, nobody has told the publisher of it. Returns the
/// number of the last batch.
async fn joined(sub: &mut SubSocket, tap: &mut dyn PrefixListener) -> i64 {
    let mut last = None;
    for _ in 0..2000 {
        tap.hear(vec![PrefixEvent::Cleared]);
        let heard = timeout(Duration::from_millis(10), sub.recv()).await;
        if let Ok(message) = heard {
            last = Some(number_of(&message.unwrap().into_vec()[1]));
            break;
        }
    }
    let mut last = last.expect("never joined");
    while let Ok(message) = timeout(Duration::from_millis(200), sub.recv()).await {
        last = number_of(&message.unwrap().into_vec()[1]);
    }
    last
}

async fn subscriber(publisher: &KvPublisher, topic: &str) -> SubSocket {
    let mut sub = SubSocket::new();
    sub.connect(&publisher.endpoint().to_string()).await.unwrap();
    sub.subscribe(topic).await.unwrap();
    sub
}

/// Asks for the batches from `start` on; returns the frames behind the empty one of each answer.
async fn replayed(publisher: &KvPublisher, start: u64) -> Vec<Vec<Bytes>> {
    let mut dealer = DealerSocket::new();
    dealer.connect(&publisher.replay_endpoint().unwrap().to_string()).await.unwrap();
    let mut request = ZmqMessage::from(Bytes::new());
    request.push_back(Bytes::copy_from_slice(&start.to_be_bytes()));
    dealer.send(request).await.unwrap();
    let mut answers = Vec::new();
    loop {
        let mut frames = receive(&mut dealer).await;
        assert!(frames.remove(0).is_empty());
        let number = number_of(&frames[frames.len() - 2]);
        if number == -1 {
            assert!(frames.iter().filter(|frame| frame.is_empty()).count() >= frames.len() - 1);
            return answers;
        }
        answers.push(frames);
    }
}

#[tokio::test]
async fn what_happens_in_the_cache_is_heard_in_vllms_maps() {
    let (publisher, mut tap) = publisher(&settings(EventFormat::Map, "kv@pod@model"));
    let mut sub = subscriber(&publisher, "kv@pod").await;
    let before = joined(&mut sub, &mut *tap).await;
    tap.hear(vec![stored(1, None), stored(2, Some(1))]);
    let frames = receive(&mut sub).await;
    assert_eq!(&frames[0][..], b"kv@pod@model");
    let (number, events) = batch(&frames[1..]);
    assert_eq!(number, before + 1);
    let wanted = json!([{
        "type": "BlockStored", "block_hashes": [name(1), name(2)], "parent_block_hash": null,
        "token_ids": [1, 70_000, 2, 70_000], "block_size": 2, "lora_id": null, "medium": "GPU",
        "lora_name": null
    }]);
    assert_eq!(events, wanted);
    tap.hear(vec![stored(3, Some(2)), PrefixEvent::Removed { hash: BlockHash([3; 32]) }]);
    tap.hear(vec![PrefixEvent::Cleared]);
    let mut heard = Vec::new();
    while heard.last() != Some(&json!({"type": "AllBlocksCleared"})) {
        let (_, events) = batch(&receive(&mut sub).await[1..]);
        heard.extend(events.as_array().unwrap().iter().cloned());
    }
    // Where both calls became one batch, what was cleared is not told.
    if heard.len() > 1 {
        assert_eq!(heard[0]["parent_block_hash"], name(2));
        let removed = json!({"type": "BlockRemoved", "block_hashes": [name(3)], "medium": "GPU"});
        assert_eq!(heard[1], removed);
    }
}

#[tokio::test]
async fn a_gap_is_seen_in_the_numbers_and_filled_by_a_replay() {
    for format in [EventFormat::Map, EventFormat::Array] {
        let (publisher, mut tap) = publisher(&settings(format, "t"));
        let mut sub = subscriber(&publisher, "").await;
        let before = joined(&mut sub, &mut *tap).await;
        drop(sub);
        // Missed, one batch each.
        for number in 1..=3 {
            tap.hear(vec![stored(number, (number > 1).then(|| number - 1))]);
            while replayed(&publisher, (before + i64::from(number)) as u64).await.is_empty() {}
        }
        let mut sub = subscriber(&publisher, "t").await;
        let mut next = 4;
        let first_heard = loop {
            tap.hear(vec![stored(next, Some(next - 1))]);
            next += 1;
            match timeout(Duration::from_millis(10), sub.recv()).await {
                Ok(message) => break number_of(&message.unwrap().into_vec()[1]),
                Err(_) => assert!(next < 250, "never joined"),
            }
        };
        assert!(first_heard > before + 3, "no gap");
        let answers = replayed(&publisher, before as u64 + 1).await;
        let mut blocks = Vec::new();
        for (answer, wanted) in answers.iter().zip(before + 1..) {
            let frames = match format {
                EventFormat::Map => {
                    assert_eq!(&answer[0][..], b"t");
                    &answer[1..]
                }
                EventFormat::Array => &answer[..],
            };
            let (number, events) = batch(frames);
            assert_eq!(number, wanted);
            let event = &events[0];
            let (kind, hashes) = match format {
                EventFormat::Map => (&event["type"], &event["block_hashes"]),
                EventFormat::Array => (&event[0], &event[1]),
            };
            assert_eq!(kind, "BlockStored");
            blocks.extend(hashes.as_array().unwrap().iter().map(|hash| hash.as_u64().unwrap()));
        }
        let all: Vec<u64> = (1..).map(name).take(blocks.len()).collect();
        assert!(blocks == all && blocks.len() >= 3, "{blocks:?}");
    }
}

#[tokio::test]
async fn who_asks_for_what_is_no_longer_kept_gets_everything_at_once() {
    let (publisher, mut tap) = publisher(&settings(EventFormat::Map, ""));
    tap.hear(vec![PrefixEvent::Cleared, stored(1, None)]);
    // Larger than all that is kept together.
    let many = PrefixEvent::Stored {
        hash: BlockHash([77; 32]),
        parent: BlockHash(ROOT),
        tokens: vec![u32::MAX; 4 << 20],
        fidelity: Fidelity::Exact,
        whole: true,
    };
    while !tap.is_ready() {}
    tap.hear(vec![many]);
    tap.hear(vec![PrefixEvent::Removed { hash: BlockHash([77; 32]) }, stored(2, Some(1))]);
    let answers = loop {
        let answers = replayed(&publisher, 0).await;
        let (number, events) = batch(&answers[0][1..]);
        if answers.len() == 1 && events[0]["type"] == "AllBlocksCleared" && number > 0 {
            break answers;
        }
    };
    let (number, events) = batch(&answers[0][1..]);
    assert_eq!(events[1]["block_hashes"], json!([name(1), name(2)]));
    assert_eq!(events.as_array().unwrap().len(), 2);
    // It stands for everything up to its number: nothing comes behind.
    assert_eq!(replayed(&publisher, number as u64 + 1).await, Vec::<Vec<Bytes>>::new());
}

#[tokio::test]
async fn nonsense_asked_for_a_replay_is_not_answered_and_harms_nobody() {
    let (publisher, mut tap) = publisher(&settings(EventFormat::Map, ""));
    tap.hear(vec![stored(1, None)]);
    let mut dealer = DealerSocket::new();
    dealer.connect(&publisher.replay_endpoint().unwrap().to_string()).await.unwrap();
    for frames in
        [vec![&b""[..]], vec![b"", b"short"], vec![b"a", b"b", b"c", b"d"], vec![b"12345678"]]
    {
        let frames: Vec<Bytes> = frames.into_iter().map(Bytes::copy_from_slice).collect();
        dealer.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    }
    assert!(timeout(Duration::from_millis(100), dealer.recv()).await.is_err());
    while replayed(&publisher, 0).await.len() != 1 {}
}

#[tokio::test]
async fn a_last_batch_clears_and_an_engine_is_never_held_up() {
    let (publisher, mut tap) = publisher(&settings(EventFormat::Map, ""));
    let mut sub = subscriber(&publisher, "").await;
    joined(&mut sub, &mut *tap).await;
    // Nobody reads: the listener takes what it can and says when it cannot.
    let start = std::time::Instant::now();
    let mut taken = 0;
    for _ in 0..100_000 {
        if tap.is_ready() {
            tap.hear(vec![stored(1, None), PrefixEvent::Removed { hash: BlockHash([1; 32]) }]);
            taken += 1;
        }
    }
    assert!(start.elapsed() < Duration::from_secs(10) && taken > 0);
    while !tap.is_ready() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tap.hear(vec![stored(2, None)]);
    let drop_it = tokio::task::spawn_blocking(move || drop(publisher));
    let mut last = Value::Null;
    while let Ok(Ok(message)) = timeout(Duration::from_secs(2), sub.recv()).await {
        let (_, events) = batch(&message.into_vec()[1..]);
        last = events.as_array().unwrap().last().unwrap().clone();
        if last == json!({"type": "AllBlocksCleared"}) {
            break;
        }
    }
    assert_eq!(last, json!({"type": "AllBlocksCleared"}));
    drop_it.await.unwrap();
    assert!(!tap.is_ready(), "nothing is recorded for nobody");
}

#[test]
fn an_endpoint_that_is_taken_is_named() {
    let (first, _tap) = publisher(&settings(EventFormat::Map, ""));
    let taken = KvEventSettings { endpoint: first.endpoint(), ..settings(EventFormat::Map, "") };
    let error = KvPublisher::bind(&taken, Vec::new()).err().unwrap().to_string();
    assert!(error.contains(&format!("cannot listen at {}", first.endpoint())), "{error}");
}
