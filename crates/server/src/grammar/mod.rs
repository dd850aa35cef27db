//! Grammars, JSON schemas, expressions and choices become masks of tokens.
//!
//! The work is llguidance's (Moskal and others, <https://github.com/guidance-ai/llguidance>: derivatives of
//! regular expressions for the lexer, Earley's algorithm for the grammar). Here are its vocabulary, its
//! limits, and what the fields of a request mean.

mod constraint;
mod fields;
mod gbnf;
#[cfg(test)]
pub(crate) mod testing;
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
use tokio::sync::Semaphore;
use toktrie::{InferenceCapabilities, TokEnv};

pub use fields::{Structure, StructureFields};

use constraint::Grammar;
use vocabulary::Vocabulary;

/// Most bytes of a schema or of choices; schemas in the wild end at some hundred kilobytes.
const SPEC_BYTES_MAX: usize = 512 * 1024;

/// Most bytes of an expression or a grammar.
const GRAMMAR_BYTES_MAX: usize = 128 * 1024;

/// llguidance's units of work: about 0.2 s for all of a grammar, 7 ms for the mask of one token.
const COMPILE_FUEL: u64 = 400_000;
const STEP_FUEL: u64 = 100_000;

/// Stack of the thread that compiles; only what is used becomes memory. One level takes up to 10 kB, and
/// the longest texts have 10,000.
const STACK_BYTES: usize = 256 << 20;

/// Bytes of a lexer's tables after its first mask, and its states at 1 to 2 kB each at any time: forks copy
/// them on the engine's thread. Most need some hundred kilobytes.
const LEXER_BYTES_MAX: usize = 16 << 20;
const LEXER_STATES_MAX: usize = 20_000;

/// Compiled at a time.
const COMPILING_MAX: usize = 2;

const FAILED: &str = "it cannot be compiled; make it simpler";

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
    /// A grammar in Lark's syntax, of our own making.
    Lark(String),
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
    compiling: Semaphore,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammars {{ ready: {} }}", self.factory.get().is_some())
    }
}

impl Grammars {
    /// For texts that `end_ids` end.
    pub fn new(tokenizer: Arc<Tokenizer>, end_ids: &[u32]) -> Grammars {
        let (factory, compiling) = (OnceLock::new(), Semaphore::new(COMPILING_MAX));
        Grammars { tokenizer, end_ids: end_ids.to_vec(), factory, compiling }
    }

    /// Compiles what a request asks for, off the runtime's thread; a few at a time, since a hostile one takes
    /// seconds.
    ///
    /// # Errors
    /// See [`Grammars::compile`].
    pub async fn constraint(
        self: &Arc<Self>,
        wanted: Structure,
    ) -> Result<Box<dyn Constraint>, GrammarError> {
        let failed = || GrammarError { field: wanted.field, reason: FAILED.to_owned() };
        let _permit = self.compiling.acquire().await.map_err(|_| failed())?;
        let (this, given) = (self.clone(), wanted.clone());
        let elsewhere = tokio::task::spawn_blocking(move || this.compile(&given));
        elsewhere.await.unwrap_or_else(|_| Err(failed()))
    }

