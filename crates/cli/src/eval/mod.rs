//! `reef eval`: what a KV format or policy does to the model's answers.

mod frontier;
mod ids;
mod kld;
mod ladder;
mod logits;
mod ppl;
mod profile;
mod recall;
mod stream;
mod table;
mod text;
mod treatment;

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
    /// How far KV formats are from f16 KV: divergence, agreement, perplexity
    Kld(kld::Args),
    /// Whether values told earlier are still found after compression
    Recall(recall::Args),
    /// Blocks that become smaller in the middle of a text, against f16 and small from the start
    Ladder(ladder::Args),
    /// A very long text in a fixed budget, past the trained context
    Stream(stream::Args),
    /// Quality against bytes per token, over KV formats, policies and budgets
    Frontier(frontier::Args),
    /// What lossy KV memory costs the model, measured anew and kept: the guard of 4-bit keys, the harm of
    /// each rung, the rotation of keys
    Profile(profile::Args),
    /// Logits of a list of token ids, in the format of llama.cpp's goldens
    Logits(logits::Args),
}

/// Runs `reef eval`.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.measure {
        Measure::Ppl(args) => ppl::run(args),
        Measure::Kld(args) => kld::run(args),
        Measure::Recall(args) => recall::run(args),
        Measure::Ladder(args) => ladder::run(args),
        Measure::Stream(args) => stream::run(args),
        Measure::Frontier(args) => frontier::run(args),
        Measure::Profile(args) => profile::run(args),
        Measure::Logits(args) => logits::run(args),
    }
}
