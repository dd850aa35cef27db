//! `reef-load hold`: loads `reef serve` in a part of the KV memory that its clients need, judges it, and gives a peer
//! the same traffic beside it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use reef_load::exchange::Client;
use reef_load::fleet::{self, Plan, Tally, Until};
use reef_load::peer::Demand;
use reef_load::resident::{self, Series};
use reef_load::rest::{self, Rest};
use reef_load::served::Served;
use reef_load::sse::Strictness;
use reef_load::traffic::Traffic;
use serde_json::{Value, json};

use crate::programs::{Peers, Programs};
use crate::verdict::{self, Check};

/// Requests of each client before it counts.
const WARM_UP_REQUESTS: usize = 3;

/// Many streaming clients in a part of the KV memory that they need
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    programs: Programs,
    #[command(flatten)]
    peers: Peers,
    /// Clients at once
    #[arg(long, default_value_t = 64)]
    clients: usize,
    /// Minutes during which requests are begun
    #[arg(long, default_value_t = 5.0)]
    minutes: f64,
    /// Part of the KV memory that all clients' requests need together
    #[arg(long, default_value_t = 0.25)]
    kv_fraction: f64,
    /// Share of the requests that are left before their end
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    disconnects: f64,
    /// Of what is asked, in what order, and who leaves when
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Factor of all lengths of prompts and texts
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Seconds that a client waits for something to come
    #[arg(long, default_value_t = 300)]
    patience_s: u64,
    /// Load only the peer
    #[arg(long, requires = "peer")]
    only_peer: bool,
}

/// The same for all servers of a run.
struct Setting {
    args: Args,
    model: PathBuf,
    demand: Demand,
    logs: PathBuf,
}

/// One server under load.
pub struct Run {
    name: String,
    command: String,
    ready_ms: f64,
    pub tally: Tally,
    pub memory: Series,
    cpu_seconds: Option<f64>,
    pub panics: Vec<String>,
    pub rest: Option<Rest>,
    pub has_ended_well: bool,
}

/// Whether all checks hold.
pub async fn run(args: Args) -> anyhow::Result<bool> {
    let setting = Setting::new(args)?;
    let mut runs = Vec::new();
    let mut checks = Vec::new();
    if !setting.args.only_peer {
        let texts = setting.known_texts().await?;
        let run = setting.load_reef(texts).await?;
        checks = verdict::judge(&run);
        runs.push(run);
    }
    if let Some(peer) = &setting.args.peers.peer {
        for way in setting.args.peers.settings()? {
            let words = way.arguments(&setting.model, &setting.demand);
            let name = format!("llama-server {}", way.name);
            runs.push(setting.load(name, peer, words, Strictness::Standard, vec![]).await?);
        }
    }
    match setting.args.programs.json {
        true => println!("{}", setting.document(&runs, &checks)),
        false => setting.print(&runs, &checks),
    }
    Ok(checks.iter().all(|check| check.holds))
}

impl Setting {
    fn new(args: Args) -> anyhow::Result<Setting> {
        ensure!(args.clients > 0, "--clients must be at least 1");
        ensure!((0.0..=1.0).contains(&args.disconnects), "--disconnects is a share from 0 to 1");
        ensure!(args.kv_fraction > 0.0, "--kv-fraction must be above 0");
        let (model, bytes_per_token) = args.programs.model()?;
        let traffic = traffic(&args, "");
        let needed = args.clients as f64 * traffic.mean_held_tokens() * bytes_per_token;
        let demand = Demand {
            kv_bytes: (needed * args.kv_fraction) as u64,
            bytes_per_token,
            clients: args.clients,
            longest_tokens: traffic.longest_held_tokens(),
            threads: args.programs.threads,
        };
        let logs = args.programs.logs()?;
        Ok(Setting { args, model, demand, logs })
    }

    /// Texts of the known requests from a server of its own, with room for all and nobody else there.
    async fn known_texts(&self) -> anyhow::Result<Vec<String>> {
        eprintln!("the known requests, alone");
        let roomy = (self.demand.bytes_per_token * 65_536.0) as u64;
        let words = self.args.programs.serve(&self.model, roomy);
        let served = Served::start(&self.args.programs.reef()?, &words, &self.log("alone")).await?;
        let plan = self.plan(&served, Strictness::Strict, vec![]).await?;
        let texts = fleet::run_known(&plan).await.context("a known request, alone")?;
        ensure!(served.end().await?, "reef serve did not end by itself when asked to");
        Ok(texts)
    }

    async fn load_reef(&self, texts: Vec<String>) -> anyhow::Result<Run> {
        let words = self.args.programs.serve(&self.model, self.demand.kv_bytes);
        self.load("reef".into(), &self.args.programs.reef()?, words, Strictness::Strict, texts)
            .await
    }

