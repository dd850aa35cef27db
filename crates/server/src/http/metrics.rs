//! `GET /metrics`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse as _, Response};
use tokio::sync::oneshot;

use crate::app::{App, Model};
use crate::metrics::{EngineSample, Exposition};

/// How long the engine may take to answer; it does so between two turns, which take milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// `GET /metrics`: Prometheus text, or OpenMetrics where the scraper asks for it.
pub async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = Exposition::negotiate(accept);
    let model = app.model().ok();
    if let Some(model) = model {
        sample(model).await;
    }
    let text = app.metrics.render(model.map(|model| &model.metrics), format);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

/// Looks at the engine; `None` where it does not answer. The model's metrics learn of it.
pub(super) async fn sample(model: &Model) -> Option<EngineSample> {
    let (sender, answer) = oneshot::channel();
    let look = move |engine: Option<&reef_engine::Engine>| {
        // Whoever asked may have gone.
        let _ = sender.send(engine.map(EngineSample::of));
    };
    model.door.look(Box::new(look));
    let answer = tokio::time::timeout(PATIENCE, answer).await;
    let sample = answer.ok().and_then(Result::ok).flatten();
    model.metrics.sampled(sample.clone());
    sample
}
