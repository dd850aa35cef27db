//! Every question against its own example, its sources and the scope document.

use super::*;

fn given(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn is_near(found: f64, wanted: f64, tolerance: f64) -> bool {
    (found - wanted).abs() <= tolerance * wanted.abs().max(1e-12)
}

#[test]
fn every_example_gives_the_answer_worked_out_by_hand() {
    let mut wrong = Vec::new();
    for question in questions() {
        let (about, example) = (question.about(), question.example());
        match ask(*question, &given(example.given), &[]) {
            Err(error) => wrong.push(format!("{}: {error}", about.name)),
            Ok(answer) if !is_near(answer.figure.value, example.answer, 1e-4) => {
                wrong.push(format!("{}: {} != {}", about.name, answer.figure.value, example.answer));
            }
            Ok(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_example_agrees_with_a_published_figure() {
    let mut wrong = Vec::new();
    for question in questions() {
        let (about, example) = (question.about(), question.example());
        let cited = example.cited;
        let Ok(answer) = ask(*question, &given(example.given), &[]) else { continue };
        let step = answer.steps.iter().find(|step| step.name == cited.step);
        let value = step.map(|step| step.figure.value);
        if !value.is_some_and(|value| is_near(value, cited.value, cited.tolerance + 1e-12)) {
            wrong.push(format!("{} {}: {value:?} != {}", about.name, cited.step, cited.value));
        }
        if cited.from.is_empty() || about.source.is_empty() {
            wrong.push(format!("{}: no source", about.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn moving_two_inputs_changes_every_answer_as_worked_out_by_hand() {
    let mut wrong = Vec::new();
    for question in questions() {
        let (about, example) = (question.about(), question.example());
        for moved in example.moves {
            let mut given = given(example.given);
            given.retain(|(name, _)| name.replace('-', "_") != moved.input);
            given.push((moved.input.to_string(), moved.to.to_string()));
            match ask(*question, &given, &[]) {
                Err(error) => wrong.push(format!("{} {}: {error}", about.name, moved.input)),
                Ok(answer) if !is_near(answer.figure.value, moved.answer, 1e-4) => wrong.push(format!(
                    "{} --{} {}: {} != {}",
                    about.name, moved.input, moved.to, answer.figure.value, moved.answer
                )),
                Ok(_) => {}
            }
        }
        let [a, b] = example.moves;
        assert!(a.input != b.input || a.answer != b.answer, "{}: one move twice", about.name);
        let moves_it = |moved: &Move| !is_near(moved.answer, example.answer, 1e-3);
        assert!(example.moves.iter().any(moves_it), "{}: nothing moves", about.name);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_question_of_the_scope_has_exactly_one_home() {
    let covered: Vec<&str> = questions().iter().flat_map(|q| q.about().covers.iter().copied()).collect();
    for number in 1..=37 {
        let name = format!("E{number}");
        let homes = covered.iter().filter(|covers| **covers == name).count();
        // E1 asks two things: the crossover and the ridge.
        assert_eq!(homes, if number == 1 { 2 } else { 1 }, "{name}");
    }
    let mut words: Vec<&str> = questions()
        .iter()
        .flat_map(|question| {
            let about = question.about();
            std::iter::once(about.name).chain(about.aliases.iter().copied())
        })
        .collect();
    let count = words.len();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), count, "two questions share a name");
}
