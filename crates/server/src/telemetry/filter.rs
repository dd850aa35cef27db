//! Where lines go, which ones, and how they look.

use std::io::IsTerminal as _;
use std::str::FromStr;

use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

/// Lines that may wait to be written; more are lost, and the server goes on.
const LINES_MAX: usize = 8192;
/// What other crates say below this is of no use to whoever runs a server.
const OTHERS: &str = "warn";

/// How lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// What is logged.
#[derive(Clone, Debug, Default)]
pub struct LogSettings {
    /// How lines look.
    pub format: LogFormat,
    /// `error`, `warn`, `info` (the default), `debug`, `trace` or `off` for the server's own lines; or a list
    /// of `target=level` as `tracing-subscriber` reads it.
    pub level: Option<String>,
}

/// Why nothing can be logged.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// A level that is none.
    #[error(
        "log level `{given}`: {reason}; give error, warn, info, debug, trace or off, or a list such as \
         reef=debug,hyper=info"
    )]
    Level {
        /// What was given.
        given: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Somebody else logs in this process.
    #[error("logging was set up before: {0}")]
    Twice(String),
    /// Traces are to be exported, and cannot be.
    #[error("traces cannot be exported: {0}; mend or unset OTEL_EXPORTER_OTLP_ENDPOINT")]
    Export(String),
}

/// Writes what is still to be written when it is dropped.
pub struct TelemetryGuard {
    _lines: WorkerGuard,
    #[cfg(feature = "otlp")]
    _spans: Option<super::otlp::SpanGuard>,
}

/// Logs to stderr from now on, by a thread of its own, and exports spans where the environment says so.
///
/// # Errors
/// A level that is none; a second start in one process; an endpoint that is none.
pub fn start(settings: &LogSettings) -> Result<TelemetryGuard, TelemetryError> {
    let filter = filter(settings.level.as_deref())?;
    let (writer, lines) =
        NonBlockingBuilder::default().buffered_lines_limit(LINES_MAX).finish(std::io::stderr());
    let subscriber =
        Registry::default().with(lines_layer(settings.format, writer).with_filter(filter));
    #[cfg(feature = "otlp")]
    let (subscriber, spans) = {
        let (layer, guard) = super::otlp::layer()?.unzip();
        (subscriber.with(layer), guard)
    };
    subscriber.try_init().map_err(|error| TelemetryError::Twice(error.to_string()))?;
    Ok(TelemetryGuard {
        _lines: lines,
        #[cfg(feature = "otlp")]
        _spans: spans,
    })
}

/// `None`: the server's own lines from `info` on, others' from [`OTHERS`] on.
fn filter(level: Option<&str>) -> Result<EnvFilter, TelemetryError> {
    let level = level.unwrap_or("info").trim();
    let is_level = |word: &str| LevelFilter::from_str(word).is_ok();
    // A misspelled level would be taken for a target, and silence all others.
    let word = level.split(',').map(str::trim).find(|word| !word.contains('=') && !is_level(word));
    if let Some(word) = word {
        let reason = format!("`{word}` is no level");
        return Err(TelemetryError::Level { given: level.into(), reason });
    }
    let one = is_level(level);
    let directives = match one {
        true => format!("{OTHERS},reef={level},reef_server={level},reef_engine={level}"),
        false => level.to_owned(),
    };
    EnvFilter::try_new(directives)
        .map_err(|error| TelemetryError::Level { given: level.into(), reason: error.to_string() })
}

fn lines_layer<S>(format: LogFormat, writer: NonBlocking) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    let layer = fmt::layer().with_writer(writer);
    match format {
        LogFormat::Text => layer.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => {
            layer.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_for_our_own_lines_and_a_list_for_all() {
        assert_eq!(
            filter(Some("debug")).unwrap().to_string().split(',').count(),
            4,
            "others stay at warnings"
        );
        assert_eq!(filter(Some("reef=trace")).unwrap().to_string(), "reef=trace");
        assert!(filter(None).is_ok());
        let error = filter(Some("reef=loud")).unwrap_err().to_string();
        assert!(error.contains("reef=loud") && error.contains("give error"), "{error}");
        let error = filter(Some("reef=debug,inof")).unwrap_err().to_string();
        assert!(error.contains("`inof` is no level"), "{error}");
    }
}