    /// Compiles what a request asks for. Takes milliseconds, and some hundred the first time: not for the
    /// runtime's thread.
    ///
    /// # Errors
    /// The grammar has mistakes, takes too much work or memory, or nothing can satisfy it.
    pub fn compile(&self, wanted: &Structure) -> Result<Box<dyn Constraint>, GrammarError> {
        // llguidance catches what its parser panics with; its readers of schemas and expressions are not
        // all within. They also call themselves once per level, of which a long text may have thousands.
        let compile = || catch_unwind(AssertUnwindSafe(|| self.compile_spec(&wanted.spec)));
        let compiled = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            thread.spawn_scoped(scope, compile).ok().and_then(|thread| thread.join().ok())
        });
        let reason = match compiled {
            Some(Ok(Ok(constraint))) => return Ok(constraint),
            Some(Ok(Err(reason))) => reason,
            Some(Err(_)) | None => FAILED.to_owned(),
        };
        Err(GrammarError { field: wanted.field, reason })
    }

    fn compile_spec(&self, spec: &GrammarSpec) -> Result<Box<dyn Constraint>, String> {
        let grammar = lower(spec)?;
        let factory = self.factory.get_or_init(|| self.prepare()).as_ref()?;
        let mut parser = factory.create_parser(grammar).map_err(|error| one_line(&error))?;
        parser.start_without_prompt();
        // What allows nothing at all, or explodes, is refused here, not after the prompt is computed.
        parser.compute_mask().map_err(|error| one_line(&error))?;
        let bytes = parser.parser.lexer_stats().num_bytes;
        if bytes > LEXER_BYTES_MAX {
            return Err(format!("it needs {bytes} bytes of tables; make it simpler"));
        }
        let matcher = Matcher::new(Ok(parser));
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
            initial_lexer_fuel: COMPILE_FUEL,
            step_lexer_fuel: STEP_FUEL,
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
            bound(expression.len(), GRAMMAR_BYTES_MAX)?;
            let whole = without_anchors(expression);
            if whole.is_empty() {
                return Err("the expression is empty; give one".to_owned());
            }
            Ok(TopLevelGrammar::from_regex(whole))
        }
        GrammarSpec::Choice(choices) => {
            bound(choices.iter().map(|choice| choice.len() + 8).sum(), SPEC_BYTES_MAX)?;
            if choices.is_empty() || choices.iter().any(String::is_empty) {
                return Err("give at least one choice, and none that is empty".to_owned());
            }
            let quoted = choices.iter().map(|choice| json!(choice).to_string());
            let choices = quoted.collect::<Vec<_>>().join(" | ");
            Ok(TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {choices}\n")))
        }
        GrammarSpec::Grammar(grammar) => {
            bound(grammar.len(), GRAMMAR_BYTES_MAX)?;
            if gbnf::is_gbnf(grammar) {
                return Ok(TopLevelGrammar::from_lark(gbnf::to_lark(grammar)?));
            }
            Ok(TopLevelGrammar::from_lark(grammar.clone()))
        }
        GrammarSpec::Lark(grammar) => {
            bound(grammar.len(), SPEC_BYTES_MAX)?;
            Ok(TopLevelGrammar::from_lark(grammar.clone()))
        }
    }
}

fn schema(
    wanted: &Value,
    is_lenient: bool,
    space: Option<&str>,
) -> Result<TopLevelGrammar, String> {
    bound(wanted.to_string().len(), SPEC_BYTES_MAX)?;
    let mut wanted = match wanted {
        Value::Object(fields) => fields.clone(),
        // The two schemas that are no object: everything, and nothing.
        Value::Bool(true) => Map::new(),
        _ => return Err("a schema is a JSON object such as {\"type\": \"object\"}".to_owned()),
    };
    let options = json_options(is_lenient, space);
    wanted.insert("x-guidance".to_owned(), options);
    Ok(TopLevelGrammar::from_json_schema(Value::Object(wanted)))
}

/// How llguidance is to read a schema. `oneOf` is taken for `anyOf`, as other engines do: the branches of real
/// schemas exclude each other.
pub(crate) fn json_options(is_lenient: bool, space: Option<&str>) -> Value {
    let mut options = json!({"coerce_one_of": true, "lenient": is_lenient});
    match space {
        Some("") => options["whitespace_flexible"] = false.into(),
        space => options["whitespace_pattern"] = space.unwrap_or(JSON_SPACE).into(),
    }
    options
}

fn bound(bytes: usize, most: usize) -> Result<(), String> {
    if bytes <= most {
        return Ok(());
    }
    Err(format!("it has {bytes} bytes; give at most {most}"))
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
    // Behind the first line llguidance shows the grammar.
    let text = format!("{error:#}").replace("<non-verbose/>", "");
    let text = text.split("\n1 |").next().unwrap_or_default();
    if text.contains("NoExtensionBias") {
        return "nothing can satisfy it".to_owned();
    }
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().filter(|c| !c.is_control()).take(400).collect()
}
