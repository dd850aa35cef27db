//! `cargo xtask sim`: replays one world, or many, and says what failed and what was covered.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use reef_sim::campaign::{Campaign, campaign};
use reef_sim::coverage::Row;
use reef_sim::run::{keep_panics, run};
use reef_sim::shrink::shrink;
use reef_sim::world::{Part, Recipe, World};

const USAGE: &str =
    "usage: cargo xtask sim --seed N [--keep 0,3,...] [--without PART,...] [--shrink] [--log]
       cargo xtask sim --seeds A..B [--threads N] [--least HITS] [--json]
parts: faults spill spill-faults prefix drafts branches priorities tenants cancels deadlines
       lossy windows sampling";

#[derive(Default)]
struct Options {
    recipe: Option<Recipe>,
    keep: Option<Vec<usize>>,
    without: Vec<Part>,
    seeds: Option<std::ops::Range<u64>>,
    threads: Option<usize>,
    least: u64,
    json: bool,
    shrink: bool,
    log: bool,
}

fn main() -> ExitCode {
    keep_panics();
    let words: Vec<String> = std::env::args().skip(1).collect();
    match options(&words).and_then(|options| start(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn options(words: &[String]) -> anyhow::Result<Options> {
    let mut options = Options::default();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value\n{USAGE}"));
        match word.as_str() {
            "--seed" => options.recipe = Some(Recipe::of_seed(value()?.parse()?)),
            "--seeds" => {
                let (from, to) = value()?.split_once("..").context("--seeds A..B")?;
                options.seeds = Some(from.parse()?..to.parse()?);
            }
            "--keep" => {
                let numbers = value()?.split(',').map(str::parse);
                options.keep = Some(numbers.collect::<Result<_, _>>()?);
            }
            "--without" => {
                for name in value()?.split(',') {
                    let part = Part::ALL.iter().find(|(_, known)| *known == name);
                    options.without.push(part.with_context(|| format!("no part `{name}`"))?.0);
                }
            }
            "--threads" => options.threads = Some(value()?.parse()?),
            "--least" => options.least = value()?.parse()?,
            "--json" => options.json = true,
            "--shrink" => options.shrink = true,
            "--log" => options.log = true,
            _ => bail!("`{word}` is no option of sim\n{USAGE}"),
        }
    }
    if let Some(recipe) = &mut options.recipe {
        recipe.keep = options.keep.take();
        recipe.without = std::mem::take(&mut options.without);
    }
    ensure!(options.recipe.is_some() != options.seeds.is_some(), "{USAGE}");
    Ok(options)
}

/// Whether all was well.
fn start(options: &Options) -> anyhow::Result<bool> {
    if let Some(recipe) = &options.recipe {
        return Ok(replay(recipe, options));
    }
    let seeds = options.seeds.clone().unwrap_or(0..0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let begin = Instant::now();
    let result = campaign(seeds.clone(), options.threads.unwrap_or(cores));
    let seconds = begin.elapsed().as_secs_f64();
    let thin = result.coverage.below(options.least);
    if options.json {
        println!("{}", json(&result, &thin, seconds));
    } else {
        print!("{}", result.coverage.table());
        println!(
            "{} worlds, {} steps in {seconds:.1} s: {:.0} steps/s; log {:016x}",
            seeds.end.saturating_sub(seeds.start),
            result.steps,
            result.steps as f64 / seconds,
            result.hash
        );
    }
    for (recipe, failure) in &result.failures {
        eprintln!("{recipe}: {failure}");
    }
    for row in &thin {
        eprintln!("covered less than {} times: {}", options.least, row.name());
    }
    Ok(result.failures.is_empty() && thin.is_empty())
}

fn replay(recipe: &Recipe, options: &Options) -> bool {
    let report = run(&World::new(recipe), options.log);
    for line in &report.lines {
        println!("{line}");
    }
    println!("{recipe}: {} turns, {} steps, log {:016x}", report.turns, report.steps, report.hash);
    for failure in &report.failures {
        eprintln!("{failure}");
    }
    if options.shrink && !report.failures.is_empty() {
        let kind = report.failures[0].kind;
        let mut fails = |candidate: &Recipe| {
            run(&World::new(candidate), false).failures.iter().any(|failure| failure.kind == kind)
        };
        let arrivals = World::new(recipe).arrivals.len();
        println!("smallest: {}", shrink(recipe, arrivals, 400, &mut fails));
    }
    report.failures.is_empty()
}

fn json(result: &Campaign, thin: &[Row], seconds: f64) -> serde_json::Value {
    let coverage: serde_json::Map<String, serde_json::Value> =
        Row::ALL.iter().map(|&row| (row.name().into(), result.coverage.of(row).into())).collect();
    let failures: Vec<serde_json::Value> = result
        .failures
        .iter()
        .map(|(recipe, failure)| {
            serde_json::json!({"recipe": recipe.to_string(), "failure": failure.to_string()})
        })
        .collect();
    serde_json::json!({
        "worlds": result.worlds, "steps": result.steps, "turns": result.turns,
        "seconds": seconds, "steps_per_s": result.steps as f64 / seconds,
        "log": format!("{:016x}", result.hash), "coverage": coverage,
        "below_least": thin.iter().map(|row| row.name()).collect::<Vec<_>>(),
        "failures": failures,
    })
}
