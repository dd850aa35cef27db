//! `reef-load rate`: tokens a second of many streams of one length, memory enough for all. Reef and the peer in turn,
//! so that what else the machine does meets both.

use std::path::Path;
use std::time::{Duration, Instant};

use fastrand::Rng;
use reef_load::exchange::{Answer, Client, Ending};
use reef_load::peer::Demand;
use reef_load::served::Served;
use reef_load::sse::Strictness;
use reef_load::traffic::Ask;
use reef_load::transcript::Wanted;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::programs::{Peers, Programs};

/// Token ids of prompts are drawn from these: plain words in the vocabularies of all models in use.
const IDS: std::ops::Range<u32> = 1000..20_000;
/// KV memory beyond what the requests hold: open blocks, tables, the reserve.
const ROOM: f64 = 1.25;
/// The same for few streams, in bytes.
const LEAST_ROOM: f64 = (8 << 20) as f64;

/// Tokens a second of many streams of one length, memory enough for all
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    programs: Programs,
    #[command(flatten)]
    peers: Peers,
    /// Streams at once
    #[arg(long, default_value_t = 32)]
    clients: usize,
    /// Requests of each client, one after the other
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Tokens generated
    #[arg(long, default_value_t = 128)]
    generate: usize,
    /// Runs of each server; medians are told
    #[arg(long, default_value_t = 1)]
    repetitions: usize,
}

/// One server's runs.
struct Rates {
    name: String,
    command: String,
    output_tok_s: Vec<f64>,
    decode_tok_s: Vec<f64>,
    ttft_ms: Vec<f64>,
}

/// Measures and tells.
///
/// # Errors
/// A server does not start, or does not answer a request in order.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let (model, bytes_per_token) = args.programs.model()?;
    let held = args.prompt + args.generate;
    let kv_bytes = (args.clients * held) as f64 * bytes_per_token * ROOM + LEAST_ROOM;
    let demand = Demand {
        kv_bytes: kv_bytes as u64,
        bytes_per_token,
        clients: args.clients,
        longest_tokens: held,
        threads: args.programs.threads,
    };
    let reef = args.programs.reef()?;
    let mut servers =
        vec![("reef".to_string(), reef, args.programs.serve(&model, demand.kv_bytes))];
    if let Some(peer) = &args.peers.peer {
        for way in args.peers.settings()? {
            let name = format!("llama-server {}", way.name);
            servers.push((name, peer.clone(), way.arguments(&model, &demand)));
        }
    }
    let mut rates: Vec<Rates> = servers.iter().map(|(name, ..)| Rates::new(name)).collect();
    for _ in 0..args.repetitions {
        for ((name, program, words), rates) in servers.iter().zip(&mut rates) {
            let log = args.programs.logs()?.join(name.replace(' ', "-")).with_extension("log");
            measure(&args, program, words, &log, rates).await?;
        }
    }
    let runs: Vec<Value> = rates.iter_mut().map(Rates::json).collect();
    match args.programs.json {
        true => println!("{}", json!({ "clients": args.clients, "runs": runs })),
        false => runs.iter().for_each(|run| println!("{run}")),
    }
    Ok(())
}

async fn measure(
    args: &Args,
    program: &Path,
    words: &[String],
    log: &Path,
    rates: &mut Rates,
) -> anyhow::Result<()> {
    let served = Served::start(program, words, log).await?;
    let model = served.model().await?;
    rates.command = served.command.clone();
    // The first step of a server is not like the others.
    streams(args, &served, &model, (1, 1, 8)).await?;
    let start = Instant::now();
    let answers =
        streams(args, &served, &model, (args.clients, args.rounds, args.generate)).await?;
    let seconds = start.elapsed().as_secs_f64();
    served.end().await?;
    let tokens: usize = answers.iter().map(|(_, answer)| answer.completion_tokens).sum();
    rates.output_tok_s.push(tokens as f64 / seconds);
    rates.decode_tok_s.extend(decode_rate(&answers));
    rates.ttft_ms.extend(answers.iter().map(|(_, answer)| answer.ttft_ms()));
    Ok(())
}

/// Answers with the number of their round.
async fn streams(
    args: &Args,
    served: &Served,
    model: &str,
    (clients, rounds, generate): (usize, usize, usize),
) -> anyhow::Result<Vec<(usize, Answer)>> {
    let mut running = JoinSet::new();
    for client in 0..clients {
        let asks: Vec<Ask> = (0..rounds)
            .map(|round| ask(model, (client * rounds + round) as u64, args.prompt, generate))
            .collect();
        let mut client =
            Client::new(served.address, Strictness::Standard, Duration::from_secs(300));
        running.spawn(async move {
            let mut answers = Vec::new();
            for (round, ask) in asks.iter().enumerate() {
                match client.exchange(ask).await {
                    Ending::Answered(answer) => answers.push((round, answer)),
                    Ending::Failed(fault) => return Err(fault),
                    Ending::Left => {}
                }
            }
            Ok(answers)
        });
    }
    let mut answers = Vec::new();
    while let Some(ended) = running.join_next().await {
        answers.extend(ended??);
    }
    Ok(answers)
}

fn ask(model: &str, seed: u64, prompt: usize, generate: usize) -> Ask {
    let mut rng = Rng::with_seed(seed);
    let ids: Vec<u32> = (0..prompt).map(|_| rng.u32(IDS)).collect();
    let wanted = Wanted {
        choices: 1,
        is_chat: false,
        max_tokens: generate,
        exactly: true,
        usage: true,
        continuous_usage: false,
        logprobs: false,
    };
    let body = json!({
        "model": model,
        "prompt": ids,
        "max_tokens": generate,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    let held_tokens = prompt + generate;
    Ask { path: "/v1/completions", body, wanted, leave: None, nap: None, known: None, held_tokens }
}

/// Tokens a second of all streams together, while all of the first round were being told.
fn decode_rate(answers: &[(usize, Answer)]) -> Option<f64> {
    let first = || answers.iter().filter(|(round, _)| *round == 0).map(|(_, answer)| answer);
    let start = first().filter_map(|answer| answer.tokens_at.first()).max()?;
    let end = first().filter_map(|answer| answer.tokens_at.last()).min()?;
    let seconds = end.checked_duration_since(*start)?.as_secs_f64();
    let within = |at: &&Instant| *at > start && *at <= end;
    let tokens: usize = first().map(|answer| answer.tokens_at.iter().filter(within).count()).sum();
    Some(tokens as f64 / seconds).filter(|_| seconds > 0.0)
}

impl Rates {
    fn new(name: &str) -> Rates {
        let (output_tok_s, decode_tok_s, ttft_ms) = Default::default();
        Rates { name: name.into(), command: String::new(), output_tok_s, decode_tok_s, ttft_ms }
    }

    fn json(&mut self) -> Value {
        json!({
            "name": self.name,
            "command": self.command,
            "output_tok_s": self.output_tok_s,
            "output_tok_s_median": median(&mut self.output_tok_s.clone()),
            "decode_tok_s": self.decode_tok_s,
            "decode_tok_s_median": median(&mut self.decode_tok_s.clone()),
            "ttft_ms_median": median(&mut self.ttft_ms),
        })
    }
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
