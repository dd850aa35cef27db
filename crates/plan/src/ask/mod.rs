//! `reef plan ask`: one question, one file, behind one small trait.
//!
//! A [`Question`] declares its inputs and works its answer out on a [`worksheet::Worksheet`]. Everything
//! else follows from that: the command line, defaults from the model and device tables, the formula with
//! the numbers put in, what moves the answer most, JSON, and the worked example of the documentation.

use std::collections::BTreeMap;

use crate::config::ConfigError;
use crate::device::{self, Device, UnknownDevice};
use crate::figure::Figure;
use crate::model::{MissingFields, Model};
use crate::source;

pub mod input;
pub mod quantity;
mod questions;
pub mod report;
pub mod sensitivity;
pub(crate) mod standard;
mod start;
pub mod worksheet;

use input::{Facts, Fallback, Input, Origin, Resolved, Table, Value};
use sensitivity::Sensitivity;
use worksheet::{Comparison, Step, Worksheet};
pub(crate) use worksheet::{fact, inputs, step};

/// What a question is, in words.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// The word on the command line.
    pub name: &'static str,
    /// Other words for it.
    pub aliases: &'static [&'static str],
    /// The planning questions (E1 to E37 of docs/plan.md) that it answers: `E8`.
    pub covers: &'static [&'static str],
    /// The question, as one would ask it.
    pub asks: &'static str,
    /// Why the formula is what it is, and where it stops being true.
    pub explanation: &'static str,
    /// Papers, logs or measurements behind formula and defaults.
    pub source: &'static str,
}

/// What a question's work came to.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Name of the step that is the answer.
    pub answer: &'static str,
    /// The choice that follows, in a word or two, where there is one.
    pub decision: Option<String>,
    /// What to do: one sentence that names the flag to change.
    pub advice: String,
}

/// A number that the example must agree with.
#[derive(Clone, Copy, Debug)]
pub struct Cited {
    /// The step that it is about.
    pub step: &'static str,
    /// The number, in the step's base unit.
    pub value: f64,
    /// Share by which the two may differ: the rounding of the source.
    pub tolerance: f64,
    /// Where it stands.
    pub from: &'static str,
}

/// One input of the example replaced, and the answer that must come out (worked out by hand).
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// Name of the input.
    pub input: &'static str,
    /// Its new value.
    pub to: &'static str,
    /// The answer then, in its base unit.
    pub answer: f64,
}

/// A worked example on real hardware: shown in the documentation, held by a test.
#[derive(Clone, Copy, Debug)]
pub struct Example {
    /// Inputs given; the rest keep their defaults.
    pub given: &'static [(&'static str, &'static str)],
    /// The answer, worked out by hand, in its base unit.
    pub answer: f64,
    /// A figure of the literature that the example agrees with.
    pub cited: Cited,
    /// Two inputs moved.
    pub moves: [Move; 2],
}

