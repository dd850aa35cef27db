//! `reef`: the command line. This file is the table of contents; one subcommand is one file.

mod bench;
mod chart;
mod completions;
mod eval;
mod inspect;
mod kv_args;
mod load;
mod memory;
mod output;
mod peer;
mod plan;
mod profiles;
mod progress;
mod pull;
mod run;
mod serve;
mod serving_args;
mod signals;
mod tokenize;
mod top;
mod workload;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use reef_server::sizes;

/// An LLM serving engine in which KV-cache memory is the budget.
#[derive(Parser)]
#[command(name = "reef", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Generate text from one prompt and tell what its KV memory went through
    Run(run::Args),
    /// Serve a model to OpenAI and vLLM clients over HTTP
    Serve(Box<serve::Args>),
    /// Watch the memory and the requests of a running server
    Top(top::Args),
    /// Fetch a known model, check it and print its path
    Pull(pull::Args),
    /// Show what is in a GGUF file: header, tensors, tokenizer, bytes per KV token
    Inspect(inspect::Args),
    /// Turn text into token ids
    Tokenize(tokenize::Args),
    /// Measure prefill and decode speed, also beside a peer engine
    Bench(bench::Args),
    /// Measure what a KV format or policy does to the model's answers
    Eval(eval::Args),
    /// Plan memory and concurrency before starting an engine
    Plan(plan::Args),
    /// Print a script that completes reef's words in your shell
    Completions(completions::Args),
}

/// The options that every subcommand has; flatten it into its `Args`.
#[derive(clap::Args, Clone, Debug)]
pub struct Common {
    /// Print one JSON document on stdout and nothing else there
    #[arg(long)]
    pub json: bool,
    /// Threads to compute with [default: the cores of this machine]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<usize>,
}

impl Common {
    /// Threads to compute with: `--threads`, else the cores that this process may use (at least 1).
    pub fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.unwrap_or_else(cores)
    }
}

/// More than any CPU has: a typing error, not a wish.
const THREADS_MAX: usize = 1024;

fn parse_threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=THREADS_MAX) => Ok(threads),
        _ => Err(format!("want a whole number from 1 to {THREADS_MAX}")),
    }
}

fn main() -> ExitCode {
    let words = match serve::with_config(&Cli::command(), std::env::args_os().collect()) {
        Ok(words) => words,
        Err(error) => return output::report(&error),
    };
    let cli = Cli::parse_from(words); // wrong arguments end here, with status 2
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => output::report(&error),
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::run(*args),
        Command::Top(args) => top::run(args),
        Command::Pull(args) => pull::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Tokenize(args) => tokenize::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Completions(args) => completions::run(args, Cli::command()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn arguments_are_consistent() {
        super::Cli::command().debug_assert();
    }

    #[test]
    fn threads_have_limits() {
        assert_eq!(super::parse_threads("2"), Ok(2));
        for wrong in ["0", "-1", "1025", "two", ""] {
            assert!(super::parse_threads(wrong).is_err(), "{wrong}");
        }
    }
}
