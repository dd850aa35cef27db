//! `reef serve`: the engine over HTTP.

mod access_args;
mod config;
mod engine_args;
mod kv_event_args;
mod log_args;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use reef_engine::{Engine, EngineConfig, EngineHandle, Tenant};
use reef_kv::Fidelity;
use reef_model::chat_template::{ChatTemplate, ChatTemplateError};
use reef_model::gguf::Gguf;
use reef_model::tokenizer::Tokenizer;
use reef_server::app::unix_time;
use reef_server::grammar::Grammars;
use reef_server::kv_events::KvPublisher;
use reef_server::lifecycle::{self, Drained, State, Stop};
use reef_server::metrics::{ModelMetrics, Served};
use reef_server::telemetry;
use reef_server::{App, Model, Settings, http};
use serde_json::json;

use crate::kv_args::KvArgs;
use crate::load::{ModelArgs, open};
use crate::output::{WrongArguments, note, print_json};
use crate::serving_args::ServingArgs;
use crate::{Common, sizes};

use access_args::AccessArgs;
pub use config::with_config;
use engine_args::EngineArgs;
use kv_event_args::KvEventArgs;
use log_args::LogArgs;

/// How often the engine is asked whether it lives.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long the costs of steps are measured at start.
const CALIBRATION: Duration = Duration::from_millis(400);

/// Serve a model to OpenAI and vLLM clients over HTTP
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    /// Read options from a TOML file: `port = 8000` for --port 8000; flags and environment win
    #[arg(long, value_name = "FILE", env = "REEF_CONFIG")]
    config: Option<PathBuf>,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", env = "REEF_HOST")]
    host: IpAddr,
    /// Port to listen on; 0: any that is free, printed when ready
    #[arg(long, value_name = "PORT", default_value_t = 8080, env = "REEF_PORT")]
    port: u16,
    /// Id of the model in requests and answers; may be given several times [default: its alias or file stem]
    #[arg(long, value_name = "NAME", env = "REEF_SERVED_MODEL_NAME", value_delimiter = ',')]
    served_model_name: Vec<String>,
    /// A Jinja chat template to use instead of the file's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Largest body of a request
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = sizes::parse)]
    max_body_size: u64,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    serving: ServingArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    kv_events: KvEventArgs,
    #[command(flatten)]
    log: LogArgs,
}

/// Runs `reef serve`.
pub fn run(mut args: Args) -> anyhow::Result<()> {
    // Whoever did not ask for it gets no answer from a context with holes: a prompt longer than
    // `max_model_len` is refused, as clients expect.
    args.kv.set_default_fidelity(Fidelity::Int4);
    args.kv.check()?;
    args.kv_events.check(args.access.is_insecure())?;
    let started = telemetry::start(&args.log.settings());
    let _telemetry = started.map_err(|error| WrongArguments(error.to_string()))?;
    let access = args.access.access(args.host)?;
    let limits = args.access.limits();
    let app = Arc::new(App::guarded(settings(&args)?, access, limits));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the server's runtime")?;
    runtime.block_on(serve(args, app))
}

async fn serve(args: Args, app: Arc<App>) -> anyhow::Result<()> {
    let address = SocketAddr::new(args.host, args.port);
    let listener = lifecycle::bind(address)
        .with_context(|| format!("cannot listen on {address} (--host, --port)"))?;
    let url = format!("http://{}", listener.local_addr()?);
    let router = http::router(app.clone());
    let tenants = app.access.engine_tenants();
    let json = args.common.json;
    let loading = tokio::task::spawn_blocking(move || load(&args, tenants));
    let served = lifecycle::serve(listener, router, app.lifecycle.clone(), Stop::on_signals()?);
    let ready = async {
        // Publishes as long as it is held.
        let (model, _publisher) = loading.await.context("the model's loader failed")??;
        let door = model.door.clone();
        app.set_model(model);
        note(&format!("ready: {} at {url}", app.model_name()));
        if json {
            let pid = std::process::id();
            print_json(&json!({"url": url, "models": app.settings.model_names, "pid": pid}))?;
        }
        while door.is_alive() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        app.lifecycle.readiness.set(State::Dead);
        std::future::pending::<anyhow::Result<()>>().await
    };
    let Drained { in_flight, cut_off, engine_died } = tokio::select! {
        failed = ready => return failed,
        drained = served => drained,
    };
    note(&format!("stopped: {} of {in_flight} requests in flight finished", in_flight - cut_off));
    match engine_died {
        true => bail!("the engine has died; the log says why"),
        false => Ok(()),
    }
}

