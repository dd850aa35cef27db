//! `reef plan`: what an engine would print about memory before it starts, and which flag to change.

mod fit;

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
}

/// Runs `reef plan`.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.question {
        Question::Fit(args) => fit::run(args),
    }
}
