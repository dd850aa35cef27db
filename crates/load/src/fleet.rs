//! Many clients at once for some time, and what became of their requests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::exchange::{Answer, Client, Ending};
use crate::fault::Fault;
use crate::sse::Strictness;
use crate::traffic::{KNOWN_REQUESTS, Traffic};

/// Faults kept as examples, of each kind.
const EXAMPLES: usize = 3;

/// When a client has done enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After so long.
    Elapsed(Duration),
    /// After so many requests.
    Requests(usize),
}

/// What to run.
#[derive(Clone)]
pub struct Plan {
    /// Of the server.
    pub address: SocketAddr,
    /// Clients, each with one request at a time.
    pub clients: usize,
    /// Until when each client begins requests; those under way are then finished.
    pub until: Until,
    /// How long a client waits for something to come.
    pub patience: Duration,
    /// How answers are read.
    pub strictness: Strictness,
    /// What is asked.
    pub traffic: Traffic,
    /// Texts that the known requests get alone, by index; empty where they are not compared.
    pub known_texts: Arc<Vec<String>>,
}

/// What became of the requests.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Begun.
    pub asked: usize,
    /// Answered in order.
    pub answered: usize,
    /// Left by the client, as planned.
    pub left: usize,
    /// By kind of fault, see [`Fault::KINDS`].
    pub failed: [usize; Fault::KINDS.len()],
    /// The first of each kind.
    pub examples: Vec<String>,
    /// Of the answered ones.
    pub prompt_tokens: usize,
    /// Of the answered ones.
    pub completion_tokens: usize,
    /// Answers compared with the text that the request gets alone.
    pub compared: usize,
    /// Of these, equal.
    pub equal: usize,
    /// Kept connections that were found closed.
    pub reconnected: usize,
    /// Until the last answer ended.
    pub elapsed: Duration,
    /// To the first token, of each answer, in milliseconds.
    pub ttft_ms: Vec<f64>,
}

impl Tally {
    /// Requests that were not answered in order although nobody left.
    pub fn faults(&self) -> usize {
        self.failed.iter().sum()
    }

    /// Generated tokens of answered requests a second, to the end of the last one.
    pub fn tokens_per_second(&self) -> f64 {
        self.completion_tokens as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// The time to the first token that the share `part` (0 to 1) of the answers stays within, in
    /// milliseconds.
    pub fn ttft_percentile_ms(&self, part: f64) -> Option<f64> {
        let mut sorted = self.ttft_ms.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        sorted.get((last as f64 * part).round() as usize).copied()
    }

    /// As a JSON object.
    pub fn json(&self) -> Value {
        let kinds =
            Fault::KINDS.iter().zip(self.failed).map(|(kind, n)| (kind.to_string(), json!(n)));
        json!({
            "asked": self.asked,
            "answered": self.answered,
            "left": self.left,
            "failed": self.faults(),
            "failed_by_kind": Value::Object(kinds.collect()),
            "examples": self.examples,
            "compared": self.compared,
            "equal": self.equal,
            "reconnected": self.reconnected,
            "seconds": self.elapsed.as_secs_f64(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "tok_s": self.tokens_per_second(),
            "ttft_ms_median": self.ttft_percentile_ms(0.5),
            "ttft_ms_p99": self.ttft_percentile_ms(0.99),
        })
    }

    fn add(&mut self, plan: &Plan, known: Option<usize>, ending: Ending) {
        self.asked += 1;
        match ending {
            Ending::Left => self.left += 1,
            Ending::Failed(fault) => self.add_fault(fault),
            Ending::Answered(answer) => self.add_answer(plan, known, answer),
        }
    }

    fn add_fault(&mut self, fault: Fault) {
        let seen = &mut self.failed[fault.kind()];
        *seen += 1;
        if *seen <= EXAMPLES {
            self.examples.push(fault.to_string());
        }
    }

    fn add_answer(&mut self, plan: &Plan, known: Option<usize>, answer: Answer) {
        let alone = known.and_then(|index| plan.known_texts.get(index));
        if let (Some(alone), Some(text)) = (alone, answer.texts.first()) {
            self.compared += 1;
            self.equal += usize::from(alone == text);
            if alone != text && plan.strictness == Strictness::Strict {
                let index = known.unwrap_or_default();
                return self.add_fault(Fault::OtherText(difference(index, alone, text)));
            }
        }
        self.answered += 1;
        self.prompt_tokens += answer.prompt_tokens.unwrap_or(0);
        self.completion_tokens += answer.completion_tokens;
        self.ttft_ms.push(answer.ttft_ms());
    }

    fn merge(&mut self, other: Tally) {
        self.asked += other.asked;
        self.answered += other.answered;
        self.left += other.left;
        for (sum, count) in self.failed.iter_mut().zip(other.failed) {
            *sum += count;
        }
        let room = (EXAMPLES * Fault::KINDS.len()).saturating_sub(self.examples.len());
        self.examples.extend(other.examples.into_iter().take(room));
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.compared += other.compared;
        self.equal += other.equal;
        self.reconnected += other.reconnected;
        self.elapsed = self.elapsed.max(other.elapsed);
        self.ttft_ms.extend(other.ttft_ms);
    }
}

/// Where two texts part.
fn difference(index: usize, alone: &str, text: &str) -> String {
    let same = alone.chars().zip(text.chars()).take_while(|(a, b)| a == b).count();
    let rest = |text: &str| text.chars().skip(same).take(24).collect::<String>();
    format!(
        "known request {index}, from character {same}: {:?} alone, {:?}",
        rest(alone),
        rest(text)
    )
}

/// Runs the plan on the current runtime.
pub async fn run(plan: &Plan) -> Tally {
    let mut clients = JoinSet::new();
    for client in 0..plan.clients {
        clients.spawn(run_client(plan.clone(), client));
    }
    let mut tally = Tally::default();
    while let Some(ended) = clients.join_next().await {
        match ended {
            Ok(one) => tally.merge(one),
            Err(error) => tally.add_fault(Fault::Broken(format!("the client itself: {error}"))),
        }
    }
    tally
}

async fn run_client(plan: Plan, index: usize) -> Tally {
    let start = Instant::now();
    let mut tally = Tally::default();
    let mut client = Client::new(plan.address, plan.strictness, plan.patience);
    for number in 0.. {
        let enough = match plan.until {
            Until::Elapsed(duration) => start.elapsed() >= duration,
            Until::Requests(most) => number >= most,
        };
        if enough {
            break;
        }
        let ask = plan.traffic.ask(index, number);
        let ending = client.exchange(&ask).await;
        if let Ending::Failed(_) = ending {
            // A server that refuses everything at once is not to be asked in a tight loop.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        tally.add(&plan, ask.known, ending);
    }
    tally.elapsed = start.elapsed();
    tally.reconnected = client.reconnected;
    tally
}

/// The texts of the known requests, each run alone.
///
/// # Errors
/// One that was not answered in order.
pub async fn run_known(plan: &Plan) -> Result<Vec<String>, Fault> {
    let mut client = Client::new(plan.address, plan.strictness, plan.patience);
    let mut texts = Vec::new();
    for index in 0..KNOWN_REQUESTS {
        match client.exchange(&plan.traffic.known(index)).await {
            Ending::Answered(mut answer) => texts.push(answer.texts.swap_remove(0)),
            Ending::Failed(fault) => return Err(fault),
            Ending::Left => return Err(Fault::Broken("left, although nobody asked".into())),
        }
    }
    Ok(texts)
}
