//! What a question asks for: names, units, defaults and limits, declared once; the command line and the
//! documentation are made from these declarations.

use crate::ask::AskError;
use crate::ask::quantity;
use crate::device::Device;
use crate::figure::Unit;
use crate::model::Model;

/// What is known while defaults are worked out: the tables' rows and the inputs declared before.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    /// The model asked about.
    pub model: Option<&'a Model>,
    /// The device asked about.
    pub device: Option<&'a Device>,
    /// Inputs declared before, resolved.
    pub resolved: &'a [Resolved],
}

impl<'a> Facts<'a> {
    /// The model; an error names the input that the question forgot to declare.
    pub fn model(&self) -> Result<&'a Model, AskError> {
        self.model.ok_or(AskError::Undeclared("model"))
    }

    /// The device; an error names the input that the question forgot to declare.
    pub fn device(&self) -> Result<&'a Device, AskError> {
        self.device.ok_or(AskError::Undeclared("gpu"))
    }

    /// The number of an input declared before.
    pub fn number(&self, name: &'static str) -> Result<f64, AskError> {
        let found = self.resolved.iter().find(|input| input.name == name);
        match found.map(|input| &input.value) {
            Some(Value::Number(number)) => Ok(*number),
            _ => Err(AskError::Undeclared(name)),
        }
    }

    /// The word of an input declared before.
    pub fn word(&self, name: &'static str) -> Result<&'a str, AskError> {
        let found = self.resolved.iter().find(|input| input.name == name);
        match found.map(|input| &input.value) {
            Some(Value::Word(word)) => Ok(word),
            _ => Err(AskError::Undeclared(name)),
        }
    }
}

/// What an input is when the asker does not say.
#[derive(Clone, Copy)]
pub enum Fallback {
    /// This number.
    Number(f64),
    /// A number from the model, the device or inputs before; the text says from where.
    Worked(&'static str, fn(&Facts) -> Result<f64, AskError>),
    /// This word, one of the list (any word if the list is empty).
    Word(&'static str, &'static [&'static str]),
}

/// Which table a word of an input is looked up in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// None: the word stands for itself.
    None,
    /// Models, by name or file.
    Models,
    /// Devices, by name.
    Devices,
}

/// One input of a question.
#[derive(Clone, Copy)]
pub struct Input {
    /// Its name in formulas; on the command line with `-` for `_`.
    pub name: &'static str,
    /// What it counts.
    pub unit: Unit,
    /// What it is, in a few words.
    pub meaning: &'static str,
    /// What it is when not given.
    pub fallback: Fallback,
    /// Where a word is looked up.
    pub table: Table,
    /// Smallest and largest value that makes sense.
    pub limits: (f64, f64),
    /// Whole numbers only.
    pub is_whole: bool,
    /// A fact of the model or the format: not varied when the question is asked what moves the answer.
    pub is_fixed: bool,
}

impl Input {
    /// A number with a default.
    pub fn number(name: &'static str, unit: Unit, default: f64, meaning: &'static str) -> Input {
        Input::new(name, unit, Fallback::Number(default), meaning)
    }

    /// A number worked out from the model, the device or inputs before it; `origin` says how.
    pub fn worked(
        name: &'static str,
        unit: Unit,
        origin: &'static str,
        work: fn(&Facts) -> Result<f64, AskError>,
        meaning: &'static str,
    ) -> Input {
        Input::new(name, unit, Fallback::Worked(origin, work), meaning)
    }

    /// A word of `choices`.
    pub fn choice(
        name: &'static str,
        default: &'static str,
        choices: &'static [&'static str],
        meaning: &'static str,
    ) -> Input {
        Input::new(name, Unit::Count, Fallback::Word(default, choices), meaning)
    }

    fn new(name: &'static str, unit: Unit, fallback: Fallback, meaning: &'static str) -> Input {
        let limits = match unit {
            Unit::Ratio => (0.0, 1.0),
            // Times bytes a token this still fits 64 bits.
            Unit::Tokens => (1.0, 1e12),
            Unit::Blocks | Unit::Sequences | Unit::Count => (1.0, 1e15),
            _ => (1e-12, 1e24),
        };
        let is_fixed = matches!(fallback, Fallback::Word(..));
        let table = Table::None;
        Input { name, unit, meaning, fallback, table, limits, is_whole: false, is_fixed }
    }

    /// Whole numbers only.
    pub fn whole(self) -> Input {
        Input { is_whole: true, ..self }
    }

    /// A fact that is not varied.
    pub fn fixed(self) -> Input {
        Input { is_fixed: true, ..self }
    }

    /// Other limits.
    pub fn within(self, low: f64, high: f64) -> Input {
        Input { limits: (low, high), ..self }
    }

    /// Its name on the command line, without the dashes.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// The value that `text` means.
    pub fn parse(&self, text: &str) -> Result<Value, AskError> {
        let wrong = |mend: String| AskError::Wrong {
            field: format!("--{}", self.flag()),
            value: text.to_string(),
            mend,
        };
        if let Fallback::Word(_, choices) = self.fallback {
            let word = text.trim();
            return match choices.is_empty() || choices.contains(&word) {
                true => Ok(Value::Word(word.to_string())),
                false => Err(wrong(format!("write one of {}", choices.join(", ")))),
            };
        }
        let number = quantity::parse(text, self.unit).map_err(wrong)?;
        self.check(number).map_err(wrong)?;
        Ok(Value::Number(number))
    }

    /// Whether a number is within the limits; the error is the mend.
    pub fn check(&self, number: f64) -> Result<(), String> {
        let (low, high) = self.limits;
        if !(low..=high).contains(&number) {
            let [low, high] = [low, high].map(|limit| quantity::display(limit, self.unit));
            return Err(format!("write a value from {low} to {high}"));
        }
        if self.is_whole && number.fract() != 0.0 {
            return Err("write a whole number".into());
        }
        Ok(())
    }
}

/// The value of an input.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number in the base unit: bytes, seconds, operations.
    Number(f64),
    /// A word.
    Word(String),
}

/// An input with its value and where that came from.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// Name of the input.
    pub name: &'static str,
    /// What it counts.
    pub unit: Unit,
    /// What it is.
    pub meaning: &'static str,
    /// Its value.
    pub value: Value,
    /// Where the value came from.
    pub origin: Origin,
}

/// Where the value of an input came from.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// The asker.
    Given,
    /// The model, the device or inputs before; the text says how.
    Worked(String),
    /// The declaration.
    Default,
}
