//! The documentation of the questions is made from their own output, so that it cannot go stale.
//! `REEF_WRITE_DOCS=1 cargo test -p reef-plan --test ask_docs` writes it anew.

use std::fs;
use std::path::{Path, PathBuf};

use reef_plan::ask::quantity::display;
use reef_plan::ask::sensitivity::{Sensitivity, Variation};
use reef_plan::ask::{self, Answer, Question};
use reef_plan::device;

fn docs(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

/// Holds that the part of a document between `<!-- NAME -->` and `<!-- end of NAME -->` is `wanted`.
fn check_part(document: &str, name: &str, wanted: &str) {
    let path = docs(document);
    let text = fs::read_to_string(&path).unwrap();
    let (start, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
    let from =
        text.find(&start).unwrap_or_else(|| panic!("{document} has no {start}")) + start.len();
    let to = text.find(&end).unwrap_or_else(|| panic!("{document} has no {end}"));
    if text[from..to] == *wanted {
        return;
    }
    let write = std::env::var_os("REEF_WRITE_DOCS").is_some();
    assert!(
        write,
        "{document}, {name}, is stale: REEF_WRITE_DOCS=1 cargo test -p reef-plan --test ask_docs"
    );
    fs::write(&path, format!("{}{wanted}{}", &text[..from], &text[to..])).unwrap();
}

fn given_of(question: &dyn Question) -> Vec<(String, String)> {
    let pair = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
    question.example().given.iter().map(pair).collect()
}

/// The command line of a question's example.
fn command_of(question: &dyn Question) -> String {
    let option = |(name, value): &(String, String)| match value.contains(' ') {
        true => format!(" --{name} \"{value}\""),
        false => format!(" --{name} {value}"),
    };
    let options: String = given_of(question).iter().map(option).collect();
    format!("reef plan ask {}{options}", question.about().name)
}

fn map_of_questions() -> String {
    let mut rows = String::from("| | sub-command | asks |\n|---|---|---|\n");
    for number in 1..=37 {
        let name = format!("E{number}");
        for question in ask::questions() {
            let about = question.about();
            if !about.covers.contains(&name.as_str()) {
                continue;
            }
            let aliases: String =
                about.aliases.iter().map(|alias| format!(", `{alias}`")).collect();
            rows += &format!("| {name} | `{}`{aliases} | {} |\n", about.name, about.asks);
        }
    }
    rows
}

fn side(answer: &Answer, varied: &Sensitivity, variation: &Variation) -> String {
    let input = answer.inputs.iter().find(|input| input.name == varied.input).unwrap();
    let at = display(variation.input, input.unit);
    let change = match variation.change {
        Some(change) if change.is_finite() => format!("{:+.1} %", 100.0 * change),
        _ => variation.answer.map_or("no answer".into(), |it| display(it, answer.figure.unit)),
    };
    let decision = variation.decision.as_ref().map_or(String::new(), |word| format!(", {word}"));
    format!("{at} {change}{decision}")
}

fn example_of(question: &dyn Question) -> String {
    let (about, example) = (question.about(), question.example());
    let answer = ask::ask(question, &given_of(question), &[]).unwrap();
    let number = display(answer.figure.value, answer.figure.unit);
    let decision = answer.decision.as_ref().map_or(String::new(), |word| format!("  ->  {word}"));
    let step = answer.steps.iter().rfind(|step| step.name == answer.answer).unwrap();
    let cited = answer.steps.iter().find(|step| step.name == example.cited.step).unwrap();
    let moved = match answer.sensitivity.first() {
        Some(varied) => format!(
            "`{}`: {}; {}",
            varied.input,
            side(&answer, varied, &varied.lower),
            side(&answer, varied, &varied.higher)
        ),
        None => "nothing by a fifth".into(),
    };
    let (formula, with_numbers) = (&step.formula, step.figure.explanation());
    let work = match formula == with_numbers {
        true => format!("  = {formula}"),
        false => format!("  = {formula}\n  = {with_numbers}"),
    };
    format!(
        "### {} {}\n{}\n```\n$ {}\n{} = {number}{decision}\n{work}\n```\n- Moves it most: {moved}\n- \
         Held against: `{}` = {}; {}\n- What to do: {}\n- Source: {}\n\n",
        about.covers.join(" "),
        about.name,
        about.asks,
        command_of(question),
        answer.answer,
        cited.name,
        display(cited.figure.value, cited.figure.unit),
        example.cited.from,
        answer.advice,
        about.source
    )
}

fn device_count() -> String {
    let uncertain = device::devices().iter().filter(|device| !device.uncertain.is_empty()).count();
    format!(
        "{} devices, {uncertain} of them with fields that no data sheet states plainly,\n",
        device::devices().len()
    )
}

/// One test, so that two parts of a file are never written at once.
#[test]
fn the_documents_are_what_the_program_says() {
    check_part("plan.md", "map of questions", &map_of_questions());
    check_part("plan.md", "devices", &device_count());
    let examples: String = ask::questions().iter().map(|question| example_of(*question)).collect();
    check_part("plan-examples.md", "worked examples", &examples);
}
