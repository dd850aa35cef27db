//! The same start in other KV formats and at other lengths, each planned in full.

use std::fmt::Write as _;

use serde::Serialize;

use super::{data, escaped};
use crate::dtype::KvDtype;
use crate::engines::setup::Setup;
use crate::engines::{Engine, Plan};
use crate::figure::{Figure, Unit};
use crate::fit::Fit;
use crate::model::Model;

/// Shortest length drawn, tokens.
const SHORTEST: u64 = 1024;
/// Longest, where the model's training says nothing.
const LONGEST: u64 = 131_072;
/// Longest at all.
const LIMIT: u64 = 1 << 21;

/// What is drawn over the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Height {
    /// Requests of that length at once.
    Concurrency,
    /// Bytes of the KV buffer: llama.cpp holds as many sequences as it is told to.
    KvBytes,
}

/// One KV format.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Its name.
    pub format: String,
    /// Whether it is the planned one.
    pub planned: bool,
    /// Bytes of a token.
    pub kv_bytes_per_token: Option<Figure>,
    /// Full requests at the planned length.
    pub concurrency: Option<Figure>,
    /// Longest request.
    pub max_len: Option<Figure>,
    /// Length in tokens and height, in order of length.
    pub points: Vec<(u64, f64)>,
}

/// All formats.
#[derive(Debug)]
pub struct Sweep {
    rows: Vec<Row>,
    /// What the points' second number is.
    pub height: Height,
}

impl Sweep {
    /// Plans every format at every power of two.
    pub fn new(engine: &dyn Engine, model: &Model, fit: &Fit) -> Sweep {
        let setup = &fit.setup;
        let height = match engine.name() {
            "llamacpp" => Height::KvBytes,
            _ => Height::Concurrency,
        };
        let names: &[&str] = match engine.name() {
            "llamacpp" => &["f16", "q8_0", "q4_0"],
            "reef" => &["f32", "bf16", "q8_0", "q4_0"],
            _ => &["bf16", "fp8", "nvfp4"],
        };
        let longest = fit.plan.max_model_len.or(model.trained_context).unwrap_or(LONGEST);
        let longest = longest.max(model.trained_context.unwrap_or(0)).clamp(SHORTEST * 2, LIMIT);
        let mut formats: Vec<(String, KvDtype, KvDtype)> = names
            .iter()
            .filter_map(|name| KvDtype::parse(name).map(|dtype| (name.to_string(), dtype, dtype)))
            .collect();
        let own = (setup.kv_keys, setup.kv_values);
        if !formats.iter().any(|(_, keys, values)| (*keys, *values) == own) {
            let name = match own.0 == own.1 {
                true => own.0.name().to_string(),
                false => format!("{}/{}", own.0.name(), own.1.name()),
            };
            formats.insert(0, (name, own.0, own.1));
        }
        let rows = formats.into_iter().filter_map(|(format, kv_keys, kv_values)| {
            let planned = (kv_keys, kv_values) == own;
            let setup = Setup { kv_keys, kv_values, ..setup.clone() };
            let plan = engine.plan(model, &setup).ok()?;
            let points = points(engine, model, &setup, longest, height);
            (!points.is_empty()).then_some(Row {
                format,
                planned,
                kv_bytes_per_token: plan.kv_bytes_per_token,
                concurrency: plan.concurrency,
                max_len: plan.max_len,
                points,
            })
        });
        Sweep { rows: rows.collect(), height }
    }

    /// The formats that can be planned.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Adds the table of formats.
    pub fn push_table(&self, page: &mut String) {
        if self.rows.is_empty() {
            return;
        }
        page.push_str(
            "<table>\n<thead><tr><th>KV format</th><th>per token</th><th>full requests</th>\
             <th>longest request</th></tr></thead>\n<tbody>\n",
        );
        for row in &self.rows {
            let cell = |figure: &Option<Figure>| figure.as_ref().map_or("-".into(), data);
            let name = escaped(&row.format);
            let name = if row.planned { format!("<b>{name}</b>") } else { name };
            let _ = writeln!(
                page,
                "<tr><td>{name}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                cell(&row.kv_bytes_per_token),
                cell(&row.concurrency),
                cell(&row.max_len)
            );
        }
        page.push_str("</tbody>\n</table>\n");
    }
}

fn points(
    engine: &dyn Engine,
    model: &Model,
    setup: &Setup,
    longest: u64,
    height: Height,
) -> Vec<(u64, f64)> {
    let mut lengths: Vec<u64> = Vec::new();
    let mut length = SHORTEST;
    while length < longest {
        lengths.push(length);
        length *= 2;
    }
    lengths.push(longest);
    let value = |plan: Plan| match height {
        Height::Concurrency => plan.concurrency,
        Height::KvBytes => plan.kv_needed,
    };
    let planned = lengths.into_iter().filter_map(|length| {
        let setup = Setup { max_model_len: Some(length), ..setup.clone() };
        Some((length, value(engine.plan(model, &setup).ok()?)?.value))
    });
    planned.filter(|(_, value)| *value > 0.0 && value.is_finite()).collect()
}

/// How the height is written.
pub fn unit(height: Height) -> Unit {
    match height {
        Height::Concurrency => Unit::Sequences,
        Height::KvBytes => Unit::Bytes,
    }
}
