//! How loaded the server is, in the shape that SGLang made and SMG reads: `GET /v1/loads`, `GET /loads`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use reef_engine::stats::EngineStats;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::metrics::sample;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::metrics::EngineSample;

/// What may be asked.
#[derive(Debug, Default, Deserialize)]
pub struct LoadsQuery {
    /// Parts beside the core, by commas; all where it is absent.
    include: Option<String>,
    /// The model's id.
    model: Option<String>,
}

impl LoadsQuery {
    fn includes(&self, part: &str) -> bool {
        let asked =
            |list: &String| list.split(',').any(|of| of.trim() == part || of.trim() == "all");
        self.include.as_ref().is_none_or(asked)
    }
}

/// The load of a worker. Counts fit 32 bits: SMG takes a document with larger ones for somebody else's.
#[derive(Debug, Serialize)]
pub struct Loads {
    timestamp: String,
    version: &'static str,
    dp_rank_count: i32,
    loads: [RankLoad; 1],
    aggregate: Aggregate,
}

/// The load of the one engine there is. Token counts are what held bytes would be at f16, since one format
/// says little of another; `token_usage` is their quotient.
#[derive(Debug, Serialize)]
struct RankLoad {
    dp_rank: i32,
    num_running_reqs: i32,
    num_waiting_reqs: i32,
    num_waiting_uncached_tokens: i32,
    num_total_reqs: i32,
    num_used_tokens: i32,
    num_total_tokens: i32,
    max_total_num_tokens: i32,
    token_usage: f64,
    gen_throughput: f64,
    cache_hit_rate: f64,
    utilization: f64,
    max_running_requests: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queues: Option<Queues>,
}

#[derive(Debug, Serialize)]
struct Memory {
    kv_cache_gb: f64,
    token_capacity: i32,
}

#[derive(Debug, Serialize)]
struct Queues {
    waiting: i32,
    paused: i32,
}

#[derive(Debug, Serialize)]
struct Aggregate {
    total_running_reqs: i32,
    total_waiting_reqs: i32,
    total_reqs: i32,
    avg_token_usage: f64,
    avg_throughput: f64,
    avg_utilization: f64,
}

/// `GET /v1/loads?include=core,queues,memory&model=ID`.
///
/// # Errors
/// 400 where the query cannot be read; 404 for another model; 503 while it is loaded, or where the engine does not answer.
pub async fn loads(
    State(app): State<Arc<App>>,
    query: Result<Query<LoadsQuery>, QueryRejection>,
) -> Result<Json<Loads>, ApiError> {
    let Query(query) = query.map_err(|error| ApiError::invalid(None, error.body_text()))?;
    let model = app.model_named(query.model.as_deref())?;
    let sample = sample(model).await;
    let sample = sample.ok_or_else(|| ApiError::unavailable("the engine does not answer"))?;
    let timestamp = OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default();
    Ok(Json(document(model, &sample, &query, timestamp)))
}

fn document(model: &Model, sample: &EngineSample, query: &LoadsQuery, timestamp: String) -> Loads {
    let rank = rank(model, sample, query);
    Loads {
        timestamp,
        version: env!("CARGO_PKG_VERSION"),
        dp_rank_count: 1,
        aggregate: Aggregate {
            total_running_reqs: rank.num_running_reqs,
            total_waiting_reqs: rank.num_waiting_reqs,
            total_reqs: rank.num_total_reqs,
            avg_token_usage: rank.token_usage,
            avg_throughput: rank.gen_throughput,
            avg_utilization: rank.utilization,
        },
        loads: [rank],
    }
}

fn rank(model: &Model, sample: &EngineSample, query: &LoadsQuery) -> RankLoad {
    let (stats, metrics) = (&sample.stats, &model.metrics);
    let usage = sample.kv_usage();
    let capacity = metrics.served().f16_tokens();
    let used = (usage * capacity as f64).round() as usize;
    let most = most_running(stats);
    RankLoad {
        dp_rank: 0,
        num_running_reqs: count(stats.running),
        num_waiting_reqs: count(stats.waiting),
        num_waiting_uncached_tokens: count(sample.waiting_tokens),
        num_total_reqs: count(stats.running + stats.waiting),
        num_used_tokens: count(used),
        num_total_tokens: count(used.saturating_add(sample.waiting_tokens)),
        max_total_num_tokens: count(capacity),
        token_usage: rounded(usage, 4),
        gen_throughput: rounded(metrics.tokens_per_second(), 2),
        cache_hit_rate: rounded(metrics.prefix_hit_rate(), 4),
        utilization: rounded(stats.running as f64 / most.max(1) as f64, 4).min(1.0),
        max_running_requests: count(most),
        memory: query.includes("memory").then(|| Memory {
            kv_cache_gb: rounded(stats.accounts.budget_bytes as f64 / f64::from(1 << 30), 3),
            token_capacity: count(capacity),
        }),
        queues: query
            .includes("queues")
            .then(|| Queues { waiting: count(stats.waiting), paused: count(stats.paused) }),
    }
}

/// Sequences that may run now.
fn most_running(stats: &EngineStats) -> usize {
    let of = &stats.ceilings;
    of.kv.min(of.ridge).min(of.latency.unwrap_or(usize::MAX)).min(of.configured)
}

fn count(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

fn rounded(value: f64, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (value * scale).round() / scale
}
