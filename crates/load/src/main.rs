//! `reef-load`: does `reef serve` hold under many clients, and how fast is it over HTTP, beside a peer.

mod hold;
mod programs;
mod rate;
mod start;
mod verdict;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

/// Loads `reef serve` and `llama-server` on this machine
#[derive(Parser)]
#[command(name = "reef-load", version)]
struct Args {
    #[command(subcommand)]
    word: Word,
}

#[derive(Subcommand)]
enum Word {
    /// Many streaming clients in a part of the KV memory that they need
    Hold(hold::Args),
    /// Tokens a second of many streams of one length, memory enough for all
    Rate(rate::Args),
    /// From the start of the process until it is ready
    Start(start::Args),
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let run = |runtime: tokio::runtime::Runtime| match Args::parse().word {
        Word::Hold(args) => runtime.block_on(hold::run(args)),
        Word::Rate(args) => runtime.block_on(rate::run(args)).map(|()| true),
        Word::Start(args) => runtime.block_on(start::run(args)).map(|()| true),
    };
    match runtime.context("no runtime").and_then(run) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
