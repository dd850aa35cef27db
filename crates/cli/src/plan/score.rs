//! `reef plan score`: predictions against a table of real start-up logs.

use std::fmt::Write as _;
use std::path::PathBuf;

use reef_plan::score::{self, RowScore, Score};

use crate::{Common, output};

/// Compare predictions with a table of real start-up logs
#[derive(clap::Args)]
pub struct Args {
    /// A CSV with the columns of `crates/plan/tests/data/cases.csv`
    #[arg(value_name = "FILE.csv")]
    table: PathBuf,
    /// Directory of the model configs that the column `config_file` names [default: the bundled ones]
    #[arg(long, value_name = "DIR")]
    configs: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// Runs `reef plan score`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let score = score::score(&args.table, args.configs.as_deref())?;
    if args.common.json {
        return output::print_json(&score);
    }
    output::print_line(text(&score).trim_end())
}

fn text(score: &Score) -> String {
    let mut text = String::new();
    for row in &score.rows {
        let _ = writeln!(text, "{}", line(row));
    }
    let _ = writeln!(text, "\nby family");
    for (family, tally) in &score.summary.families {
        let _ = writeln!(
            text,
            "  {:2} rows, {:2} within 1 %, {:2} exact  {family}",
            tally.n, tally.within_1pct, tally.exact
        );
    }
    let summary = &score.summary;
    for (name, tally) in [("independent rows", summary.independent), ("all rows", summary.all)] {
        let _ = writeln!(
            text,
            "{name}: {} compared, {} within 1 %, {} exact at the log's rounding",
            tally.n, tally.within_1pct, tally.exact
        );
    }
    let starts = summary.starts;
    let _ = writeln!(
        text,
        "starts or refuses: {} of {} right, {} undecided",
        starts.right, starts.n, starts.undecided
    );
    let end = summary.end_to_end;
    let _ = writeln!(
        text,
        "without a log: {} rows, median error {:.1} %, 90th percentile {:.1} %, range covers {}",
        end.n,
        end.median_error * 100.0,
        end.p90_error * 100.0,
        end.covered
    );
    if summary.errors > 0 {
        let _ = writeln!(text, "rows that could not be predicted: {}", summary.errors);
    }
    text
}

fn line(row: &RowScore) -> String {
    let mut line = format!("{:6}", row.case_id);
    match (&row.error, row.checks.first()) {
        (Some(error), _) => {
            let _ = write!(line, " error: {error}");
        }
        (None, None) => line.push_str(" nothing to compare"),
        (None, Some(check)) => {
            let mark = match (check.exact, check.within_1pct) {
                (true, _) => "exact",
                (_, true) => "<= 1 %",
                _ => "OFF",
            };
            let _ = write!(
                line,
                " {:16} {:>14.2} against {:>14.2} {:+8.3} % {mark}",
                check.metric,
                check.predicted,
                check.reported,
                check.relative_error * 100.0
            );
        }
    }
    let others = row.checks.iter().skip(1).filter(|check| !check.within_1pct);
    for check in others {
        let _ = write!(line, "; {} {:.2} / {:.2}", check.metric, check.predicted, check.reported);
    }
    if let Some(start) = row.starts.as_ref().filter(|start| start.right != Some(true)) {
        let _ = write!(line, "; start: {:?}, was {}", start.predicted, start.reported);
    }
    if let Some(end) = &row.end_to_end {
        let _ = write!(
            line,
            "; without log {:.2} ({:.2} to {:.2}) against {:.2}",
            end.predicted_gib, end.low_gib, end.high_gib, end.reported_gib
        );
    }
    line
}
