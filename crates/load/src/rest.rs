//! What a server says of itself when nobody asks anything of it any more: all memory must be back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::exchange::Client;

/// How long a server may take to notice that the last client has gone.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);

/// Requests running and waiting, as `/metrics` names them in vLLM's words.
const RUNNING: &str = "vllm:num_requests_running";
const WAITING: &str = "vllm:num_requests_waiting";

/// What was found at rest.
#[derive(Clone, Debug)]
pub struct Rest {
    /// `/v1/pool`.
    pub pool: Value,
    /// Requests inside, by `/metrics` and by `/v1/pool` together.
    pub requests: f64,
    /// Names of counters of broken invariants that are not 0, by `/metrics`.
    pub violations: Vec<String>,
}

/// Waits until nothing runs, then looks at the pool.
///
/// # Errors
/// The server does not answer, or says something else than expected.
pub async fn look(client: &mut Client) -> anyhow::Result<Rest> {
    let start = Instant::now();
    loop {
        let metrics = get(client, "/metrics").await?;
        let running = sum(&metrics, RUNNING).context("/metrics has no running requests")?;
        let waiting = sum(&metrics, WAITING).context("/metrics has no waiting requests")?;
        let pool: Value = serde_json::from_str(&get(client, "/v1/pool").await?)?;
        let inside = ["running", "waiting", "paused"].map(|state| pool[state].as_f64());
        let inside = inside.into_iter().try_fold(0.0, |sum, count| Some(sum + count?));
        let inside = inside.context("/v1/pool does not tell running, waiting and paused")?;
        let requests = running + waiting + inside;
        if requests > 0.0 && start.elapsed() < SETTLE_LIMIT {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        }
        return Ok(Rest { pool, requests, violations: violations(&metrics) });
    }
}

async fn get(client: &mut Client, path: &str) -> anyhow::Result<String> {
    let (status, body) = client.fetch("GET", path, "").await?;
    ensure!(status == 200, "{path} answers {status}");
    String::from_utf8(body).with_context(|| format!("{path} is no UTF-8"))
}

/// The sum over all labels of one metric; `None` where it is missing.
pub fn sum(metrics: &str, name: &str) -> Option<f64> {
    let values = samples(metrics).filter(|(sample, _)| *sample == name).map(|(_, value)| value);
    values.reduce(|sum, value| sum + value)
}

fn violations(metrics: &str) -> Vec<String> {
    let broken = samples(metrics).filter(|(name, value)| {
        name.starts_with("reef:") && name.contains("violation") && *value != 0.0
    });
    broken.map(|(name, value)| format!("{name} {value}")).collect()
}

/// Names and values of the samples of a page of metrics.
fn samples(metrics: &str) -> impl Iterator<Item = (&str, f64)> {
    metrics.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        // Label values may hold blanks; behind the brace they end.
        let (name, rest) = line.split_once(['{', ' '])?;
        let value = rest.rsplit_once('}').map_or(rest, |(_, value)| value);
        Some((name, value.split_whitespace().next()?.parse().ok()?))
    })
}

impl Rest {
    /// As a JSON object.
    pub fn json(&self) -> Value {
        json!({ "pool": self.pool, "requests": self.requests, "violations": self.violations })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_over_labels() {
        let page = "# TYPE a gauge\na{x=\"1 {}\"} 2\na{x=\"2\"} 3 1700000000\nab 7\n\
            reef:invariant_violations_total{kind=\"x\"} 1\nreef:invariant_violations_total{kind=\"y\"} 0\n";
        assert_eq!(sum(page, "a"), Some(5.0));
        assert_eq!(sum(page, "ab"), Some(7.0));
        assert_eq!(sum(page, "b"), None);
        assert_eq!(violations(page), ["reef:invariant_violations_total 1"]);
    }
}
