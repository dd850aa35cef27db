//! An answer for people and for programs.

use serde_json::{Value as Json, json};

use crate::ask::Answer;
use crate::ask::input::{Origin, Resolved, Value};
use crate::ask::quantity::{display, plain};
use crate::ask::sensitivity::{Sensitivity, Variation};
use crate::ask::worksheet::{Comparison, Worksheet};

/// Inputs that the text report names under "what moves it".
const STRONGEST: usize = 3;

impl Answer {
    /// The answer as text for a terminal, lines of at most about 110 characters.
    pub fn text(&self) -> String {
        let mut lines = vec![self.about.asks.to_string(), String::new()];
        let decision = self.decision.as_ref().map_or(String::new(), |word| format!("  ->  {word}"));
        let number = display(self.figure.value, self.figure.unit);
        lines.push(format!("  {} = {number}{decision}", self.answer));
        lines.push(String::new());
        lines.push("Inputs".into());
        lines.extend(columns(self.inputs.iter().map(input_cells).collect()));
        lines.push("Work".into());
        for step in &self.steps {
            let value = display(step.figure.value, step.figure.unit);
            let is_fact = step.formula == step.figure.explanation();
            if is_fact {
                lines.push(format!(
                    "  {} = {value}    ({}: {})",
                    step.name, step.meaning, step.formula
                ));
                continue;
            }
            lines.push(format!("  {} = {}    ({})", step.name, step.formula, step.meaning));
            lines.push(format!("    = {} = {value}", step.figure.explanation()));
        }
        for comparison in &self.comparisons {
            lines.push(comparison.title.clone());
            lines.extend(comparison_lines(comparison));
        }
        lines.push("What moves it most".into());
        lines.extend(self.moving_lines());
        lines.push(String::new());
        for (head, words) in [
            ("What to do", self.advice.as_str()),
            ("Why", self.about.explanation),
            ("Source", self.about.source),
        ] {
            lines.extend(wrapped(&format!("{head}: {words}")));
        }
        lines.join("\n")
    }

    /// The answer as one JSON document; `docs/plan.md` has the schema.
    pub fn json(&self) -> Json {
        let inputs: Vec<Json> = self.inputs.iter().map(input_json).collect();
        let steps: Vec<Json> = self.steps.iter().map(step_json).collect();
        let sensitivity = serde_json::to_value(&self.sensitivity).unwrap_or(Json::Null);
        let comparisons = serde_json::to_value(&self.comparisons).unwrap_or(Json::Null);
        let mut answer = serde_json::to_value(&self.figure).unwrap_or(Json::Null);
        answer["name"] = json!(self.answer);
        answer["text"] = json!(display(self.figure.value, self.figure.unit));
        json!({
            "question": self.about.name,
            "covers": self.about.covers,
            "asks": self.about.asks,
            "answer": answer,
            "decision": self.decision,
            "advice": self.advice,
            "inputs": inputs,
            "steps": steps,
            "comparisons": comparisons,
            "sensitivity": sensitivity,
            "moves_most": self.sensitivity.first().map(|strongest| strongest.input),
            "explanation": self.about.explanation,
            "source": self.about.source,
        })
    }

    fn moving_lines(&self) -> Vec<String> {
        if self.sensitivity.is_empty() {
            return vec!["  no input by a fifth: the answer is a step of whole numbers".into()];
        }
        self.sensitivity.iter().take(STRONGEST).map(|varied| self.moving_line(varied)).collect()
    }

    fn moving_line(&self, varied: &Sensitivity) -> String {
        let input = self.inputs.iter().find(|input| input.name == varied.input);
        let Some(input) = input else { return String::new() };
        let side = |variation: &Variation| {
            let at = display(variation.input, input.unit);
            let change = match (variation.answer, variation.change) {
                (None, _) => "no answer".to_string(),
                (_, Some(change)) if change.is_finite() => format!("{:+.1}%", 100.0 * change),
                (Some(answer), _) => display(answer, self.figure.unit),
            };
            let flip = variation.decision.as_ref().map_or(String::new(), |d| format!(" -> {d}"));
            format!("{at}: {change}{flip}")
        };
        format!("  {}  {}  |  {}", varied.input, side(&varied.lower), side(&varied.higher))
    }
}

fn input_cells(input: &Resolved) -> Vec<String> {
    let value = match &input.value {
        Value::Number(number) => display(*number, input.unit),
        Value::Word(word) => word.clone(),
    };
    let origin = match &input.origin {
        Origin::Given => "given".to_string(),
        Origin::Default => "default".to_string(),
        Origin::Worked(how) => how.clone(),
    };
    vec![input.name.to_string(), value, format!("{} ({origin})", input.meaning)]
}

fn input_json(input: &Resolved) -> Json {
    let flag = format!("--{}", input.name.replace('_', "-"));
    let mut json = match Worksheet::input_figure(input) {
        Some(figure) => serde_json::to_value(figure).unwrap_or(Json::Null),
        None => json!({}),
    };
    json["name"] = json!(input.name);
    json["flag"] = json!(flag);
    json["meaning"] = json!(input.meaning);
    if let Value::Word(word) = &input.value {
        json["value"] = json!(word);
        let is_given = input.origin == Origin::Given;
        json["provenance"] = json!(if is_given { "measured" } else { "assumed" });
    }
    json
}

fn step_json(step: &crate::ask::worksheet::Step) -> Json {
    let figure = &step.figure;
    json!({
        "name": step.name,
        "meaning": step.meaning,
        "formula": step.formula,
        "with_numbers": figure.explanation(),
        "value": figure.value,
        "unit": figure.unit,
        "text": display(figure.value, figure.unit),
    })
}

fn comparison_lines(comparison: &Comparison) -> Vec<String> {
    let mut rows = vec![comparison.columns.clone()];
    rows.extend(comparison.rows.iter().cloned());
    columns(rows)
}

/// Text in lines of at most 100 characters, the later ones indented.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        if lines[last].chars().count() + word.chars().count() >= 100 {
            lines.push(format!("  {word}"));
            continue;
        }
        if !lines[last].is_empty() {
            lines[last].push(' ');
        }
        lines[last].push_str(word);
    }
    lines
}

/// Rows with their cells under one another, two blanks before and between.
fn columns(rows: Vec<Vec<String>>) -> Vec<String> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let lengths = rows.iter().filter_map(|row| row.get(column));
        lengths.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell}{}", " ".repeat(width - cell.chars().count())))
            .collect();
        format!("  {}", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// A number of a comparison's cell.
pub fn cell(value: f64) -> String {
    plain(value)
}
