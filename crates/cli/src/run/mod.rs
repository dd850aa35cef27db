//! `reef run`: text from one prompt (or a chat on a terminal) within a KV budget.

mod branches;
mod chat;
mod plot;
mod stream;
mod summary;
mod timeline;
mod usage;

use std::fs::OpenOptions;
use std::io::{IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use reef_engine::{Branches, Engine, Request, Sampling};
use reef_model::gguf::Gguf;
use reef_model::tokenizer::{Encode, Tokenizer};

use crate::kv_args::KvArgs;
use crate::load::{ModelArgs, open};
use crate::output::{WrongArguments, note, print_json};
use crate::serving_args::ServingArgs;
use crate::{Common, signals};
use chat::Chat;
use stream::Streamed;

/// Generate text from one prompt and tell what its KV memory went through
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt; without one, a chat on a terminal, else stdin
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with = "prompt_file",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Put the prompt into the model's chat template
    #[arg(long)]
    chat: bool,
    /// A Jinja chat template to use instead of the file's; implies --chat
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Generate at most N tokens [default: what fits at the contract's floor]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<usize>,
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    serving: ServingArgs,
    /// Give N continuations, with the seeds from --seed on; they share the prompt's KV
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "beams")]
    n: usize,
    /// Beam search with N beams; gives the best continuation
    #[arg(long, value_name = "N")]
    beams: Option<usize>,
    /// 0 takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Choose among the likeliest tokens that have this probability together
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Choose among the K likeliest tokens; 0: all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Seed of the random choice
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// End before this text (may be given several times)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Go on past the model's end-of-text tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Draw the KV memory over time, by format and with each rung marked, as an SVG file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Runs `reef run`.
pub fn run(args: Args) -> anyhow::Result<()> {
    check(&args)?;
    let path = args.model.path()?;
    let prompt = prompt(&args)?;
    let gguf = open(&path)?;
    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    let chat = match args.chat || args.chat_template.is_some() || prompt.is_none() {
        true => Some(Chat::new(&gguf, &tokenizer, args.chat_template.as_deref())?),
        false => None,
    };
    let ids = match (&chat, &prompt) {
        (Some(chat), Some(prompt)) => Some(chat.first_turn(prompt)?),
        (None, Some(prompt)) => Some(tokenizer.encode(prompt, Encode::default())?),
        _ => None,
    };
    let tokens = ids.as_ref().zip(args.max_tokens);
    let tokens = tokens.map(|(ids, max_tokens)| ids.len().saturating_add(max_tokens));
    let mut engine = engine(&args, &gguf, tokens)?;
    drop(gguf);
    args.serving.equip(&mut engine, &tokenizer, &args.model, args.common.threads())?;
    // Only now: what comes before has nothing to show, so Ctrl-C just ends it.
    let interrupted = signals::install()?;
    let Some(ids) = ids else {
        let chat = chat.context("a chat has a template")?;
        return chat
            .converse(&mut |ids| generate(&args, &tokenizer, &mut engine, ids, interrupted));
    };
    if let Some(path) = &args.plot {
        check_plot(path)?;
    }
    if args.n != 1 || args.beams.is_some() {
        return branches::run(&args, &tokenizer, &mut engine, request(&args, &tokenizer, ids));
    }
    let streamed = generate(&args, &tokenizer, &mut engine, ids, interrupted)?;
    let plotted = args.plot.as_deref().map_or(Ok(()), |path| {
        std::fs::write(path, plot::svg(&streamed, &args.model.model))
            .with_context(|| format!("cannot write --plot {}", path.display()))
    });
    match args.common.json {
        true => print_json(&usage::document(&streamed))?,
        false => note(&summary::text(&streamed)),
    }
    // Last: a full disk must not cost the answer.
    plotted
}

/// Refuses a file that cannot be written, before minutes of work; one that exists stays as it is.
fn check_plot(path: &Path) -> anyhow::Result<()> {
    let opened = OpenOptions::new().create(true).append(true).open(path);
    opened.map(drop).with_context(|| format!("cannot write --plot {}", path.display()))
}

fn check(args: &Args) -> anyhow::Result<()> {
    args.kv.check()?;
    sampling(args).check().map_err(|e| anyhow::Error::new(WrongArguments(e)))
}

fn sampling(args: &Args) -> Sampling {
    let Args { temperature, top_p, top_k, seed, .. } = *args;
    Sampling { temperature, top_p, top_k, seed, ..Sampling::default() }
}

/// The prompt, or `None` for a chat on a terminal.
fn prompt(args: &Args) -> anyhow::Result<Option<String>> {
    if let Some(text) = &args.prompt {
        return Ok(Some(text.clone()));
    }
    if let Some(path) = &args.prompt_file {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read --prompt-file {}", path.display()))?;
        return Ok(Some(text));
    }
    if std::io::stdin().is_terminal() {
        let asked = [("--json", args.common.json), ("--plot", args.plot.is_some())];
        if let Some((option, _)) = asked.iter().find(|(_, asked)| *asked) {
            bail!(WrongArguments(format!("{option} needs a prompt: give -p or --prompt-file")));
        }
        return Ok(None);
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("cannot read the prompt from stdin")?;
    Ok(Some(text))
}

fn engine(args: &Args, gguf: &Gguf, tokens: Option<usize>) -> anyhow::Result<Engine> {
    let mut runner = args.model.runner(gguf, args.common.threads())?;
    let config = args.kv.engine_config(gguf, &mut runner, &args.model, tokens)?;
    Ok(Engine::new(runner, config)?)
}

fn request(args: &Args, tokenizer: &Tokenizer, prompt: Vec<u32>) -> Request {
    let end_ids = match args.ignore_eos {
        true => Vec::new(),
        false => tokenizer.vocabulary().end_of_generation().to_vec(),
    };
    let (max_tokens, sampling) = (args.max_tokens, sampling(args));
    let branches = match args.beams {
        Some(width) => Branches::Beams { width, n: 1, length_penalty: 1.0, early_stopping: false },
        None if args.n == 1 => Branches::One,
        None => Branches::Sample { n: args.n, best_of: args.n },
    };
    let plain = Request::new(prompt, args.kv.fidelity());
    Request { max_tokens, sampling, end_ids, branches, ..plain }
}

fn generate(
    args: &Args,
    tokenizer: &Tokenizer,
    engine: &mut Engine,
    prompt: Vec<u32>,
    interrupted: &std::sync::atomic::AtomicBool,
) -> anyhow::Result<Streamed> {
    let request = request(args, tokenizer, prompt);
    let _running = signals::running();
    stream::stream(engine, tokenizer, &request, &args.stop, !args.common.json, interrupted)
}
