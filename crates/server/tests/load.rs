//! Strict clients over sockets, in a quarter of the KV memory that they need, some of whom go early: everyone else gets
//! a whole answer, exact requests the one that they get alone, and all memory comes back. With the real model; the
//! long version is `cargo xtask load`.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use reef_engine::stats::EngineStats;
use reef_engine::{Engine, EngineConfig, EngineHandle};
use reef_kernels::dispatch::Tier;
use reef_load::fleet::{self, Plan, Until};
use reef_load::sse::Strictness;
use reef_load::traffic::Traffic;
use reef_model::chat_template::ChatTemplate;
use reef_model::gguf::Gguf;
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};
use reef_model::tokenizer::Tokenizer;
use reef_server::grammar::Grammars;
use reef_server::lifecycle::{self, Stop, Stopper};
use reef_server::metrics::{ModelMetrics, Served};
use reef_server::{App, Model, Settings, http};

const CLIENTS: usize = 16;
/// Bytes of a token of SmolLM2 in f16.
const TOKEN_BYTES: f64 = 23_040.0;

/// The fetched model, where `reef pull` puts it, or `None` with a line that says so.
fn smollm2() -> Option<Gguf> {
    let folder = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = folder("REEF_HOME")
        .or_else(|| folder("XDG_CACHE_HOME").map(|path| path.join("reef")))
        .or_else(|| folder("HOME").map(|path| path.join(".cache/reef")));
    let path = home.unwrap_or_default().join("smollm2.gguf");
    if path.is_file() {
        return Some(Gguf::open(&path).expect("a fetched model opens"));
    }
    let text = "skipped: smollm2.gguf is not in the cache (`reef pull smollm2` fetches it)";
    // Written past the test harness, which hides what passing tests print.
    let _ = writeln!(std::io::stderr(), "{text}");
    None
}

/// A server on a thread of its own.
struct Server {
    address: SocketAddr,
    app: Arc<App>,
    /// Dropping it stops the server.
    _stopper: Stopper,
}

impl Server {
    fn start(gguf: &Gguf, budget_bytes: usize) -> Server {
        let tokenizer = Arc::new(Tokenizer::from_gguf(gguf).unwrap());
        let template = ChatTemplate::from_gguf(gguf, &tokenizer).unwrap();
        let options = RunnerOptions {
            threads: 2,
            tier: Tier::detect(),
            activations: Activations::Int8,
            block_size: 32,
            key_rotation: KeyRotation::None,
        };
        let runner = ModelRunner::load(gguf, options).unwrap();
        let context = runner.spec().trained_context;
        let config = EngineConfig::new(budget_bytes);
        let block_size = config.block_size;
        let engine = Engine::new(runner, config).unwrap();
        let app = Arc::new(App::new(Settings::new("smollm2")));
        let ends = tokenizer.vocabulary().end_of_generation();
        app.set_model(Model {
            metrics: ModelMetrics::new(Served::new("smollm2", &engine)),
            grammars: Arc::new(Grammars::new(tokenizer.clone(), ends)),
            root: "smollm2".into(),
            created: 1,
            context,
            budget_bytes,
            block_size,
            tokenizer,
            template: Some(Arc::new(template)),
            door: Arc::new(EngineHandle::spawn(engine).unwrap()),
        });
        let runtime = runtime();
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = runtime.block_on(async { lifecycle::bind(any_port) }).unwrap();
        let address = listener.local_addr().unwrap();
        let (stopper, stop) = Stop::told();
        let served =
            lifecycle::serve(listener, http::router(app.clone()), app.lifecycle.clone(), stop);
        std::thread::spawn(move || runtime.block_on(served));
        Server { address, app, _stopper: stopper }
    }

    fn stats(&self) -> EngineStats {
        let (sender, stats) = mpsc::channel();
        let door = &self.app.model().unwrap().door;
        door.look(Box::new(move |engine| sender.send(engine.unwrap().stats()).unwrap()));
        stats.recv().unwrap()
    }

    /// When nothing runs any more: those who went are noticed a moment later.
    fn stats_at_rest(&self) -> EngineStats {
        for _ in 0..1000 {
            let stats = self.stats();
            if stats.running + stats.waiting + stats.paused == 0 {
                return stats;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("still busy: {:?}", self.stats());
    }

    fn plan(&self, traffic: &Traffic) -> Plan {
        Plan {
            address: self.address,
            clients: CLIENTS,
            until: Until::Requests(3),
            patience: Duration::from_secs(300),
            strictness: Strictness::Strict,
            traffic: traffic.clone(),
            known_texts: Arc::default(),
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn nobody_fails_in_a_quarter_of_the_memory() {
    let Some(gguf) = smollm2() else { return };
    let traffic = Traffic::new(5, "smollm2", 0.2, 0.3);
    let needed = CLIENTS as f64 * traffic.mean_held_tokens() * TOKEN_BYTES;
    let alone = Server::start(&gguf, 256 << 20);
    let texts = runtime().block_on(fleet::run_known(&alone.plan(&traffic))).unwrap();
    drop(alone);

    let server = Server::start(&gguf, (needed / 4.0) as usize);
    let plan = Plan { known_texts: Arc::new(texts), ..server.plan(&traffic) };
    let tally = runtime().block_on(fleet::run(&plan));
    assert_eq!(tally.faults(), 0, "{:#?}", tally.examples);
    assert_eq!(tally.answered + tally.left, 3 * CLIENTS);
    assert!(tally.left > 0 && tally.compared > 0);
    assert_eq!(tally.compared, tally.equal);

    let stats = server.stats_at_rest();
    assert!(stats.counters.encoded_blocks > 0, "memory was never short: the test is too easy");
    assert_eq!(stats.counters.violations, 0);
    let accounts = stats.accounts;
    assert_eq!(accounts.held_bytes(), 0, "{accounts:?}");
    let known = accounts.used_bytes() + accounts.free_bytes + accounts.reserved_bytes;
    let lost = accounts.fenced_bytes;
    assert_eq!(lost, 0, "{accounts:?}");
    assert_eq!(
        known + accounts.fragmentation_bytes + accounts.table_bytes,
        accounts.budget_bytes,
        "{accounts:?}"
    );
}
