//! Grammars, JSON schemas, expressions and choices become masks of tokens.
//!
//! The work is llguidance's (Moskal and others, <https://github.com/guidance-ai/llguidance>: derivatives of
//! regular expressions for the lexer, Earley's algorithm for the grammar). Here are its vocabulary, its
//! limits, and what the fields of a request mean.

mod constraint;
mod fields;
mod gbnf;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use reef_engine::constraint::Constraint;
use reef_model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use toktrie::{InferenceCapabilities, TokEnv};

pub use fields::{Structure, StructureFields};

use constraint::Grammar;
use vocabulary::Vocabulary;

/// Most bytes of a grammar as text; schemas in the wild end at some hundred kilobytes.
const SPEC_BYTES_MAX: usize = 512 * 1024;

/// States of a lexer at 1 to 2 kB each: 40 MB at most for one sequence, where most need some hundred.
const LEXER_STATES_MAX: usize = 20_000;

/// Space that JSON may have between two of its parts. Without a bound, small models write nothing else.
const JSON_SPACE: &str = r"( |\r?\n){1,2}[ \t]{0,48}";

/// Why a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct GrammarError {
    /// The field of the request that asked for it.
    pub field: &'static str,
    /// What is wrong with it, and the mend; one line.
    pub reason: String,
}

/// What a text must be.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// What cannot be enforced is ignored, not refused.
        is_lenient: bool,
        /// An expression for the space between parts, empty for none; `None`: at most two line ends, and
        /// indentation.
        space: Option<String>,
    },
    /// Text that an expression in the syntax of Rust's `regex` matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in Lark's syntax, or in GBNF (`root ::= ...`).
    Grammar(String),
}

impl GrammarSpec {
    /// A schema that is enforced whole.
    pub fn schema(schema: Value) -> GrammarSpec {
        GrammarSpec::JsonSchema { schema, is_lenient: false, space: None }
    }
}

/// The grammars of a model. The vocabulary is prepared when the first is compiled.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    end_ids: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammars {{ ready: {} }}", self.factory.get().is_some())
    }
}

impl Grammars {
    /// For texts that `end_ids` end.
    pub fn new(tokenizer: Arc<Tokenizer>, end_ids: &[u32]) -> Grammars {
        Grammars { tokenizer, end_ids: end_ids.to_vec(), factory: OnceLock::new() }
    }

    /// Compiles what a request asks for. Takes milliseconds, and some hundred the first time: not for the
    /// runtime's thread.
    ///
    /// # Errors
    /// The grammar has mistakes, takes too much work or memory, or nothing can satisfy it.
    pub fn compile(&self, wanted: &Structure) -> Result<Box<dyn Constraint>, GrammarError> {
        let error = |reason| GrammarError { field: wanted.field, reason };
        // llguidance catches what its parser panics with; its readers of schemas and expressions are not
        // all within.
        catch_unwind(AssertUnwindSafe(|| self.compile_spec(&wanted.spec)))
            .unwrap_or_else(|_| Err("it cannot be compiled; make it simpler".to_owned()))
            .map_err(error)
    }

    fn compile_spec(&self, spec: &GrammarSpec) -> Result<Box<dyn Constraint>, String> {
        let grammar = lower(spec)?;
        let factory = self.factory.get_or_init(|| self.prepare()).as_ref()?;
        let parser = factory.create_parser(grammar).map_err(|error| one_line(&error))?;
        let mut matcher = Matcher::new(Ok(parser));
        // What allows nothing at all is refused here, not after the prompt is computed.
        matcher.compute_mask_or_eos().map_err(|error| one_line(&error))?;
        Ok(Box::new(Grammar::new(matcher, self.tokenizer.vocabulary().len())))
    }

