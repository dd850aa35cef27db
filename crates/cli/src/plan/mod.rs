//! `reef plan`: what an engine would print about memory before it starts, and which flag to change.

mod ask;
mod devices;
mod fit;
mod page;
mod read;
mod score;
mod search;

/// Plan memory and concurrency before starting an engine
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    question: Question,
}

#[derive(clap::Subcommand)]
enum Question {
    /// Say whether a model fits, where the gigabytes go, and which flag to change
    Fit(Box<fit::Args>),
    /// Read a start-up log and explain how it differs from the plan
    Read(Box<read::Args>),
    /// Compare predictions with a table of real start-up logs
    Score(score::Args),
    /// Ask one question of a capacity planner: the number, the formula, what moves it most
    Ask(ask::Args),
    /// Find the configurations that serve given traffic within latency targets
    Search(Box<search::Args>),
    /// List the devices that `--gpu` knows
    Devices(devices::Args),
}

/// Runs `reef plan`.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.question {
        Question::Fit(args) => fit::run(*args),
        Question::Read(args) => read::run(*args),
        Question::Score(args) => score::run(args),
        Question::Ask(args) => ask::run(args),
        Question::Search(args) => search::run(*args),
        Question::Devices(args) => devices::run(args),
    }
}
