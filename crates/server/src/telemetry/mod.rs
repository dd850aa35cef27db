//! Lines and spans about what the server does: one line for each request that has ended and for each
//! refusal, a span for each request where traces are exported. Never what was asked or answered.

mod context;
mod filter;
mod finished;
#[cfg(feature = "otlp")]
mod otlp;
mod track;

pub use context::RequestContext;
pub use filter::{LogFormat, LogSettings, TelemetryError, TelemetryGuard, start};
pub use finished::on_end;
pub use track::track;

/// Of lines about requests that have ended.
pub const REQUEST_TARGET: &str = "reef::request";
/// Of lines about answers that refuse.
pub const REFUSAL_TARGET: &str = "reef::refusal";
/// Of spans that are exported.
#[cfg(feature = "otlp")]
pub const SPAN_TARGET: &str = "reef::trace";
