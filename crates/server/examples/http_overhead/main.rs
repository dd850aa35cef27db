//! What the server costs: `http_overhead MODEL.gguf [STREAMS TOKENS]`. An engine that computes nothing tells tokens as
//! fast as they are taken, or at a fixed pace; clients in a process of their own read the streams over loopback
//! sockets. Printed: tokens a second; the server's time per token, on its own threads (CPU) and in the listeners that
//! it has on the engine's thread; and what it adds to the time to the first token.
//!
//! The tokenizer is the model's; its weights are not used.

mod client;
mod stub;

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reef_engine::Tenant;
use reef_load::resident;
use reef_model::chat_template::ChatTemplate;
use reef_model::gguf::Gguf;
use reef_model::tokenizer::{Encode, Tokenizer};
use reef_server::grammar::Grammars;
use reef_server::lifecycle::{self, Stop, Stopper};
use reef_server::metrics::{ModelMetrics, Served};
use reef_server::{App, Model, Settings, http};

use stub::{Pace, StubDoor};

/// What the streams say, again and again.
const TEXT: &str = "Memory is the budget of a server that keeps many conversations at once: each token that it \
    has seen leaves keys and values behind, and they must stay until the answer ends. ";
/// Time that an engine takes to the first token of an idle server's request.
const FIRST_TOKEN: Duration = Duration::from_millis(5);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [word, address, path, streams, tokens] = &words[..]
        && word == "read-streams"
    {
        let number = |text: &String| text.parse().expect("a number");
        return client::read_streams(
            address.parse().expect("an address"),
            path,
            number(streams),
            number(tokens),
        );
    }
    let (model, streams, tokens) = match &words[..] {
        [model] => (model, 64, 1000),
        [model, streams, tokens] => {
            (model, streams.parse().expect("STREAMS"), tokens.parse().expect("TOKENS"))
        }
        _ => panic!("give MODEL.gguf [STREAMS TOKENS]"),
    };
    let gguf = Gguf::open(model).expect("a model");
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf).expect("a tokenizer"));
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer).expect("a chat template");
    let server = Server::start(tokenizer, template);
    for path in ["/v1/completions", "/v1/chat/completions"] {
        println!("{path}");
        let step = Duration::from_millis(20);
        server.measure(path, "as fast as taken", streams, tokens, Pace::AsTaken);
        server.measure(path, "a token each 20 ms", streams, 250, Pace::Every(step));
        server.measure(path, "one stream, 2 ms", 1, 2500, Pace::Every(step / 10));
        server.measure_first_token(path, 200);
    }
}

/// A server on a thread of its own.
struct Server {
    address: SocketAddr,
    door: Arc<StubDoor>,
    /// Dropping it stops the server.
    _stopper: Stopper,
}

impl Server {
    fn start(tokenizer: Arc<Tokenizer>, template: ChatTemplate) -> Server {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let encoded = tokenizer.encode(TEXT, Encode { add_special: false, parse_special: false });
        let ids = encoded.expect("token ids");
        let door = StubDoor::start(ids, runtime.handle().clone());
        let app = Arc::new(App::new(Settings::new("stub")));
        app.set_model(Model {
            root: "stub".into(),
            created: 1,
            context: 1 << 20,
            budget_bytes: 1 << 30,
            block_size: 32,
            grammars: Arc::new(Grammars::new(tokenizer.clone(), &[])),
            metrics: ModelMetrics::new(Served {
                model_name: "stub".into(),
                max_model_len: 1 << 20,
                block_size: 32,
                f16_blocks: 1 << 15,
                prefix_caching: false,
                tenants: vec![Tenant::default()],
            }),
            tokenizer,
            template: Some(Arc::new(template)),
            door: door.clone(),
        });
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let bound = runtime.block_on(async { lifecycle::bind(any_port) });
        let listener = bound.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (stopper, stop) = Stop::told();
        let lifecycle = app.lifecycle.clone();
        std::thread::spawn(move || {
            runtime.block_on(lifecycle::serve(listener, http::router(app), lifecycle, stop))
        });
        Server { address, door, _stopper: stopper }
    }

    /// `streams` of `tokens` each, all at once.
    fn measure(&self, path: &str, name: &str, streams: usize, tokens: usize, pace: Pace) {
        self.door.set(pace, streams);
        let (cpu_before, stub_before) = (server_cpu(), stub_cpu());
        let program = std::env::current_exe().expect("this program");
        let words = [streams.to_string(), tokens.to_string()];
        let mut readers = Command::new(program);
        readers.args(["read-streams", &self.address.to_string(), path]).args(words);
        let ended = readers.status().expect("readers");
        assert!(ended.success(), "the readers failed");
        let told = self.door.told();
        let (count, seconds) = (told.tokens as f64, told.elapsed.as_secs_f64());
        let per_token = |time: Duration| time.as_secs_f64() * 1e6 / count;
        let (cpu, stub) = (server_cpu() - cpu_before, stub_cpu() - stub_before);
        println!(
            "  {name}: {streams} streams of {tokens}: {:.0} tok/s; us per token: {:.1} CPU of the server's threads, \
             {:.1} in listeners; {:.1} CPU of the stand-in's thread in all",
            count / seconds,
            per_token(cpu),
            per_token(told.telling),
            per_token(stub)
        );
    }

    /// Time to the first token beyond the engine's, of an idle server.
    fn measure_first_token(&self, path: &str, repetitions: usize) {
        self.door.set(Pace::Delayed(FIRST_TOKEN), 1);
        let mut connection = client::Kept::open(self.address);
        let mut over_ms = Vec::new();
        for repetition in 0..repetitions {
            let start = Instant::now();
            let first = connection.ask(path, 2);
            let engine = self.door.first_token();
            // The first ones warm up.
            if repetition >= repetitions / 10 {
                over_ms.push((first.duration_since(start) - engine).as_secs_f64() * 1e3);
            }
        }
        over_ms.sort_by(f64::total_cmp);
        let at = |part: f64| over_ms[((over_ms.len() - 1) as f64 * part) as usize];
        println!(
            "  first token beyond the engine's, idle: {:.2} ms in the middle, {:.2} ms p99",
            at(0.5),
            at(0.99)
        );
    }
}

/// CPU time of this process, threads that have ended included, but for the stand-in's thread.
fn server_cpu() -> Duration {
    let all = resident::cpu_seconds(std::process::id()).expect("Linux's /proc");
    Duration::from_secs_f64(all).saturating_sub(stub_cpu())
}

/// CPU time of the stand-in's thread, as the scheduler of Linux counts it.
fn stub_cpu() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux's /proc");
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| -> Option<u64> {
        let path = thread.ok()?.path();
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        let counts = std::fs::read_to_string(path.join("schedstat")).ok()?;
        let ran = counts.split_whitespace().next()?.parse().ok()?;
        (name.trim() == stub::THREAD).then_some(ran)
    };
    Duration::from_nanos(threads.filter_map(of_thread).sum())
}
