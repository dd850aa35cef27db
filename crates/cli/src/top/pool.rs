//! What `GET /v1/pool` says, as far as it is shown. Fields that are missing are empty: the server may be older or
//! newer.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Bytes by format.
pub type Bytes = BTreeMap<String, u64>;

/// The pool at one moment.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pool {
    pub model: String,
    pub now_ms: u64,
    pub why_not: String,
    pub would_wait: bool,
    pub accounts: Accounts,
    pub held: BTreeMap<String, Bytes>,
    pub map: Map,
    pub running: u64,
    pub waiting: u64,
    pub paused: u64,
    pub ceilings: Ceilings,
    pub requests: Vec<Request>,
    pub requests_left_out: u64,
    pub relief: Vec<Relieved>,
    pub counters: Counters,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Accounts {
    pub budget_bytes: u64,
    pub used_bytes: u64,
    pub used: Bytes,
    pub cached_bytes: u64,
    pub fenced_bytes: u64,
    pub free_bytes: u64,
    pub peak_bytes: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Map {
    pub kinds: Vec<Kind>,
    /// `[page_bytes, kind, cells, kind, cells, ...]`.
    pub spans: Vec<Vec<usize>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Kind {
    pub state: String,
    pub format: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Ceilings {
    pub kv: u64,
    pub ridge: u64,
    pub latency: Option<u64>,
    pub configured: u64,
    pub binding: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Request {
    pub key: u64,
    pub tenant: Option<String>,
    pub fidelity: String,
    pub state: String,
    pub pause: Option<String>,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub max_tokens: u64,
    pub bytes: Bytes,
    pub dropped_tokens: f64,
    pub pauses: u64,
    pub last_rung: Option<LastRung>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct LastRung {
    pub rung: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Relieved {
    pub ago_ms: u64,
    pub step: u64,
    pub request: Option<u64>,
    pub rung: String,
    pub blocks: u64,
    pub bytes: u64,
    pub reason: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Counters {
    pub steps: u64,
    pub prefill_rows: u64,
    pub generated_tokens: u64,
    pub finished: u64,
    pub failed: u64,
}

/// Sum and count of a histogram of Prometheus' text format, over all its labels.
pub fn histogram(metrics: &str, name: &str) -> (f64, f64) {
    let total = |suffix: &str| -> f64 {
        let lines =
            metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(suffix));
        let values = lines
            .filter(|rest| rest.starts_with([' ', '{']))
            .filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok());
        values.sum()
    };
    (total("_sum"), total("_count"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_summed_over_its_labels() {
        let text = "# TYPE a histogram\na_bucket{le=\"1\"} 7\na_sum{m=\"x y\"} 1.5\na_sum{m=\"z\"} 2\n\
                    a_count{m=\"x y\"} 3\na_count{m=\"z\"} 1\na_sums 9\nab_sum 100\n";
        assert_eq!(histogram(text, "a"), (3.5, 4.0));
        assert_eq!(histogram("", "a"), (0.0, 0.0));
    }

    #[test]
    fn what_is_missing_is_empty() {
        let pool: Pool = serde_json::from_str("{\"running\": 2, \"new\": {}}").unwrap();
        assert_eq!((pool.running, pool.requests.len()), (2, 0));
    }
}
