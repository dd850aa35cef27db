//! `reef plan fit`: will it fit, and where do the gigabytes go.

use reef_plan::dtype::KvDtype;
use reef_plan::source;
use serde::Serialize;

use crate::{Common, output};

/// Say whether a model fits, where the gigabytes go, and which flag to change
#[derive(clap::Args)]
pub struct Args {
    /// An HF config.json, a directory with one, a GGUF, or the name of a bundled config
    #[arg(long)]
    model: String,
    /// Supply or overrule a field of the model's config
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    common: Common,
}

#[derive(Serialize)]
struct Report {
    model: String,
    kv_bytes_per_token: u64,
}

/// Runs `reef plan fit`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let model = source::read(&args.model, &args.set)?;
    let kv_bytes_per_token = model.kv_bytes_per_token(KvDtype::Bf16, 1);
    let report = Report { model: model.name, kv_bytes_per_token };
    if args.common.json {
        return output::print_json(&report);
    }
    output::print_line(&format!("{}: {} bytes of KV per token", report.model, kv_bytes_per_token))
}
