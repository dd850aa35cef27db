//! `reef plan`: what an engine would print about memory before it starts, and which flag to change.

mod fit;
mod score;

/// Plan memory and concurrency before starting an engine
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    question: Question,
}

#[derive(clap::Subcommand)]
enum Question {
    /// Say whether a model fits, where the gigabytes go, and which flag to change
    Fit(fit::Args),
    /// Compare predictions with a table of real start-up logs
    Score(score::Args),
}

/// Runs `reef plan`.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.question {
        Question::Fit(args) => fit::run(args),
        Question::Score(args) => score::run(args),
    }
}
