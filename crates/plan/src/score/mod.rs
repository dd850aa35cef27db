//! Predictions against a table of real start-up logs, row by row and by family.
//!
//! The columns are those of `tests/data/cases.csv`; columns and cells may be missing. A row is scored
//! only on what it says: numbers that its log prints, predicted from other numbers of the log, from the
//! config and from the flags.

pub mod cells;
pub mod check;
pub mod end_to_end;
pub mod row;
pub mod start;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::Serialize;

use crate::model::Model;
use crate::source;
use check::Check;
use end_to_end::EndToEnd;
use row::Row;
use start::Start;

/// Most rows of a table.
const LIMIT_ROWS: usize = 100_000;

/// A table that cannot be read at all.
#[derive(Debug, thiserror::Error)]
pub enum ScoreError {
    /// The file or its CSV.
    #[error("cannot read {path}: {reason}")]
    Table {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

/// The score of one row.
#[derive(Clone, Debug, Serialize)]
pub struct RowScore {
    /// Column `case_id`.
    pub case_id: String,
    /// Column `family`.
    pub family: String,
    /// Column `engine`.
    pub engine: String,
    /// Column `model`.
    pub model: String,
    /// Column `independence`.
    pub independence: String,
    /// Metric of the first check.
    pub metric: Option<&'static str>,
    /// Prediction of the first check.
    pub predicted: Option<f64>,
    /// Report of the first check.
    pub reported: Option<f64>,
    /// Relative error of the first check.
    pub relative_error: Option<f64>,
    /// Whether the first check is within 1 %.
    pub within_1pct: Option<bool>,
    /// Whether the first check is exact at the log's print rounding.
    pub exact: Option<bool>,
    /// All checks, the most telling first.
    pub checks: Vec<Check>,
    /// Whether the engine starts.
    pub starts: Option<Start>,
    /// The pool predicted from model, device and flags alone.
    pub end_to_end: Option<EndToEnd>,
    /// Why the row could not be predicted.
    pub error: Option<String>,
}

/// Rows compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Rows with a check.
    pub n: usize,
    /// Rows whose first check is within 1 %.
    pub within_1pct: usize,
    /// Rows whose first check is exact.
    pub exact: usize,
}

/// Start-up verdicts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StartTally {
    /// Rows that say and that something decides.
    pub n: usize,
    /// Right predictions among them.
    pub right: usize,
    /// Rows that say but give nothing that decides.
    pub undecided: usize,
}

/// Predictions without a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct EndToEndTally {
    /// Rows with a known device, a known inventory and a reported pool.
    pub n: usize,
    /// Median of |relative error|.
    pub median_error: f64,
    /// 90th percentile of |relative error|.
    pub p90_error: f64,
    /// Rows whose reported pool is in the stated range.
    pub covered: usize,
}

/// The sums.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Rows marked `independent`.
    pub independent: Tally,
    /// All rows.
    pub all: Tally,
    /// Starts and refusals.
    pub starts: StartTally,
    /// Without a log.
    pub end_to_end: EndToEndTally,
    /// Rows that could not be predicted.
    pub errors: usize,
    /// By the first word or two of the family.
    pub families: BTreeMap<String, Tally>,
}

/// The score of a table.
#[derive(Clone, Debug, Serialize)]
pub struct Score {
    /// Rows in the order of the table.
    pub rows: Vec<RowScore>,
    /// Their sums.
    pub summary: Summary,
}

/// Scores the table at `table`; the configs are in `configs`, with the bundled ones behind it.
///
/// # Errors
/// A table that cannot be read. A row that cannot be predicted carries its error.
pub fn score(table: &Path, configs: Option<&Path>) -> Result<Score, ScoreError> {
    let rows = read_rows(table)?;
    let mut models = Models { folder: configs, read: HashMap::new() };
    let rows: Vec<RowScore> = rows.iter().map(|row| score_row(row, &mut models)).collect();
    let summary = summary(&rows);
    Ok(Score { rows, summary })
}

