//! Spans over OTLP/HTTP, in the semantic conventions for generative AI. Everything that knows OpenTelemetry's
//! crates stands here, for they break with every minor version.

use axum::http::{HeaderMap, Method, StatusCode};
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{Status, TraceContextExt as _, TracerProvider as _};
use opentelemetry::{Array, StringValue, Value};
use opentelemetry_otlp::{OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Span;
use tracing::Subscriber;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::registry::LookupSpan;

use super::filter::TelemetryError;
use super::{RequestContext, SPAN_TARGET};
use crate::metrics::{Ending, RequestSummary};

/// Sends the last spans when it is dropped.
pub(super) struct SpanGuard(SdkTracerProvider);

impl Drop for SpanGuard {
    fn drop(&mut self) {
        // The collector may have gone; there is nobody to tell.
        let _ = self.0.shutdown();
    }
}

/// A layer that exports our spans, by a thread of its own, to `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
/// `OTEL_EXPORTER_OTLP_ENDPOINT`; `None` where neither is set. The SDK reads the other `OTEL_` variables.
///
/// # Errors
/// An endpoint that is none.
pub(super) fn layer<S>()
-> Result<Option<(Box<dyn Layer<S> + Send + Sync>, SpanGuard)>, TelemetryError>
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    let names = [OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT];
    let is_set = |name: &&str| std::env::var(name).is_ok_and(|endpoint| !endpoint.is_empty());
    if !names.iter().any(is_set) {
        return Ok(None);
    }
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_http().build();
    let exporter = exporter.map_err(|error| TelemetryError::Export(error.to_string()))?;
    let mut resource = Resource::builder();
    if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
        resource = resource.with_service_name("reef");
    }
    let provider = SdkTracerProvider::builder()
        .with_resource(resource.build())
        .with_batch_exporter(exporter)
        .build();
    let tracer = provider.tracer("reef");
    // The exporter's own requests make no spans.
    let ours = filter_fn(|metadata| metadata.target() == SPAN_TARGET);
    let layer = tracing_opentelemetry::layer()
        .with_tracer(tracer)
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_target(false)
        .with_level(false)
        .with_filter(ours);
    Ok(Some((Box::new(layer), SpanGuard(provider))))
}

/// The span of a request, below the client's where it names one (`traceparent`).
pub(super) fn request_span(method: &Method, route: Option<&str>, headers: &HeaderMap) -> Span {
    let name = format!("{method} {}", route.unwrap_or("none"));
    let span = tracing::info_span!(
        target: SPAN_TARGET,
        parent: None,
        "request",
        otel.name = name,
        otel.kind = "server",
        http.request.method = method.as_str(),
        http.route = route,
    );
    let parent = TraceContextPropagator::new().extract(&Headers(headers));
    if parent.span().span_context().is_valid() {
        // A span that is not exported has no parent to set.
        let _ = span.set_parent(parent);
    }
    span
}

/// Notes the head of the answer.
pub(super) fn answered(context: &RequestContext, status: StatusCode) {
    context.span.set_attribute("http.response.status_code", i64::from(status.as_u16()));
    context.span.set_attribute("reef.request.id", context.id.to_string());
    if status.is_server_error() {
        context.span.set_status(Status::error(""));
    }
}

/// Notes what was generated. vLLM's names (`gen_ai.latency.*`) where the conventions have none.
pub(super) fn generated(context: &RequestContext, model: &str, summary: &RequestSummary) {
    let span = &context.span;
    let set = |name: &'static str, value: Value| span.set_attribute(name, value);
    set("gen_ai.provider.name", "reef".into());
    set("gen_ai.operation.name", operation(&context.route).into());
    set("gen_ai.request.model", model.to_owned().into());
    set("gen_ai.response.model", model.to_owned().into());
    set("gen_ai.usage.input_tokens", (summary.prompt_tokens as i64).into());
    set("gen_ai.usage.output_tokens", (summary.completion_tokens as i64).into());
    set("gen_ai.usage.cache_read.input_tokens", (summary.cached_tokens as i64).into());
    let reasons: Vec<StringValue> = vec![summary.ending.name().into()];
    set("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons)));
    if let Some(queue) = summary.queue {
        set("gen_ai.latency.time_in_queue", queue.as_secs_f64().into());
    }
    if let Some(first) = summary.first_token {
        set("gen_ai.latency.time_to_first_token", first.as_secs_f64().into());
    }
    set("gen_ai.latency.e2e", summary.e2e.as_secs_f64().into());
    if let Some(fidelity) = summary.fidelity {
        set("reef.kv.fidelity", fidelity.into());
    }
    set("reef.kv.degraded_tokens", summary.degraded_tokens.into());
    set("reef.kv.dropped_tokens", summary.dropped_tokens.into());
    set("reef.pauses", (summary.pauses as i64).into());
    if summary.ending == Ending::Failed {
        span.set_status(Status::error("failed"));
    }
}

/// The convention's name of what a route does.
fn operation(route: &str) -> &'static str {
    if route.contains("chat") { "chat" } else { "text_completion" }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}
