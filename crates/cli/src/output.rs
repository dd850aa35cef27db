//! Where words go: results to stdout, errors to stderr as one line, silence when nobody listens.

use std::fmt;
use std::io::{self, ErrorKind, Write as _};
use std::process::ExitCode;

use serde::Serialize;

/// Arguments that parse one by one but do not make sense together, or not for this model's file:
/// ends with status 2 where other errors end with 1. Say what is wrong and what to write instead.
#[derive(Debug)]
pub struct WrongArguments(pub String);

impl fmt::Display for WrongArguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongArguments {}

/// Writes `text` and a line end to stdout. (`println!` panics when the reader has gone; this is an
/// error that [`report`] keeps quiet about.)
pub fn print_line(text: &str) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout().lock(), "{text}")?)
}

/// Writes `document` as JSON and a line end to stdout: the one document of `--json`.
pub fn print_json(document: &impl Serialize) -> anyhow::Result<()> {
    print_line(&serde_json::to_string(document)?)
}

/// Writes `text` and a line end to stderr; a closed stderr is nobody's concern.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Says on stderr why the work failed, in one line with the chain of causes, and gives the status to
/// exit with: 2 for [`WrongArguments`], 1 for the rest, and a quiet 0 if only the reader of stdout
/// went away.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if error.chain().any(is_broken_pipe) {
        return ExitCode::SUCCESS;
    }
    note(&format!("error: {}", one_line(error)));
    ExitCode::from(if error.is::<WrongArguments>() { 2 } else { 1 })
}

/// The error and its causes, joined with `: `; a cause that its parent already quotes is left out.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line
}

fn is_broken_pipe(cause: &(dyn std::error::Error + 'static)) -> bool {
    let kind = match cause.downcast_ref::<io::Error>() {
        Some(error) => Some(error.kind()),
        None => cause.downcast_ref().and_then(serde_json::Error::io_error_kind),
    };
    kind == Some(ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context as _, anyhow};

    #[test]
    fn a_chain_becomes_one_line_without_repeats() {
        let inner = anyhow!("tensor 3:\n offset 9 is past the end");
        let error = inner.context("cannot open a.gguf").context("cannot open a.gguf");
        assert_eq!(one_line(&error), "cannot open a.gguf: tensor 3: offset 9 is past the end");
    }

    #[test]
    fn a_reader_that_left_is_no_failure() {
        let broken: Result<(), _> = Err(io::Error::from(ErrorKind::BrokenPipe));
        let error = broken.context("cannot print").unwrap_err();
        assert_eq!(report(&error), ExitCode::SUCCESS);
    }

    #[test]
    fn wrong_arguments_end_with_two_under_any_context() {
        let error = anyhow::Error::new(WrongArguments("--a goes not with --b".into()));
        assert_eq!(report(&error.context("cannot start")), ExitCode::from(2));
        assert_eq!(report(&anyhow!("disk is full")), ExitCode::from(1));
    }
}