fn read_rows(table: &Path) -> Result<Vec<Row>, ScoreError> {
    let wrong = |reason: String| ScoreError::Table { path: table.display().to_string(), reason };
    let text = std::fs::read_to_string(table).map_err(|error| wrong(error.to_string()))?;
    let mut reader = csv::ReaderBuilder::new()
        .comment(Some(b'#'))
        .flexible(true)
        .from_reader(text.trim_start_matches('\u{feff}').as_bytes());
    let header = reader.headers().map_err(|error| wrong(error.to_string()))?.clone();
    if !header.iter().any(|column| column == "engine") {
        return Err(wrong("its header has no column `engine`".into()));
    }
    let mut rows = Vec::new();
    for record in reader.records().take(LIMIT_ROWS) {
        let record = record.map_err(|error| wrong(error.to_string()))?;
        let cells = header.iter().zip(record.iter());
        rows.push(Row(cells
            .map(|(column, cell)| (column.to_string(), cell.to_string()))
            .collect()));
    }
    Ok(rows)
}

/// Models read once each.
struct Models<'a> {
    folder: Option<&'a Path>,
    read: HashMap<String, Result<Model, String>>,
}

impl Models<'_> {
    /// The model of a `config_file` cell: from the folder, else bundled. A file that is prose where a
    /// number should be gives way to the bundled config of its name.
    fn get(&mut self, cell: &str) -> Result<Model, String> {
        let folder = self.folder;
        let read = self.read.entry(cell.to_string()).or_insert_with(|| {
            let name = cell.trim().trim_start_matches("configs/").trim_end_matches(".json");
            if name.is_empty() {
                return Err("the row names no config_file".into());
            }
            let path = folder.map(|folder| folder.join(format!("{name}.json")));
            let from_folder =
                path.filter(|path| path.is_file()).map(|path| source::read_with_bundled(&path));
            let model = from_folder.unwrap_or_else(|| source::read(name, &[]));
            model.map_err(|error| error.to_string())
        });
        read.clone()
    }
}

fn score_row(row: &Row, models: &mut Models<'_>) -> RowScore {
    let text = |column| row.text(column).to_string();
    let mut score = RowScore {
        case_id: text("case_id"),
        family: text("family"),
        engine: text("engine"),
        model: text("model"),
        independence: text("independence"),
        metric: None,
        predicted: None,
        reported: None,
        relative_error: None,
        within_1pct: None,
        exact: None,
        checks: Vec::new(),
        starts: None,
        end_to_end: None,
        error: None,
    };
    if let Err(error) = fill_row(row, models, &mut score) {
        score.error = Some(error);
    }
    if let Some(first) = score.checks.first() {
        score.metric = Some(first.metric);
        score.predicted = Some(first.predicted);
        score.reported = Some(first.reported);
        score.relative_error = Some(first.relative_error);
        score.within_1pct = Some(first.within_1pct);
        score.exact = Some(first.exact);
    }
    score
}

fn fill_row(row: &Row, models: &mut Models<'_>, score: &mut RowScore) -> Result<(), String> {
    let Some(engine) = row.engine() else {
        return Err(format!("engine `{}` is not known", row.text("engine")));
    };
    let model = models.get(row.text("config_file"))?;
    row.check_format()?;
    let setup = row.setup(&model);
    setup.check().map_err(|error| error.to_string())?;
    score.starts = start::start(row, engine, &model, &setup);
    score.end_to_end = end_to_end::compare(row, engine, &model, &setup);
    score.checks = check::checks(row, &model, &setup).map_err(|error| error.to_string())?;
    Ok(())
}

fn summary(rows: &[RowScore]) -> Summary {
    let mut summary = Summary::default();
    for row in rows {
        summary.errors += usize::from(row.error.is_some());
        if let (Some(within), Some(exact)) = (row.within_1pct, row.exact) {
            let family = summary.families.entry(row.family.clone()).or_default();
            let independent =
                (row.independence == "independent").then_some(&mut summary.independent);
            for tally in [Some(family), independent, Some(&mut summary.all)].into_iter().flatten() {
                tally.n += 1;
                tally.within_1pct += usize::from(within);
                tally.exact += usize::from(exact);
            }
        }
        match row.starts.as_ref().map(|start| start.right) {
            Some(Some(right)) => {
                summary.starts.n += 1;
                summary.starts.right += usize::from(right);
            }
            Some(None) => summary.starts.undecided += 1,
            None => {}
        }
    }
    summary.end_to_end = end_to_end::tally(rows.iter().filter_map(|row| row.end_to_end.as_ref()));
    summary
}
