//! The sheet a question is worked on: inputs, then steps. The formula that is shown is the expression
//! that is computed, so that the two cannot part.

use std::fmt::Write as _;

use crate::ask::AskError;
use crate::ask::input::{Facts, Origin, Resolved, Value};
use crate::ask::quantity;
use crate::device::Device;
use crate::figure::{Figure, Unit};
use crate::model::Model;

/// One step of a worksheet.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Its name in later formulas.
    pub name: &'static str,
    /// What it is, in a few words.
    pub meaning: &'static str,
    /// The formula in names.
    pub formula: String,
    /// The number, with the formula with numbers put in.
    pub figure: Figure,
}

/// Numbers side by side, to choose among.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// What is compared.
    pub title: String,
    /// Heads of the columns.
    pub columns: Vec<String>,
    /// Cells, row by row.
    pub rows: Vec<Vec<String>>,
}

/// Inputs and steps of one answer.
pub struct Worksheet<'a> {
    model: Option<&'a Model>,
    device: Option<&'a Device>,
    /// Inputs in the order of their declaration.
    pub inputs: Vec<Resolved>,
    /// Steps in the order of the work.
    pub steps: Vec<Step>,
    /// Comparisons beside the answer.
    pub comparisons: Vec<Comparison>,
}

impl<'a> Worksheet<'a> {
    /// A sheet with inputs and no steps.
    pub fn new(
        model: Option<&'a Model>,
        device: Option<&'a Device>,
        inputs: Vec<Resolved>,
    ) -> Worksheet<'a> {
        Worksheet { model, device, inputs, steps: Vec::new(), comparisons: Vec::new() }
    }

    /// What defaults were worked out from.
    pub fn facts(&self) -> Facts<'_> {
        Facts { model: self.model, device: self.device, resolved: &self.inputs }
    }

    /// The model that the question declared.
    pub fn model(&self) -> Result<&'a Model, AskError> {
        self.model.ok_or(AskError::Undeclared("model"))
    }

    /// The device that the question declared.
    pub fn device(&self) -> Result<&'a Device, AskError> {
        self.device.ok_or(AskError::Undeclared("gpu"))
    }

    /// The number of an input.
    pub fn number(&self, name: &'static str) -> Result<f64, AskError> {
        self.facts().number(name)
    }

    /// The word of an input.
    pub fn word(&self, name: &'static str) -> Result<String, AskError> {
        self.facts().word(name).map(str::to_string)
    }

    /// Writes a step down and returns its value; use [`step!`](crate::ask::step).
    pub fn record(
        &mut self,
        name: &'static str,
        unit: Unit,
        formula: &str,
        value: f64,
        meaning: &'static str,
    ) -> f64 {
        let formula = tidy(formula);
        let with_numbers = self.put_in(&formula);
        let figure = Figure::derived(value, unit, with_numbers);
        self.steps.push(Step { name, meaning, formula, figure });
        value
    }

    /// Writes down a number that is read, not computed here; use [`fact!`](crate::ask::fact).
    pub fn fact(
        &mut self,
        name: &'static str,
        unit: Unit,
        value: f64,
        origin: &str,
        meaning: &'static str,
    ) -> f64 {
        let figure = Figure::derived(value, unit, origin);
        self.steps.push(Step { name, meaning, formula: origin.to_string(), figure });
        value
    }

    /// The formula with the values of inputs and steps in place of their names.
    fn put_in(&self, formula: &str) -> String {
        let mut text = String::new();
        let mut rest = formula;
        while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic() || c == '_') {
            // A digit before a letter: the exponent of a number.
            let in_number = rest[..start].ends_with(|c: char| c.is_ascii_digit() || c == '.');
            let length = rest[start..]
                .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
                .unwrap_or(rest.len() - start);
            let name = &rest[start..start + length];
            text.push_str(&rest[..start]);
            match self.shown(name).filter(|_| !in_number) {
                Some(shown) => text.push_str(&shown),
                None => text.push_str(name),
            }
            rest = &rest[start + length..];
        }
        text.push_str(rest);
        text
    }

    fn shown(&self, name: &str) -> Option<String> {
        if let Some(step) = self.steps.iter().rev().find(|step| step.name == name) {
            return Some(quantity::display(step.figure.value, step.figure.unit));
        }
        let input = self.inputs.iter().find(|input| input.name == name)?;
        match &input.value {
            Value::Number(number) => Some(quantity::display(*number, input.unit)),
            Value::Word(_) => None,
        }
    }

    /// Writes a comparison down.
    pub fn compare(&mut self, title: &str, columns: &[&str], rows: Vec<Vec<String>>) {
        let columns = columns.iter().map(|column| column.to_string()).collect();
        self.comparisons.push(Comparison { title: title.to_string(), columns, rows });
    }

    /// The inputs as figures: given ones measured, worked ones derived, defaults assumed.
    pub fn input_figure(input: &Resolved) -> Option<Figure> {
        let Value::Number(number) = input.value else { return None };
        Some(match &input.origin {
            Origin::Given => {
                let flag = input.name.replace('_', "-");
                Figure::measured(number, input.unit, format!("given: --{flag}"))
            }
            Origin::Worked(how) => Figure::derived(number, input.unit, how.clone()),
            Origin::Default => {
                Figure::assumed(number, number, number, input.unit, "default of the question")
            }
        })
    }
}

