//! What a scrape of `/metrics` reads: vLLM's names with vLLM's meanings, and `reef:` for what vLLM has not.
//! `docs/metrics.md` lists every family.
//!
//! There are two sources. A [`RequestObserver`] in each request's listener hears the engine's events and
//! counts as they happen; the engine's own totals ([`EngineSample`]) are read at the scrape. Every server has a
//! registry of its own.

mod buckets;
mod engine;
mod exposition;
mod http;
mod observer;
mod process;
#[cfg(test)]
mod published;
mod request;
#[cfg(test)]
mod tests;
mod traffic;
mod writer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{Method, StatusCode};
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use reef_engine::{Engine, Tenant};
use reef_kv::page::PageFormat;

pub use engine::EngineSample;
pub use exposition::Exposition;
pub use http::OpenGuard;
pub use observer::{Arrival, Ending, OnEnd, RequestObserver, RequestSummary};

use engine::{EngineCollector, LastSample};
use http::HttpFamilies;
use process::ProcessCollector;
use request::RequestFamilies;
use traffic::TrafficCollector;

use crate::lifecycle::Lifecycle;

/// What is served, as its metrics name and bound it.
#[derive(Clone, Debug)]
pub struct Served {
    /// The id that is shown: the label `model_name`.
    pub model_name: String,
    /// Most tokens of a sequence: the last bound of token histograms.
    pub max_model_len: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks that the pool holds at f16.
    pub f16_blocks: usize,
    /// Whether prefixes are found again.
    pub prefix_caching: bool,
    /// Whose requests there are, in the engine's order.
    pub tenants: Vec<Tenant>,
}

impl Served {
    /// Tokens that the pool holds at f16.
    pub fn f16_tokens(&self) -> usize {
        self.f16_blocks * self.block_size
    }

    /// `engine`, under `model_name`.
    pub fn new(model_name: impl Into<String>, engine: &Engine) -> Served {
        let (config, pool) = (engine.config(), engine.pool());
        let tokens = pool.capacity_tokens(PageFormat::F16).unwrap_or_else(|| {
            // Of a pool whose groups all have windows: they hold sequences without end.
            config.budget_bytes / pool.config().bytes_per_token(PageFormat::F16).max(1)
        });
        Served {
            model_name: model_name.into(),
            max_model_len: engine.facts().trained_context,
            block_size: config.block_size,
            f16_blocks: tokens / config.block_size,
            prefix_caching: config.prefix.is_some(),
            tenants: config.tenants.clone(),
        }
    }
}

/// The metrics of one server that do not depend on what it serves: HTTP, and the process.
#[derive(Debug)]
pub struct Metrics {
    http: HttpFamilies,
    registry: Registry,
}

impl Metrics {
    /// Of a server that starts now, whose socket counts in `lifecycle`.
    pub fn new(lifecycle: Arc<Lifecycle>) -> Metrics {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(TrafficCollector(lifecycle)));
        registry.register_collector(Box::new(ProcessCollector::new()));
        let build = Gauge::<i64>::default();
        build.set(1);
        let version = ("version".into(), env!("CARGO_PKG_VERSION").into());
        registry.sub_registry_with_label(version).register(
            "reef:build_info",
            "The server's version",
            build,
        );
        let http = HttpFamilies::new(&mut registry);
        Metrics { http, registry }
    }

    /// Counts an answer: `route` is the router's pattern, `None` where none matched; `elapsed` until its head
    /// was ready.
    pub fn answered(
        &self,
        method: &Method,
        route: Option<&str>,
        status: StatusCode,
        elapsed: Duration,
    ) {
        self.http.answered(method, route, status, elapsed);
    }

    /// Counts a stream as open while the guard lives.
    pub fn stream(&self) -> OpenGuard {
        self.http.stream()
    }

    /// Everything, in `format`; of the model only once there is one.
    pub fn render(&self, model: Option<&ModelMetrics>, format: Exposition) -> String {
        let registries = std::iter::once(&self.registry).chain(model.map(|of| &of.registry));
        let mut text = String::new();
        for registry in registries {
            // Writing to a string does not fail.
            let _ = match format {
                Exposition::Text => prometheus_text::encode(&mut text, registry),
                Exposition::OpenMetrics => text::encode_registry(&mut text, registry),
            };
        }
        if format == Exposition::OpenMetrics {
            text.push_str("# EOF\n");
        }
        text
    }
}

/// The metrics of a model and its engine.
#[derive(Debug)]
pub struct ModelMetrics {
    served: Arc<Served>,
    registry: Registry,
    requests: Arc<RequestFamilies>,
    last: Arc<LastSample>,
}

impl ModelMetrics {
    /// Nothing has happened yet.
    pub fn new(served: Served) -> ModelMetrics {
        let labels = [("model_name", served.model_name.clone()), ("engine", "0".into())];
        let labels = labels.into_iter().map(|(name, value)| (name.into(), value.into()));
        let mut registry = Registry::with_labels(labels);
        let tenants: Vec<String> =
            served.tenants.iter().map(|tenant| tenant.name.clone()).collect();
        let requests =
            Arc::new(RequestFamilies::new(&mut registry, served.max_model_len, &tenants));
        let last = Arc::new(LastSample::default());
        let served = Arc::new(served);
        let collector = EngineCollector { served: served.clone(), last: last.clone() };
        registry.register_collector(Box::new(collector));
        ModelMetrics { served, registry, requests, last }
    }

    /// What is served.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Tokens generated per second between the last two looks that were not too close.
    pub fn tokens_per_second(&self) -> f64 {
        self.last.tokens_per_second()
    }

    /// Tokens found in the prefix cache, as a part of those looked up since the start; 0 where none were.
    pub fn prefix_hit_rate(&self) -> f64 {
        let queries = self.requests.prefix_queries.get();
        if queries == 0 { 0.0 } else { self.requests.prefix_hits.get() as f64 / queries as f64 }
    }

    /// An observer for a request that has come. `on_end` is called once, on the thread where the observer is.
    pub fn observe(&self, arrival: Arrival, on_end: OnEnd) -> RequestObserver {
        RequestObserver::new(self.requests.clone(), arrival, on_end)
    }

    /// What the engine says now; `None`: it does not answer.
    pub fn sampled(&self, sample: Option<EngineSample>) {
        self.last.set(sample, Instant::now());
    }
}
