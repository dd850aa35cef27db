//! `GET /v1/pool`: every page, whose it is, the requests, and why one more would not be let in.

use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use reef_engine::pool_view::{RequestRow, TenantRow};
use reef_engine::recent::Relieved;
use reef_engine::stats::{Ceiling, Ceilings, Counters};
use reef_engine::{Engine, PoolView, Probe};
use reef_kv::page_map::{CellKind, ClassPages, SpanCells};
use reef_kv::{Accounts, ByFormat, Fidelity, Holder, PageMap, PageState};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::{Mutex, oneshot};
use tokio::time::Instant;

use crate::app::App;
use crate::error::ApiError;

/// Most tokens of the request that is asked about: more than any model's context.
const TOKENS_MAX: usize = 1 << 20;
/// How long one look serves everybody who asks the same: watchers cost the engine no more than one.
const LOOK_LASTS: Duration = Duration::from_millis(100);
/// How long the engine may take to be looked at; a step does not keep it from it.
const PATIENCE: Duration = Duration::from_secs(5);

/// The request that is asked about, as in a query.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Question {
    tokens: Option<usize>,
    fidelity: Option<String>,
    tenant: Option<String>,
}

/// The last look, and who waits for the next: one at a time looks.
#[derive(Default)]
pub struct Looks(Mutex<Option<(Instant, Question, Bytes)>>);

/// Shows the pool.
pub async fn pool(
    State(app): State<Arc<App>>,
    question: Result<Query<Question>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, ApiError> {
    let wrong = |error: axum::extract::rejection::QueryRejection| {
        ApiError::invalid(None, format!("the query: {}", error.body_text()))
    };
    let Query(question) = question.map_err(wrong)?;
    let model = app.model()?;
    let mut last = app.looks.0.lock().await;
    let fresh =
        last.as_ref().filter(|(at, asked, _)| at.elapsed() < LOOK_LASTS && *asked == question);
    let body = match fresh {
        Some((.., body)) => body.clone(),
        None => {
            let (sender, view) = oneshot::channel();
            let asked = question.clone();
            // Whoever asked may have gone.
            model.door.look(Box::new(move |engine| {
                drop(sender.send(engine.map(|e| view_of(e, &asked))))
            }));
            let view = tokio::time::timeout(PATIENCE, view).await;
            let gone =
                || ApiError::unavailable("the engine has stopped, or is too busy to be looked at");
            let view = view.ok().and_then(Result::ok).flatten().ok_or_else(gone)??;
            let body = Bytes::from(document(&app, &view).to_string());
            *last = Some((Instant::now(), question, body.clone()));
            body
        }
    };
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, body).into_response())
}

fn view_of(engine: &Engine, question: &Question) -> Result<PoolView, ApiError> {
    let mut probe = Probe::default();
    if let Some(tokens) = question.tokens {
        if !(1..=TOKENS_MAX).contains(&tokens) {
            let message = format!("tokens is {tokens}: give a number from 1 to {TOKENS_MAX}");
            return Err(ApiError::invalid("tokens", message));
        }
        probe.tokens = tokens;
    }
    if let Some(name) = &question.fidelity {
        let wrong = |error| ApiError::invalid("fidelity", format!("fidelity: {error}"));
        probe.fidelity = Fidelity::from_str(name).map_err(wrong)?;
    }
    if let Some(name) = &question.tenant {
        let place = engine.config().tenants.iter().position(|tenant| tenant.name == *name);
        let unknown = || ApiError::invalid("tenant", format!("there is no tenant `{name}`"));
        probe.tenant = place.ok_or_else(unknown)?;
    }
    Ok(engine.pool_view(&probe))
}

fn document(app: &App, view: &PoolView) -> Value {
    let tenant = |index: usize| view.tenants.get(index).map(|tenant| tenant.name.as_str());
    let stats = &view.stats;
    let requests = view.requests.iter().map(|row| request(row, tenant(row.tenant), view.now_us));
    let spill = stats.spill.map(|spill| {
        json!({
            "capacity_bytes": spill.capacity_bytes,
            "used_bytes": spill.used_bytes,
            "records": spill.records,
            "failures": spill.failures,
            "closed": spill.closed,
        })
    });
    json!({
        "model": app.model_name(),
        "version": env!("CARGO_PKG_VERSION"),
        "now_ms": milliseconds(view.now_us),
        "step": view.step,
        "why_not": view.why_not,
        "obstacle": view.obstacle.name(),
        "would_wait": !view.obstacle.gives_way(),
        "asked": {
            "tokens": view.probe.tokens,
            "fidelity": view.probe.fidelity.name(),
            "tenant": tenant(view.probe.tenant),
        },
        "accounts": accounts(&stats.accounts),
        "held": held(&view.map),
        "map": map(&view.map),
        "page_sizes": view.map.classes.iter().map(class).collect::<Value>(),
        "running": stats.running,
        "waiting": stats.waiting,
        "paused": stats.paused,
        "ceilings": ceilings(&stats.ceilings),
        "requests": requests.collect::<Value>(),
        "requests_left_out": view.requests_left_out,
        "tenants": view.tenants.iter().map(tenant_row).collect::<Value>(),
        "relief": view.recent.iter().map(|entry| relieved(entry, view.now_us)).collect::<Value>(),
        "counters": counters(&stats.counters),
        "spill": spill,
    })
}

fn milliseconds(us: u64) -> u64 {
    us / 1000
}