/// A formula as people read it: one line, `×` for `*`, whole numbers without a fraction.
fn tidy(formula: &str) -> String {
    let joined = formula.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut text = String::new();
    let mut characters = joined.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '*' => text.push('×'),
            '.' if characters.peek() == Some(&'0')
                && text.ends_with(|c: char| c.is_ascii_digit()) =>
            {
                characters.next();
                // `1.05` keeps its fraction, `1.0` loses it.
                if characters.peek().is_some_and(char::is_ascii_digit) {
                    let _ = write!(text, ".0");
                }
            }
            other => text.push(other),
        }
    }
    text
}

/// `step!(sheet, name: Unit = expression, "meaning")` computes the expression, writes it down as a step and
/// binds the value to `name`. Names in the expression are those of inputs and steps before.
macro_rules! step {
    ($sheet:ident, $name:ident: $unit:ident = $formula:expr, $meaning:expr) => {
        #[allow(unused_variables)] // a step may be there to be shown only
        let $name = $sheet.record(
            stringify!($name),
            $crate::figure::Unit::$unit,
            stringify!($formula),
            $formula,
            $meaning,
        );
    };
}
pub(crate) use step;

/// `fact!(sheet, name: Unit = value, "origin", "meaning")` writes down a number that comes from a table or a
/// procedure, says from where, and binds it to `name`.
macro_rules! fact {
    ($sheet:ident, $name:ident: $unit:ident = $value:expr, $origin:expr, $meaning:expr) => {
        #[allow(unused_variables)] // a fact may be there to be shown only
        let $name =
            $sheet.fact(stringify!($name), $crate::figure::Unit::$unit, $value, $origin, $meaning);
    };
}
pub(crate) use fact;

/// `inputs!(sheet; a, b)` binds the numbers of the inputs `a` and `b` to their names.
macro_rules! inputs {
    ($sheet:ident; $($name:ident),+) => {
        $(let $name = $sheet.number(stringify!($name))?;)+
    };
}
pub(crate) use inputs;

/// Rounds to the nearest whole number, for formulas.
pub(crate) fn round(value: f64) -> f64 {
    value.round()
}

/// The logarithm to base 2, for formulas.
pub(crate) fn log2(value: f64) -> f64 {
    value.log2()
}

/// Rounds up, for formulas.
pub(crate) fn ceil(value: f64) -> f64 {
    value.ceil()
}

/// Rounds down, for formulas.
pub(crate) fn floor(value: f64) -> f64 {
    value.floor()
}

/// The smaller, for formulas.
pub(crate) fn min(a: f64, b: f64) -> f64 {
    a.min(b)
}

/// The larger, for formulas.
pub(crate) fn max(a: f64, b: f64) -> f64 {
    a.max(b)
}

/// `a` to the power of `b`, for formulas.
pub(crate) fn pow(a: f64, b: f64) -> f64 {
    a.powf(b)
}

/// The square root, for formulas.
pub(crate) fn sqrt(value: f64) -> f64 {
    value.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_shown_is_the_one_computed() {
        let input = |name, unit, value| Resolved {
            name,
            unit,
            meaning: "",
            value: Value::Number(value),
            origin: Origin::Default,
        };
        let inputs = vec![
            input("kv_bytes", Unit::BytesPerToken, 131_072.0),
            input("tokens", Unit::Tokens, 8192.0),
        ];
        let mut sheet = Worksheet::new(None, None, inputs);
        let work = |sheet: &mut Worksheet| -> Result<f64, AskError> {
            inputs!(sheet; kv_bytes, tokens);
            step!(sheet, sequence: Bytes = kv_bytes * tokens, "a sequence");
            step!(sheet, twice: Bytes = max(2.0 * sequence, 1e9) + 1.05, "two of them");
            Ok(twice)
        };
        assert_eq!(work(&mut sheet).unwrap(), 2.0 * 1_073_741_824.0 + 1.05);
        assert_eq!(sheet.steps[0].formula, "kv_bytes × tokens");
        assert_eq!(sheet.steps[0].figure.explanation(), "131,072 B/token × 8,192");
        assert_eq!(sheet.steps[1].figure.explanation(), "max(2 × 1 GiB, 1e9) + 1.05");
    }
}
