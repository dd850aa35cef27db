//! What the HTTP side counts: answers and streams.

use std::time::Duration;

use axum::http::{Method, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::buckets;

/// Labels of answers. Routes are patterns of the router and methods known ones, so that no client makes new
/// series.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AnswerLabels {
    method: &'static str,
    route: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    route: String,
}

/// Families of the HTTP side.
#[derive(Debug)]
pub(super) struct HttpFamilies {
    answers: Family<AnswerLabels, Counter>,
    seconds: Family<RouteLabels, Histogram>,
    streams: Gauge,
}

/// Counts itself as open until it is dropped.
#[derive(Debug)]
pub struct OpenGuard(Gauge);

impl OpenGuard {
    fn new(gauge: &Gauge) -> OpenGuard {
        gauge.inc();
        OpenGuard(gauge.clone())
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl HttpFamilies {
    pub(super) fn new(registry: &mut Registry) -> HttpFamilies {
        let seconds = || Histogram::new(buckets::FIRST_TOKEN_SECONDS);
        let families = HttpFamilies {
            answers: Family::default(),
            seconds: Family::new_with_constructor(seconds),
            streams: Gauge::default(),
        };
        registry.register(
            "reef:http_requests",
            "Answers by route, method and status",
            families.answers.clone(),
        );
        registry.register(
            "reef:http_request_seconds",
            "Seconds until the head of an answer was ready; of a stream not its end",
            families.seconds.clone(),
        );
        registry.register("reef:streams_open", "Streams being sent", families.streams.clone());
        families
    }

    /// Counts an answer. `route`: the router's pattern, `None` where none matched.
    pub(super) fn answered(
        &self,
        method: &Method,
        route: Option<&str>,
        status: StatusCode,
        elapsed: Duration,
    ) {
        let route = route.unwrap_or("none").to_owned();
        let labels = RouteLabels { route: route.clone() };
        self.seconds.get_or_create(&labels).observe(elapsed.as_secs_f64());
        let labels = AnswerLabels { method: method_name(method), route, status: status.as_u16() };
        self.answers.get_or_create(&labels).inc();
    }

    pub(super) fn stream(&self) -> OpenGuard {
        OpenGuard::new(&self.streams)
    }
}

fn method_name(method: &Method) -> &'static str {
    let known = [Method::GET, Method::POST, Method::HEAD, Method::OPTIONS, Method::DELETE];
    let names = ["GET", "POST", "HEAD", "OPTIONS", "DELETE"];
    let place = known.iter().position(|of| of == method);
    place.map_or("other", |place| names[place])
}