/// Each format that has any.
fn by_format(bytes: &ByFormat<usize>) -> Value {
    let some = bytes.iter().filter(|(_, bytes)| **bytes > 0);
    Value::Object(some.map(|(format, bytes)| (format.name().into(), json!(bytes))).collect())
}

fn accounts(accounts: &Accounts) -> Value {
    json!({
        "budget_bytes": accounts.budget_bytes,
        "used_bytes": accounts.used_bytes(),
        "used": by_format(&accounts.used),
        "cached_bytes": accounts.cached_bytes,
        "fenced_bytes": accounts.fenced_bytes,
        "free_bytes": accounts.free_bytes,
        "reserved_bytes": accounts.reserved_bytes,
        "fragmentation_bytes": accounts.fragmentation_bytes,
        "table_bytes": accounts.table_bytes,
        "peak_bytes": accounts.peak_bytes,
    })
}

/// Bytes of pages that blocks hold, by what they are and by format.
fn held(map: &PageMap) -> Value {
    let states = PageState::ALL.into_iter().zip(&map.held);
    let some = states.filter(|(_, bytes)| bytes.total() > 0);
    Value::Object(some.map(|(state, bytes)| (state.name().into(), by_format(bytes))).collect())
}

fn map(map: &PageMap) -> Value {
    json!({
        "span_bytes": map.span_bytes,
        "span_count": map.span_count,
        "pages_a_cell": map.pages_a_cell,
        "spans_a_cell": map.spans_a_cell,
        "step_in_flight": map.step_in_flight,
        "kinds": map.kinds.iter().map(kind).collect::<Value>(),
        "spans": map.spans.iter().map(span).collect::<Value>(),
    })
}

fn kind(kind: &CellKind) -> Value {
    let mut fields = Map::new();
    fields.insert("state".into(), json!(kind.state.name()));
    if let Some(format) = kind.format {
        fields.insert("format".into(), json!(format.name()));
    }
    match kind.holder {
        Holder::Nobody => {}
        Holder::One(key) => drop(fields.insert("request".into(), json!(key))),
        Holder::Several => drop(fields.insert("request".into(), json!("several"))),
    }
    Value::Object(fields)
}

/// `[page_bytes, kind, cells, kind, cells, ...]`.
fn span(span: &SpanCells) -> Value {
    let runs = span.runs.iter().flat_map(|run| [run.kind, run.cells]);
    std::iter::once(span.page_bytes).chain(runs).collect()
}

fn class(class: &ClassPages) -> Value {
    json!({
        "page_bytes": class.page_bytes,
        "pages_a_span": class.slots,
        "spans": class.spans,
        "used": class.used,
        "fenced": class.fenced,
        "cached": class.cached,
        "pinned": class.pinned,
    })
}

fn ceilings(ceilings: &Ceilings) -> Value {
    let binding = match ceilings.binding {
        Ceiling::Kv => "kv",
        Ceiling::Ridge => "ridge",
        Ceiling::Latency => "latency",
        Ceiling::Configured => "configured",
    };
    json!({
        "kv": ceilings.kv,
        "ridge": ceilings.ridge,
        "latency": ceilings.latency,
        "configured": ceilings.configured,
        "binding": binding,
    })
}

fn request(row: &RequestRow, tenant: Option<&str>, now_us: u64) -> Value {
    let (state, pause) = row.state.name();
    let since = row.paused_since_us.map(|since| milliseconds(now_us.saturating_sub(since)));
    json!({
        "key": row.key,
        "tenant": tenant,
        "priority": row.priority,
        "fidelity": row.fidelity.name(),
        "state": state,
        "pause": pause,
        "paused_ms": since,
        "branches": row.branches,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "computed_tokens": row.computed_tokens,
        "generated_tokens": row.generated_tokens,
        "max_tokens": row.max_tokens,
        "bytes": by_format(&row.bytes),
        "shared_bytes": row.shared_bytes,
        "dropped_tokens": row.dropped_tokens,
        "pauses": row.pauses,
        "last_rung": row.last_rung.map(|(rung, step)| json!({"rung": rung, "step": step})),
    })
}

fn tenant_row(row: &TenantRow) -> Value {
    json!({
        "name": row.name,
        "weight": row.weight,
        "quota_bytes": row.quota_bytes,
        "held_bytes": row.held_bytes,
        "requests": row.requests,
    })
}

fn relieved(entry: &Relieved, now_us: u64) -> Value {
    json!({
        "at_ms": milliseconds(entry.at_us),
        "ago_ms": milliseconds(now_us.saturating_sub(entry.at_us)),
        "step": entry.step,
        "request": entry.request,
        "rung": entry.rung,
        "blocks": entry.blocks,
        "bytes": entry.bytes,
        "reason": entry.reason,
        "harm": entry.harm,
    })
}

fn counters(counters: &Counters) -> Value {
    json!({
        "steps": counters.steps,
        "prefill_rows": counters.prefill_rows,
        "decode_rows": counters.decode_rows,
        "generated_tokens": counters.generated_tokens,
        "cached_tokens": counters.cached_tokens,
        "finished": counters.finished,
        "failed": counters.failed,
        "encoded_blocks": counters.encoded_blocks,
        "dropped_blocks": counters.dropped_blocks,
        "evicted_prefix_bytes": counters.evicted_prefix_bytes,
        "spilled_bytes": counters.spilled_bytes,
        "loaded_bytes": counters.loaded_bytes,
        "stalls": counters.stalls,
        "violations": counters.violations,
    })
}