    /// Starts a server, loads it, looks at it at rest, and ends it.
    async fn load(
        &self,
        name: String,
        program: &Path,
        words: Vec<String>,
        strictness: Strictness,
        texts: Vec<String>,
    ) -> anyhow::Result<Run> {
        let mut served = Served::start(program, &words, &self.log(&name)).await?;
        let (clients, minutes) = (self.args.clients, self.args.minutes);
        eprintln!("{name}: ready, {clients} clients for {minutes} minutes");
        let plan = self.plan(&served, strictness, texts).await?;
        let warm_up = fleet::run(&warm_up(&plan)).await;
        let is_well = strictness == Strictness::Standard || warm_up.faults() == 0;
        ensure!(is_well, "{name} failed while it warmed up: {}", warm_up.examples.join("; "));
        let process = served.process();
        let cpu_before = resident::cpu_seconds(process);
        let mut memory = Series::default();
        let tally = tokio::select! {
            tally = fleet::run(&plan) => tally,
            () = memory.sample(process) => unreachable!("sampling ends with the load"),
        };
        let cpu_seconds =
            resident::cpu_seconds(process).zip(cpu_before).map(|(end, start)| end - start);
        ensure!(served.is_running(), "{name} died under load: {}", self.log(&name).display());
        let mut client = Client::new(plan.address, strictness, plan.patience);
        let rest = match strictness {
            Strictness::Strict => Some(rest::look(&mut client).await?),
            Strictness::Standard => None,
        };
        drop(client);
        let (command, ready_ms, panics) =
            (served.command.clone(), served.ready_ms, served.panics());
        let has_ended_well = served.end().await?;
        Ok(Run {
            name,
            command,
            ready_ms,
            tally,
            memory,
            cpu_seconds,
            panics,
            rest,
            has_ended_well,
        })
    }

    async fn plan(
        &self,
        served: &Served,
        strictness: Strictness,
        texts: Vec<String>,
    ) -> anyhow::Result<Plan> {
        let model = served.model().await?;
        let plan = Plan {
            address: served.address,
            clients: self.args.clients,
            until: Until::Elapsed(Duration::from_secs_f64(self.args.minutes * 60.0)),
            patience: Duration::from_secs(self.args.patience_s),
            strictness,
            traffic: traffic(&self.args, &model),
            known_texts: Arc::new(texts),
        };
        Ok(plan)
    }

    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(name.replace(' ', "-")).with_extension("log")
    }

    fn document(&self, runs: &[Run], checks: &[Check]) -> Value {
        let Demand { kv_bytes, bytes_per_token, longest_tokens, .. } = self.demand;
        json!({
            "clients": self.args.clients,
            "minutes": self.args.minutes,
            "seed": self.args.seed,
            "disconnects": self.args.disconnects,
            "kv_fraction": self.args.kv_fraction,
            "kv_bytes": kv_bytes,
            "kv_tokens_at_f16": (kv_bytes as f64 / bytes_per_token) as u64,
            "longest_request_tokens": longest_tokens,
            "runs": runs.iter().map(Run::json).collect::<Vec<_>>(),
            "checks": checks.iter().map(Check::json).collect::<Vec<_>>(),
        })
    }

    fn print(&self, runs: &[Run], checks: &[Check]) {
        let tokens = self.demand.kv_bytes as f64 / self.demand.bytes_per_token;
        println!(
            "{} clients, {} minutes, KV memory {} bytes ({tokens:.0} tokens at f16)",
            self.args.clients, self.args.minutes, self.demand.kv_bytes
        );
        for run in runs {
            println!("{}", run.line());
            run.tally.examples.iter().for_each(|example| println!("    {example}"));
        }
        for check in checks {
            println!(
                "{} {}: {}",
                if check.holds { "ok    " } else { "FAILED" },
                check.name,
                check.found
            );
        }
    }
}

impl Run {
    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "command": self.command,
            "ready_ms": self.ready_ms,
            "tally": self.tally.json(),
            "memory": self.memory.json(),
            "cpu_seconds": self.cpu_seconds,
            "panics": self.panics,
            "rest": self.rest.as_ref().map(Rest::json),
            "ended_well": self.has_ended_well,
        })
    }

    fn line(&self) -> String {
        let Tally { asked, answered, left, completion_tokens, .. } = self.tally;
        format!(
            "{}: {asked} asked, {answered} answered, {left} left, {} failed; {completion_tokens} tokens, \
             {:.0} tok/s; first token {:.0} ms in the middle, {:.0} ms p99; ready in {:.0} ms; at most \
             {:.0} MiB resident",
            self.name,
            self.tally.faults(),
            self.tally.tokens_per_second(),
            self.tally.ttft_percentile_ms(0.5).unwrap_or(f64::NAN),
            self.tally.ttft_percentile_ms(0.99).unwrap_or(f64::NAN),
            self.ready_ms,
            self.memory.most_bytes() / (1 << 20) as f64,
        )
    }
}

/// Short requests of all clients at once: buffers that are kept for as many as run grow before memory is looked at.
fn warm_up(plan: &Plan) -> Plan {
    let (until, traffic) = (Until::Requests(WARM_UP_REQUESTS), plan.traffic.short());
    Plan { until, traffic, known_texts: Arc::default(), ..plan.clone() }
}

fn traffic(args: &Args, model: &str) -> Traffic {
    Traffic::new(args.seed, model, args.disconnects, args.scale)
}
