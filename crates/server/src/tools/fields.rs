//! The fields of a request that are about tools.

use std::sync::Arc;

use reef_model::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::Value;

use super::demand;
use super::family::Family;
use super::reader::CallReader;
use crate::error::ApiError;
use crate::grammar::{GrammarSpec, Structure};
use crate::types::sampling::at_most;

/// Tools in a request at most: OpenAI's limit.
const TOOLS_MAX: usize = 128;

/// The fields as they are in a request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ToolFields {
    /// `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`.
    pub tools: Option<Vec<Value>>,
    /// `"none"`, `"auto"`, `"required"`, or `{"type": "function", "function": {"name"}}`.
    pub tool_choice: Option<Value>,
    /// `false`: one call at most.
    pub parallel_tool_calls: Option<bool>,
}

/// Which calls there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// As the model likes.
    Auto,
    /// One at least.
    Required,
    /// Of this tool, exactly one.
    Named(usize),
}

/// A function that may be called.
#[derive(Clone, Debug)]
pub(super) struct Function {
    pub(super) name: String,
    /// The schema of its arguments.
    pub(super) parameters: Value,
    /// The schema is to be enforced whole.
    pub(super) is_strict: bool,
}

/// Tools that a request offers to the model.
#[derive(Clone, Debug)]
pub struct Tools {
    family: Family,
    functions: Vec<Function>,
    choice: Choice,
    is_parallel: bool,
    rendered: Value,
}

impl Tools {
    /// The tools of a request, for a template with this source. `None`: none are offered, or with
    /// `tool_choice` `"none"` none may be called; then the template is not shown any.
    ///
    /// # Errors
    /// A tool or a choice that cannot be read, or a template that shows no tools: the model would never
    /// learn of them.
    pub fn of(fields: &ToolFields, template: &str) -> Result<Option<Tools>, ApiError> {
        let tools = fields.tools.as_deref().unwrap_or_default();
        let choice = fields.tool_choice.as_ref().filter(|choice| !choice.is_null());
        if tools.is_empty() {
            return match choice.and_then(Value::as_str) {
                Some("none" | "auto") => Ok(None),
                None if choice.is_none() => Ok(None),
                _ => Err(invalid("tool_choice", "there are no tools to choose; give tools")),
            };
        }
        at_most(tools.len(), TOOLS_MAX, "tools", "tools")?;
        let functions: Vec<Function> = tools
            .iter()
            .enumerate()
            .map(|(index, tool)| function(index, tool))
            .collect::<Result<_, _>>()?;
        let Some(choice) = read_choice(choice, &functions)? else { return Ok(None) };
        let Some(family) = Family::of_template(template) else {
            return Err(invalid(
                "tools",
                "this model's chat template shows no tools, or calls in a syntax that Reef does not know; \
                 leave tools out, set tool_choice to \"none\", or start with --chat-template FILE",
            ));
        };
        let is_parallel = fields.parallel_tool_calls.unwrap_or(true);
        let rendered = Value::Array(tools.to_vec());
        Ok(Some(Tools { family, functions, choice, is_parallel, rendered }))
    }

    /// What the chat template shows.
    pub fn rendered(&self) -> &Value {
        &self.rendered
    }

    /// Whether the answer must be a call.
    pub fn are_demanded(&self) -> bool {
        self.choice != Choice::Auto
    }

    /// The grammar that makes the answer calls, where calls are demanded.
    pub fn structure(&self, tokenizer: &Arc<Tokenizer>) -> Option<Structure> {
        let lark = demand::grammar(
            self.family,
            &self.functions,
            self.choice,
            self.is_parallel,
            tokenizer,
        )?;
        Some(Structure { field: "tools", spec: GrammarSpec::Lark(lark) })
    }

    /// A reader of an answer. The answer must be decoded with its special tokens shown: the tags of some
    /// families are such.
    pub fn reader(&self) -> CallReader {
        let names = self.functions.iter().map(|function| function.name.clone()).collect();
        let is_single = !self.is_parallel || matches!(self.choice, Choice::Named(_));
        CallReader::new(self.family, names, if is_single { 1 } else { usize::MAX })
    }

    /// A new id of a call; templates of Mistral take nine letters and nothing else.
    pub fn call_id(&self) -> String {
        let fresh = crate::http::new_id("call").replace("call-", "");
        match self.family {
            Family::Mistral | Family::MistralNamed => fresh[7..16].to_owned(),
            Family::Hermes | Family::Llama3 => format!("call_{fresh}"),
        }
    }
}

fn invalid(field: &'static str, reason: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(field, format!("{field}: {reason}"))
}

fn function(index: usize, tool: &Value) -> Result<Function, ApiError> {
    let wrong = |what: &str| {
        invalid(
            "tools",
            format!(
                "element {index} {what}; give {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}"
            ),
        )
    };
    if tool.get("type").and_then(Value::as_str).unwrap_or("function") != "function" {
        return Err(wrong("is no function"));
    }
    let function = tool.get("function").ok_or_else(|| wrong("has no function"))?;
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    let is_name = |c: char| c.is_alphanumeric() || "_-.:/".contains(c);
    if name.is_empty() || name.len() > 128 || !name.chars().all(is_name) {
        return Err(wrong("has no name, or one that is none (1 to 128 letters, digits and _-.:/)"));
    }
    let parameters = function.get("parameters").filter(|schema| !schema.is_null());
    let parameters = match parameters {
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(wrong("has parameters that are no JSON schema")),
        None => serde_json::json!({"type": "object"}),
    };
    let is_strict = function.get("strict").and_then(Value::as_bool).unwrap_or(false);
    Ok(Function { name: name.to_owned(), parameters, is_strict })
}

/// `None`: no tool may be called.
fn read_choice(choice: Option<&Value>, functions: &[Function]) -> Result<Option<Choice>, ApiError> {
    let Some(choice) = choice else { return Ok(Some(Choice::Auto)) };
    let name = match choice.as_str() {
        Some("none") => return Ok(None),
        Some("auto") => return Ok(Some(Choice::Auto)),
        Some("required") => return Ok(Some(Choice::Required)),
        Some(_) => None,
        None => {
            choice.pointer("/function/name").or_else(|| choice.get("name")).and_then(Value::as_str)
        }
    };
    let Some(name) = name else {
        return Err(invalid(
            "tool_choice",
            "give \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ...}}",
        ));
    };
    let index = functions.iter().position(|function| function.name == name);
    let index = index.ok_or_else(|| {
        invalid(
            "tool_choice",
            format!("no tool is named `{}`; give one of tools", name.escape_default()),
        )
    })?;
    Ok(Some(Choice::Named(index)))
}
