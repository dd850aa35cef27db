//! What a log says and how it differs from the plan, as text for terminals.

use std::fmt::Write as _;

use super::Reading;
use super::compare::{Agreement, Basis, Comparison};
use super::facts::Word;
use crate::report::shown;

/// Everything that was read, with its lines.
pub fn facts(reading: &Reading) -> String {
    let mut text = String::new();
    let engine = reading.engine;
    let generation = reading.generation.as_deref().unwrap_or("");
    let version = reading.facts.word(Word::Version).map_or("version not said", |(text, _)| text);
    let _ = writeln!(text, "{engine} {version} {generation}: {} lines read\n", reading.lines);
    for (word, said, line) in reading.facts.words() {
        let name = format!("{word:?}");
        let _ = writeln!(text, "{name:16} {said}  (line {line})");
    }
    let _ = writeln!(text);
    for (quantity, figure) in reading.facts.figures() {
        let name = format!("{quantity:?}");
        let value = shown(figure.value, figure.unit);
        let _ = writeln!(text, "{name:16} {value:>13}  {}", figure.explanation());
    }
    for note in &reading.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

/// The comparison, line by line.
pub fn comparison(comparison: &Comparison) -> String {
    let mut text = String::new();
    let head = ["", "log", "planned", "difference", "", ""];
    let _ = writeln!(
        text,
        "{:27} {:>13} {:>13} {:>11}  {:9} {}",
        head[0], head[1], head[2], head[3], head[4], head[5]
    );
    for basis in [Basis::Flags, Basis::LogsPool] {
        let lines: Vec<_> = comparison.lines.iter().filter(|line| line.basis == basis).collect();
        if lines.is_empty() {
            continue;
        }
        let _ = writeln!(
            text,
            "{}",
            match basis {
                Basis::Flags => "from model, device and flags alone:",
                Basis::LogsPool => "from the pool that the log prints:",
            }
        );
        for line in lines {
            let log = shown(line.log.value, line.log.unit);
            let plan = line.plan.as_ref().map_or("-".into(), |plan| shown(plan.value, plan.unit));
            let relative =
                line.relative.map_or(String::new(), |share| format!("{:+.2} %", 100.0 * share));
            let word = word(line.agreement);
            let _ = writeln!(
                text,
                "  {:25} {log:>13} {plan:>13} {relative:>11}  {word:9} {}",
                line.name,
                line.reason.as_deref().unwrap_or("")
            );
        }
    }
    text
}

/// An agreement in one word.
pub fn word(agreement: Agreement) -> &'static str {
    match agreement {
        Agreement::Equal => "equal",
        Agreement::InRange => "in range",
        Agreement::Differs => "differs",
        Agreement::OnlyLog => "log only",
    }
}
