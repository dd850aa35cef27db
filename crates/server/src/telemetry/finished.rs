//! The line and the span of a request that has ended.

use std::time::Duration;

use super::{REQUEST_TARGET, RequestContext};
use crate::metrics::{OnEnd, RequestSummary};

/// Writes them, from the engine's thread: formatting is all it does there.
pub fn on_end(context: RequestContext, model: &str, tenant: &str) -> OnEnd {
    let (model, tenant) = (model.to_owned(), tenant.to_owned());
    Box::new(move |summary| {
        line(&context, &model, &tenant, summary);
        #[cfg(feature = "otlp")]
        super::otlp::generated(&context, &model, summary);
    })
}

/// Absent values are left out.
fn line(context: &RequestContext, model: &str, tenant: &str, summary: &RequestSummary) {
    tracing::info!(
        target: REQUEST_TARGET,
        id = &*context.id,
        tenant,
        model,
        route = &*context.route,
        finish_reason = summary.ending.name(),
        prompt_tokens = summary.prompt_tokens,
        completion_tokens = summary.completion_tokens,
        cached_tokens = summary.cached_tokens,
        queue_ms = summary.queue.map(milliseconds),
        ttft_ms = summary.first_token.map(milliseconds),
        e2e_ms = milliseconds(summary.e2e),
        kv_fidelity = summary.fidelity,
        degraded_tokens = tenths(summary.degraded_tokens),
        dropped_tokens = tenths(summary.dropped_tokens),
        pauses = summary.pauses,
        "request"
    );
}

/// To the microsecond.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

fn tenths(tokens: f64) -> f64 {
    (tokens * 10.0).round() / 10.0
}
