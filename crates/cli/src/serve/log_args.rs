//! What is logged: the options of `reef serve`.

use reef_server::telemetry::{LogFormat, LogSettings};

/// How log lines look.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Format {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// What is logged, on stderr.
#[derive(clap::Args, Debug)]
pub struct LogArgs {
    /// How log lines look
    #[arg(
        long,
        value_name = "FORMAT",
        value_enum,
        default_value = "text",
        env = "REEF_LOG_FORMAT"
    )]
    log_format: Format,
    /// Least important lines that are logged: error, warn, info, debug, trace, off; or a list such as
    /// reef=debug,hyper=info [default: info]
    #[arg(long, value_name = "LEVEL", env = "REEF_LOG")]
    log_level: Option<String>,
}

impl LogArgs {
    /// As the server takes them.
    pub fn settings(&self) -> LogSettings {
        let format = match self.log_format {
            Format::Text => LogFormat::Text,
            Format::Json => LogFormat::Json,
        };
        LogSettings { format, level: self.log_level.clone() }
    }
}