    fn prepare(&self) -> Result<ParserFactory, String> {
        let failed = "the vocabulary of this model is beyond what grammars support".to_owned();
        let make = || {
            let vocabulary = Vocabulary::new(self.tokenizer.clone(), &self.end_ids);
            let vocabulary: TokEnv = Arc::new(vocabulary);
            ParserFactory::new(
                &vocabulary,
                InferenceCapabilities::default(),
                &llguidance::earley::SlicedBiasComputer::json_slices(),
            )
        };
        let made = catch_unwind(AssertUnwindSafe(make)).ok().and_then(Result::ok);
        let mut factory = made.ok_or(failed)?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: LEXER_STATES_MAX,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(factory)
    }
}

/// `spec` as llguidance reads it.
fn lower(spec: &GrammarSpec) -> Result<TopLevelGrammar, String> {
    match spec {
        GrammarSpec::JsonObject => schema(&json!({"type": "object"}), false, None),
        GrammarSpec::JsonSchema { schema: wanted, is_lenient, space } => {
            schema(wanted, *is_lenient, space.as_deref())
        }
        GrammarSpec::Regex(expression) => {
            bound(expression.len())?;
            let whole = without_anchors(expression);
            if whole.is_empty() {
                return Err("the expression is empty; give one".to_owned());
            }
            Ok(TopLevelGrammar::from_regex(whole))
        }
        GrammarSpec::Choice(choices) => {
            bound(choices.iter().map(|choice| choice.len() + 8).sum())?;
            if choices.is_empty() || choices.iter().any(String::is_empty) {
                return Err("give at least one choice, and none that is empty".to_owned());
            }
            let quoted = choices.iter().map(|choice| json!(choice).to_string());
            let choices = quoted.collect::<Vec<_>>().join(" | ");
            Ok(TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {choices}\n")))
        }
        GrammarSpec::Grammar(grammar) => {
            bound(grammar.len())?;
            if gbnf::is_gbnf(grammar) {
                return Ok(TopLevelGrammar::from_lark(gbnf::to_lark(grammar)?));
            }
            Ok(TopLevelGrammar::from_lark(grammar.clone()))
        }
    }
}

fn schema(
    wanted: &Value,
    is_lenient: bool,
    space: Option<&str>,
) -> Result<TopLevelGrammar, String> {
    bound(wanted.to_string().len())?;
    let mut wanted = match wanted {
        Value::Object(fields) => fields.clone(),
        // The two schemas that are no object: everything, and nothing.
        Value::Bool(true) => Map::new(),
        _ => return Err("a schema is a JSON object such as {\"type\": \"object\"}".to_owned()),
    };
    // `oneOf` is taken for `anyOf`, as other engines do: the branches of real schemas exclude each other.
    let mut options = json!({"coerce_one_of": true, "lenient": is_lenient});
    match space {
        Some("") => options["whitespace_flexible"] = false.into(),
        space => options["whitespace_pattern"] = space.unwrap_or(JSON_SPACE).into(),
    }
    wanted.insert("x-guidance".to_owned(), options);
    Ok(TopLevelGrammar::from_json_schema(Value::Object(wanted)))
}

fn bound(bytes: usize) -> Result<(), String> {
    if bytes <= SPEC_BYTES_MAX {
        return Ok(());
    }
    Err(format!("it has {bytes} bytes; give at most {SPEC_BYTES_MAX}"))
}

/// The whole text must match anyway, and llguidance knows no anchors.
fn without_anchors(expression: &str) -> &str {
    let expression = expression.strip_prefix('^').unwrap_or(expression);
    let Some(before) = expression.strip_suffix('$') else { return expression };
    let backslashes = before.bytes().rev().take_while(|byte| *byte == b'\\').count();
    if backslashes % 2 == 0 { before } else { expression }
}

/// The reason without llguidance's line ends and marks, at most 400 characters.
fn one_line(error: &impl std::fmt::Display) -> String {
    let text = format!("{error:#}").replace("<non-verbose/>", "");
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().filter(|c| !c.is_control()).take(400).collect()
}
