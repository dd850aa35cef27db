//! What is known of a server from one look to the next.

use anyhow::Context as _;

use super::client::Client;
use super::pool::{Pool, histogram};

/// Per second, between the last two looks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub generated: f64,
    pub prefill: f64,
    pub steps: f64,
}

/// Mean milliseconds between the last two looks, where anything ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latencies {
    pub first_token: Option<f64>,
    pub between_tokens: Option<f64>,
}

/// A server, watched.
#[derive(Default)]
pub struct Watch {
    pub pool: Option<Pool>,
    pub rates: Option<Rates>,
    pub latencies: Latencies,
    /// Why the last look failed.
    pub trouble: Option<String>,
    /// Generated tokens per second at each look, the last one last.
    pub history: Vec<u64>,
    pub(super) histograms: Option<[(f64, f64); 2]>,
}

/// Looks that are kept for the line of rates.
const HISTORY: usize = 600;
const HISTOGRAMS: [&str; 2] =
    ["vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"];

impl Watch {
    /// Looks once more; what goes wrong is kept as [`trouble`](Watch::trouble), beside the last pool seen.
    pub fn look(&mut self, client: &Client) {
        match read(client) {
            Ok(pool) => {
                self.trouble = None;
                self.see(pool);
                // A server without metrics is shown without latencies.
                let metrics = client.get("/metrics").unwrap_or_default();
                self.see_metrics(&metrics);
            }
            Err(error) => self.trouble = Some(format!("{error:#}")),
        }
    }

    /// Takes a look in.
    pub fn see(&mut self, pool: Pool) {
        let before = self.pool.as_ref().filter(|before| before.now_ms < pool.now_ms);
        if self.pool.is_some() && before.is_none() {
            // Its clock went back: the server was started anew.
            (self.rates, self.histograms) = (None, None);
            self.history.clear();
        }
        self.rates = before.map(|before| {
            let seconds = (pool.now_ms - before.now_ms) as f64 / 1000.0;
            let (old, new) = (&before.counters, &pool.counters);
            let rate = |old: u64, new: u64| new.saturating_sub(old) as f64 / seconds;
            Rates {
                generated: rate(old.generated_tokens, new.generated_tokens),
                prefill: rate(old.prefill_rows, new.prefill_rows),
                steps: rate(old.steps, new.steps),
            }
        });
        if let Some(rates) = self.rates {
            self.history.push(rates.generated.round() as u64);
            let over = self.history.len().saturating_sub(HISTORY);
            self.history.drain(..over);
        }
        self.pool = Some(pool);
    }

    /// Takes the text of `/metrics` in.
    pub fn see_metrics(&mut self, metrics: &str) {
        let now = HISTOGRAMS.map(|name| histogram(metrics, name));
        let before = self.histograms.replace(now).unwrap_or(now);
        let mean = |index: usize| {
            let count = now[index].1 - before[index].1;
            (count > 0.0).then(|| (now[index].0 - before[index].0) / count * 1000.0)
        };
        self.latencies = Latencies {
            first_token: mean(0).or(self.latencies.first_token),
            between_tokens: mean(1).or(self.latencies.between_tokens),
        };
    }
}

fn read(client: &Client) -> anyhow::Result<Pool> {
    let text = client.get("/v1/pool")?;
    serde_json::from_str(&text).context("the answer is not that of GET /v1/pool")
}

#[cfg(test)]
mod tests {
    use super::super::pool::Counters;
    use super::*;

    fn at(now_ms: u64, generated_tokens: u64) -> Pool {
        let counters = Counters { generated_tokens, ..Counters::default() };
        Pool { now_ms, counters, ..Pool::default() }
    }

    #[test]
    fn rates_are_between_looks_and_begin_anew_with_a_server() {
        let mut watch = Watch::default();
        watch.see(at(1000, 10));
        assert_eq!(watch.rates, None);
        watch.see(at(3000, 110));
        assert_eq!(watch.rates.map(|rates| rates.generated), Some(50.0));
        watch.see_metrics(
            "vllm:time_to_first_token_seconds_sum 1\nvllm:time_to_first_token_seconds_count 2\n",
        );
        assert_eq!(watch.latencies.first_token, None);
        watch.see_metrics(
            "vllm:time_to_first_token_seconds_sum 2\nvllm:time_to_first_token_seconds_count 4\n",
        );
        assert_eq!(watch.latencies.first_token, Some(500.0));
        watch.see(at(100, 5));
        assert_eq!((watch.rates, watch.history.len()), (None, 0));
        watch.see(at(1100, 6));
        assert_eq!(watch.history, [1]);
    }
}