/// A question of a capacity planner.
pub trait Question: Sync {
    /// What it is, in words.
    fn about(&self) -> About;
    /// What it asks for; an input's default may use those before it.
    fn inputs(&self) -> Vec<Input>;
    /// Works the answer out.
    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError>;
    /// A worked example.
    fn example(&self) -> Example;
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No question of that name.
    #[error("`{name}` is no question; write one of {known}")]
    UnknownQuestion {
        /// The name asked for.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The question has no such input.
    #[error("--{input}: `{question}` has no such input; it has {known}")]
    UnknownInput {
        /// The question.
        question: &'static str,
        /// The input given.
        input: String,
        /// The inputs that exist.
        known: String,
    },
    /// A value that cannot be.
    #[error("{field} = `{value}`: {mend}")]
    Wrong {
        /// The input.
        field: String,
        /// Its value.
        value: String,
        /// What to write instead.
        mend: String,
    },
    /// The formula has no finite answer for these inputs.
    #[error("{0}")]
    NoAnswer(String),
    /// A question uses an input that it does not declare.
    #[error("the question uses the input `{0}` without declaring it")]
    Undeclared(&'static str),
    /// No such device.
    #[error(transparent)]
    Device(#[from] UnknownDevice),
    /// The model could not be read.
    #[error("--model: {0}")]
    Model(#[from] ConfigError),
    /// The model lacks what the answer needs.
    #[error(transparent)]
    Missing(#[from] MissingFields),
}

/// The number and the choice of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    /// The number, in its base unit.
    pub value: f64,
    /// The choice, where there is one.
    pub decision: Option<String>,
}

/// A question answered.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What was asked.
    pub about: About,
    /// Name of the step that is the answer.
    pub answer: &'static str,
    /// The answer's number.
    pub figure: Figure,
    /// The choice that follows from it.
    pub decision: Option<String>,
    /// What to do.
    pub advice: String,
    /// Inputs and where they came from.
    pub inputs: Vec<Resolved>,
    /// The work.
    pub steps: Vec<Step>,
    /// Choices side by side.
    pub comparisons: Vec<Comparison>,
    /// What each input does to the answer, the strongest first.
    pub sensitivity: Vec<Sensitivity>,
}

/// Every question, in the order of docs/plan.md.
pub fn questions() -> &'static [&'static dyn Question] {
    questions::ALL
}

/// The question of a name or alias.
pub fn find(name: &str) -> Result<&'static dyn Question, AskError> {
    let matches = |question: &&&dyn Question| {
        let about = question.about();
        about.name == name || about.aliases.contains(&name)
    };
    questions().iter().find(matches).copied().ok_or_else(|| AskError::UnknownQuestion {
        name: name.to_string(),
        known: questions().iter().map(|q| q.about().name).collect::<Vec<_>>().join(", "),
    })
}

/// Answers `question`. `given` holds inputs by their names (`_` or `-`); `set` holds `FIELD=VALUE` pairs
/// that supply or overrule fields of the model's config.
pub fn ask(
    question: &dyn Question,
    given: &[(String, String)],
    set: &[String],
) -> Result<Answer, AskError> {
    let declared = question.inputs();
    let given = given_by_name(question, &declared, given)?;
    let model = model_of(&declared, &given, set)?;
    let device = device_of(&declared, &given)?;
    let asked =
        Asked { question, declared: &declared, given: &given, model: model.as_ref(), device };
    let (verdict, sheet) = asked.work(None)?;
    let step = sheet.steps.iter().rev().find(|step| step.name == verdict.answer);
    let figure = step.ok_or(AskError::Undeclared(verdict.answer))?.figure.clone();
    if !figure.value.is_finite() {
        let about = question.about();
        return Err(AskError::NoAnswer(format!("`{}` has no finite answer here", about.name)));
    }
    let base = Decided { value: figure.value, decision: verdict.decision.clone() };
    let valued: Vec<(Input, Value)> =
        declared.iter().zip(&sheet.inputs).map(|(i, r)| (*i, r.value.clone())).collect();
    let sensitivity = sensitivity::vary(&valued, &base, |name, number| asked.decided(name, number));
    let figure = within_variations(figure, &sensitivity);
    Ok(Answer {
        about: question.about(),
        answer: verdict.answer,
        figure,
        decision: verdict.decision,
        advice: verdict.advice,
        inputs: sheet.inputs,
        steps: sheet.steps,
        comparisons: sheet.comparisons,
        sensitivity,
    })
}

/// The figure with the range that a fifth of any one input leaves it.
fn within_variations(figure: Figure, sensitivity: &[Sensitivity]) -> Figure {
    let answers = sensitivity
        .iter()
        .flat_map(|varied| [varied.lower.answer, varied.higher.answer])
        .flatten()
        .filter(|answer| answer.is_finite());
    let (low, high) = answers.fold((figure.value, figure.value), |(low, high), answer| {
        (low.min(answer), high.max(answer))
    });
    figure.within(low, high)
}

/// Names with `_`, checked against the declaration.
fn given_by_name(
    question: &dyn Question,
    declared: &[Input],
    given: &[(String, String)],
) -> Result<BTreeMap<&'static str, String>, AskError> {
    let mut by_name = BTreeMap::new();
    for (name, value) in given {
        let name = name.replace('-', "_");
        let Some(input) = declared.iter().find(|input| input.name == name) else {
            let known: Vec<String> =
                declared.iter().map(|input| format!("--{}", input.flag())).collect();
            return Err(AskError::UnknownInput {
                question: question.about().name,
                input: name.replace('_', "-"),
                known: known.join(" "),
            });
        };
        by_name.insert(input.name, value.clone());
    }
    Ok(by_name)
}

