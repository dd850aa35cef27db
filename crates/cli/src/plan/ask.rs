//! `reef plan ask QUESTION`: one question of a capacity planner, its number, and why.
//!
//! Sub-commands and options are made from what the questions declare; a new question needs nothing here.

use clap::{Arg, ArgAction, ArgMatches, Args as _, Command};
use reef_plan::ask::input::{Fallback, Input};
use reef_plan::ask::{self, AskError, Question, quantity};

use crate::Common;
use crate::output::{self, WrongArguments};

/// A question and what was given for its inputs.
pub struct Args {
    question: String,
    given: Vec<(String, String)>,
    set: Vec<String>,
    common: Common,
}

impl clap::Args for Args {
    fn augment_args(command: Command) -> Command {
        let questions = ask::questions().iter().map(|question| command_of(*question));
        command.subcommands(questions).subcommand_required(true).arg_required_else_help(true)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Args::augment_args(command)
    }
}

impl clap::FromArgMatches for Args {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Args, clap::Error> {
        let missing = || clap::Error::new(clap::error::ErrorKind::MissingSubcommand);
        let (name, matches) = matches.subcommand().ok_or_else(missing)?;
        let question = ask::find(name).map_err(|_| missing())?;
        let value = |input: &Input| {
            let text = matches.get_one::<String>(input.name)?;
            Some((input.name.to_string(), text.clone()))
        };
        Ok(Args {
            question: name.to_string(),
            given: question.inputs().iter().filter_map(value).collect(),
            set: matches.get_many::<String>("set").into_iter().flatten().cloned().collect(),
            common: Common::from_arg_matches(matches)?,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Args::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The sub-command of a question.
fn command_of(question: &dyn Question) -> Command {
    let about = question.about();
    let example: String = question
        .example()
        .given
        .iter()
        .map(|(name, value)| format!(" --{name} '{value}'"))
        .collect();
    let after = format!(
        "{}\n\nSource: {}\n\nExample: reef plan ask {}{example}",
        about.explanation, about.source, about.name
    );
    let set = Arg::new("set")
        .long("set")
        .value_name("FIELD=VALUE")
        .action(ArgAction::Append)
        .help("Supply or overrule a field of the model's config");
    let command = Common::augment_args(Command::new(about.name));
    // After the common options: they bring words of their own.
    command
        .about(format!("{} [{}]", about.asks, about.covers.join(" ")))
        .visible_aliases(about.aliases)
        .args(question.inputs().iter().map(option_of))
        .arg(set)
        .after_help(after)
}

/// The option of an input.
fn option_of(input: &Input) -> Arg {
    let fallback = match input.fallback {
        Fallback::Number(number) => quantity::display(number, input.unit),
        Fallback::Worked(origin, _) => origin.to_string(),
        Fallback::Word(word, _) => word.to_string(),
    };
    let option = Arg::new(input.name)
        .long(input.flag())
        .value_name(value_name(input))
        .allow_negative_numbers(true)
        .help(format!("{} [default: {fallback}]", input.meaning));
    match input.fallback {
        Fallback::Word(_, choices) if !choices.is_empty() => option.value_parser(choices.to_vec()),
        _ => option,
    }
}

fn value_name(input: &Input) -> &'static str {
    match (input.fallback, input.unit) {
        (Fallback::Word(..), _) => "NAME",
        (_, unit) => quantity::unit_name(unit),
    }
}

/// Runs `reef plan ask`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let question = ask::find(&args.question)?;
    let answer = ask::ask(question, &args.given, &args.set).map_err(|error| match error {
        // The file or the formula failed; anything else is a wrong argument.
        AskError::Model(_) | AskError::NoAnswer(_) => anyhow::Error::new(error),
        other => anyhow::Error::new(WrongArguments(other.to_string())),
    })?;
    if args.common.json {
        return output::print_json(&answer.json());
    }
    output::print_line(&answer.text())
}
