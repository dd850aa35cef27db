//! `reef eval`: what a KV format or policy does to the model's answers.

mod ids;
mod logits;
mod ppl;

/// Measure what a KV format or policy does to the model's answers
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    measure: Measure,
}

#[derive(clap::Subcommand)]
enum Measure {
    /// Likelihood of a text, teacher-forced through the pages that generation uses
    Ppl(ppl::Args),
    /// Logits of a list of token ids, in the format of llama.cpp's goldens
    Logits(logits::Args),
}

/// Runs `reef eval`.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.measure {
        Measure::Ppl(args) => ppl::run(args),
        Measure::Logits(args) => logits::run(args),
    }
}