/// The word of the first input that is looked up in `table`.
fn word_for(
    declared: &[Input],
    given: &BTreeMap<&'static str, String>,
    table: Table,
) -> Option<String> {
    let input = declared.iter().find(|input| input.table == table)?;
    let Fallback::Word(default, _) = input.fallback else { return None };
    Some(given.get(input.name).map_or(default, String::as_str).to_string())
}

fn model_of(
    declared: &[Input],
    given: &BTreeMap<&'static str, String>,
    set: &[String],
) -> Result<Option<Model>, AskError> {
    let name = word_for(declared, given, Table::Models);
    Ok(name.map(|name| source::read(&name, set)).transpose()?)
}

fn device_of(
    declared: &[Input],
    given: &BTreeMap<&'static str, String>,
) -> Result<Option<&'static Device>, AskError> {
    let name = word_for(declared, given, Table::Devices);
    Ok(name.map(|name| device::find(&name)).transpose()?)
}

/// A question with everything it needs to be worked, and worked again with one input changed.
struct Asked<'a> {
    question: &'a dyn Question,
    declared: &'a [Input],
    given: &'a BTreeMap<&'static str, String>,
    model: Option<&'a Model>,
    device: Option<&'a Device>,
}

impl<'a> Asked<'a> {
    fn work(&self, changed: Option<(&str, f64)>) -> Result<(Verdict, Worksheet<'a>), AskError> {
        let inputs = self.resolve(changed)?;
        let mut sheet = Worksheet::new(self.model, self.device, inputs);
        let verdict = self.question.work(&mut sheet)?;
        Ok((verdict, sheet))
    }

    /// The answer with input `name` at `number`; `None` where there is none.
    fn decided(&self, name: &'static str, number: f64) -> Option<Decided> {
        let (verdict, sheet) = self.work(Some((name, number))).ok()?;
        let step = sheet.steps.iter().rev().find(|step| step.name == verdict.answer)?;
        Some(Decided { value: step.figure.value, decision: verdict.decision })
    }

    fn resolve(&self, changed: Option<(&str, f64)>) -> Result<Vec<Resolved>, AskError> {
        let mut resolved: Vec<Resolved> = Vec::with_capacity(self.declared.len());
        for input in self.declared {
            let facts = Facts { model: self.model, device: self.device, resolved: &resolved };
            let replaced = changed.filter(|(name, _)| *name == input.name);
            let (value, origin) = match (replaced, self.given.get(input.name), input.fallback) {
                (Some((_, number)), ..) => (Value::Number(number), Origin::Given),
                (_, Some(text), _) => (input.parse(text)?, Origin::Given),
                (_, _, Fallback::Number(number)) => (Value::Number(number), Origin::Default),
                (_, _, Fallback::Word(word, _)) => (Value::Word(word.to_string()), Origin::Default),
                (_, _, Fallback::Worked(how, work)) => {
                    (Value::Number(self.worked(input, work(&facts)?)?), Origin::Worked(how.into()))
                }
            };
            resolved.push(Resolved {
                name: input.name,
                unit: input.unit,
                meaning: input.meaning,
                value,
                origin,
            });
        }
        Ok(resolved)
    }

    /// A worked default, checked: a model or device may lack what a question is about.
    fn worked(&self, input: &Input, number: f64) -> Result<f64, AskError> {
        match input.check(number) {
            Ok(()) => Ok(number),
            Err(mend) => Err(AskError::Wrong {
                field: format!("--{} (from the model or device)", input.flag()),
                value: quantity::display(number, input.unit),
                mend: format!("{mend}: give --{} or another --model or --gpu", input.flag()),
            }),
        }
    }
}

#[cfg(test)]
mod tests;