fn settings(args: &Args) -> anyhow::Result<Settings> {
    let names = match args.served_model_name.is_empty() {
        true => vec![default_name(&args.model.model)],
        false => args.served_model_name.clone(),
    };
    if names.iter().any(String::is_empty) {
        bail!(WrongArguments("--served-model-name is empty: give a name".into()));
    }
    let body_bytes_max = usize::try_from(args.max_body_size).context("--max-body-size")?;
    let settings = Settings::new("");
    Ok(Settings { model_names: names, fidelity: args.kv.fidelity(), body_bytes_max, ..settings })
}

/// The id that is shown.
fn model_name(args: &Args) -> String {
    args.served_model_name.first().cloned().unwrap_or_else(|| default_name(&args.model.model))
}

/// The alias, or the stem of a file's name.
fn default_name(model: &str) -> String {
    let path = std::path::Path::new(model);
    let is_file = path.extension().is_some_and(|extension| extension == "gguf");
    let stem = path.file_stem().filter(|_| is_file || model.contains('/'));
    stem.map_or(model.into(), |stem| stem.to_string_lossy().into_owned())
}

/// The model behind its door, and who tells routers of its cache.
fn load(args: &Args, tenants: Vec<Tenant>) -> anyhow::Result<(Model, Option<KvPublisher>)> {
    let gguf = open(&args.model.path()?)?;
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf)?);
    let template = template(args, &gguf, &tokenizer)?;
    let threads = args.common.threads();
    let mut runner = args.model.runner(&gguf, threads)?;
    let context = runner.spec().trained_context;
    let plain = args.kv.engine_config(&gguf, &mut runner, &args.model, None)?;
    let scheduling = args.engine.scheduling()?;
    let config = EngineConfig { scheduling, tenants, calibration: CALIBRATION, ..plain };
    let ends = tokenizer.vocabulary().end_of_generation();
    let (budget_bytes, block_size) = (config.budget_bytes, config.block_size);
    let mut engine = Engine::new(runner, config)?;
    args.serving.equip(&mut engine, &tokenizer, &args.model, threads)?;
    let publisher = args.kv_events.attach(&mut engine)?;
    let metrics = ModelMetrics::new(Served::new(model_name(args), &engine));
    let model = Model {
        root: args.model.model.clone(),
        created: unix_time(),
        context,
        budget_bytes,
        block_size,
        grammars: Arc::new(Grammars::new(tokenizer.clone(), ends)),
        tokenizer,
        template: template.map(Arc::new),
        door: Arc::new(EngineHandle::spawn(engine)?),
        metrics,
    };
    Ok((model, publisher))
}

/// The template asked for, else the file's; a base model has none.
fn template(
    args: &Args,
    gguf: &Gguf,
    tokenizer: &Tokenizer,
) -> anyhow::Result<Option<ChatTemplate>> {
    if let Some(path) = &args.chat_template {
        let source = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read --chat-template {}", path.display()))?;
        return Ok(Some(ChatTemplate::new(&source, tokenizer)?));
    }
    match ChatTemplate::from_gguf(gguf, tokenizer) {
        Ok(template) => Ok(Some(template)),
        Err(ChatTemplateError::Missing) => Ok(None),
        Err(error) => {
            // Completions work without it.
            note(&format!("no chat: {error}"));
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_by_its_alias_or_file() {
        assert_eq!(default_name("smollm2"), "smollm2");
        assert_eq!(default_name("models/Qwen3-0.6B.Q4_K_M.gguf"), "Qwen3-0.6B.Q4_K_M");
        assert_eq!(default_name("tiny.gguf"), "tiny");
    }
}
