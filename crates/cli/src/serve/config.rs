//! `reef serve --config FILE`: the options of the command line as keys of a TOML file.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context as _, bail};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};

use crate::output::WrongArguments;

/// The words of a command line with those of the `--config` file added, for options that neither the words
/// nor the environment give. Other commands than `serve` come back as they are.
///
/// # Errors
/// A file that cannot be read, a key that is no option of `serve`, a value of the wrong kind.
pub fn with_config(cli: &Command, mut words: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    // What is wrong with the words themselves is told when they are parsed for good.
    let Ok(matches) = cli.clone().try_get_matches_from(&words) else { return Ok(words) };
    let Some(("serve", given)) = matches.subcommand() else { return Ok(words) };
    let Some(path) = given.get_one::<std::path::PathBuf>("config") else { return Ok(words) };
    let serve = cli.find_subcommand("serve").context("the command `serve`")?;
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read --config {}", path.display()))?;
    words.extend(words_of(&text, path, serve, given)?);
    Ok(words)
}

fn words_of(
    text: &str,
    path: &Path,
    serve: &Command,
    given: &ArgMatches,
) -> anyhow::Result<Vec<OsString>> {
    let wrong = |what: String| WrongArguments(format!("--config {}: {what}", path.display()));
    let table: toml::Table = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let mut words = Vec::new();
    for (key, value) in table {
        let name = key.replace('_', "-");
        let known = serve.get_arguments().find(|arg| match arg.get_long() {
            Some(long) => long == name && long != "config",
            // The one without a flag.
            None => arg.get_id() == name.as_str(),
        });
        let Some(arg) = known else {
            let options = serve.get_arguments().filter_map(|arg| arg.get_long());
            let options: Vec<&str> = options.filter(|name| *name != "config").collect();
            bail!(wrong(format!(
                "`{key}` is no option of `reef serve`: there are model, {}",
                options.join(", ")
            )));
        };
        let source = given.value_source(arg.get_id().as_str());
        if matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
            continue;
        }
        let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
        let values = values_of(&value).filter(|_| !is_switch || value.is_bool());
        let values = values.ok_or_else(|| wrong(format!("`{key}` cannot be {value}")))?;
        for value in values {
            match (arg.get_long(), is_switch) {
                (Some(long), false) => words.push(format!("--{long}={value}").into()),
                (Some(long), true) if value == "true" => words.push(format!("--{long}").into()),
                (Some(_), true) => {}
                (None, _) => words.push(value.into()),
            }
        }
    }
    Ok(words)
}

/// A value as the words that would give it; `None`: no words would.
fn values_of(value: &toml::Value) -> Option<Vec<String>> {
    match value {
        toml::Value::String(text) => Some(vec![text.clone()]),
        toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_) => {
            Some(vec![value.to_string()])
        }
        toml::Value::Array(values) => {
            let each: Option<Vec<Vec<String>>> = values.iter().map(values_of).collect();
            each.map(|values| values.concat())
        }
        toml::Value::Datetime(_) | toml::Value::Table(_) => None,
    }
}
