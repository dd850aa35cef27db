//! `reef-load start`: from the start of the process until it is ready.

use reef_load::served::Served;
use serde_json::json;

use crate::programs::Programs;

/// From the start of the process until it is ready
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    programs: Programs,
    /// Starts; the first warms the page cache and does not count
    #[arg(long, default_value_t = 9)]
    repetitions: usize,
}

/// Starts and ends it again and again.
///
/// # Errors
/// It does not start.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let (model, bytes_per_token) = args.programs.model()?;
    let words = args.programs.serve(&model, (bytes_per_token * 8192.0) as u64);
    let log = args.programs.logs()?.join("start.log");
    let mut ready_ms = Vec::new();
    for repetition in 0..=args.repetitions {
        let served = Served::start(&args.programs.reef()?, &words, &log).await?;
        if repetition > 0 {
            ready_ms.push(served.ready_ms);
        }
        served.end().await?;
    }
    ready_ms.sort_by(f64::total_cmp);
    let median = ready_ms.get(ready_ms.len() / 2);
    match args.programs.json {
        true => println!("{}", json!({ "ready_ms": ready_ms, "ready_ms_median": median })),
        false => println!("ready in {median:?} ms, the middle of {ready_ms:.0?}"),
    }
    Ok(())
}
