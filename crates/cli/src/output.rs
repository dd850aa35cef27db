//! Where words go: results to stdout, errors to stderr as one line, silence when nobody listens.

use std::fmt;
use std::io::{self, ErrorKind, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
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

/// The reader of stdout has gone (`reef … | head`): there is nobody left to work for, and no failure.
#[derive(Debug)]
struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of stdout has gone")
    }
}

impl std::error::Error for ReaderGone {}

/// Writes `text` to stdout at once, with no line end: a part of streamed text. (`print!` panics when
/// the reader has gone; this is an error that [`report`] keeps quiet about.)
pub fn print_text(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        written => written.context("cannot write to stdout"),
    }
}

/// Writes `text` and a line end to stdout.
pub fn print_line(text: &str) -> anyhow::Result<()> {
    print_text(&format!("{text}\n"))
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
    let status = status(error);
    if status != 0 {
        note(&format!("error: {}", one_line(error)));
    }
    ExitCode::from(status)
}

fn status(error: &anyhow::Error) -> u8 {
    match error {
        error if error.is::<ReaderGone>() => 0,
        error if error.is::<WrongArguments>() => 2,
        _ => 1,
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn a_chain_becomes_one_line_without_repeats() {
        let inner = anyhow!("tensor 3:\n offset 9 is past the end");
        let error = inner.context("cannot open a.gguf").context("cannot open a.gguf");
        assert_eq!(one_line(&error), "cannot open a.gguf: tensor 3: offset 9 is past the end");
    }

    #[test]
    fn the_status_survives_any_context() {
        let of =
            |error: anyhow::Error| status(&error.context("cannot print").context("cannot go on"));
        assert_eq!(of(ReaderGone.into()), 0);
        assert_eq!(of(WrongArguments("--a goes not with --b".into()).into()), 2);
        assert_eq!(of(anyhow!("disk is full")), 1);
        // Another pipe than stdout: a real failure.
        assert_eq!(of(io::Error::from(ErrorKind::BrokenPipe).into()), 1);
    }
}
