//! The fields of a request that ask for a structure: OpenAI's `response_format`, vLLM's
//! `structured_outputs` and the `guided_*` it had before, llama.cpp's `grammar` and `json_schema`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{GrammarError, GrammarSpec};

/// What the text of an answer must be, and which field said so.
#[derive(Clone, Debug, PartialEq)]
pub struct Structure {
    /// The field, as errors name it.
    pub field: &'static str,
    /// What it asks for.
    pub spec: GrammarSpec,
}

/// The fields as they are in a request; at most one may ask for something.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct StructureFields {
    /// OpenAI: `{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema", "strict"}}`.
    pub response_format: Option<Value>,
    /// vLLM: an object with one of `json`, `regex`, `choice`, `grammar`, `json_object`.
    pub structured_outputs: Option<Value>,
    /// A schema, as JSON or as a text of JSON.
    pub guided_json: Option<Value>,
    /// An expression.
    pub guided_regex: Option<String>,
    /// Texts to choose from.
    pub guided_choice: Option<Vec<String>>,
    /// A grammar.
    pub guided_grammar: Option<String>,
    /// What `guided_json` may have between two parts.
    pub guided_whitespace_pattern: Option<String>,
    /// llama.cpp: a grammar in GBNF.
    pub grammar: Option<String>,
    /// llama.cpp: a schema.
    pub json_schema: Option<Value>,
}

impl StructureFields {
    /// What is asked for; `None`: nothing.
    ///
    /// # Errors
    /// A field that cannot be read, and two fields that both ask.
    pub fn structure(&self) -> Result<Option<Structure>, GrammarError> {
        let mut wanted = Vec::new();
        let mut add = |field, spec| wanted.push(Structure { field, spec });
        if let Some(format) = &self.response_format
            && let Some(spec) = response_format(format)?
        {
            add("response_format", spec);
        }
        if let Some(outputs) = &self.structured_outputs {
            add("structured_outputs", structured_outputs(outputs)?);
        }
        if let Some(schema) = &self.guided_json {
            let schema = schema_of("guided_json", schema)?;
            let space = self.guided_whitespace_pattern.clone();
            add("guided_json", GrammarSpec::JsonSchema { schema, is_lenient: false, space });
        }
        if let Some(expression) = &self.guided_regex {
            add("guided_regex", GrammarSpec::Regex(expression.clone()));
        }
        if let Some(choices) = &self.guided_choice {
            add("guided_choice", GrammarSpec::Choice(choices.clone()));
        }
        if let Some(grammar) = self.guided_grammar.as_ref().filter(|grammar| !grammar.is_empty()) {
            add("guided_grammar", GrammarSpec::Grammar(grammar.clone()));
        }
        if let Some(grammar) = self.grammar.as_ref().filter(|grammar| !grammar.is_empty()) {
            add("grammar", GrammarSpec::Grammar(grammar.clone()));
        }
        if let Some(schema) = &self.json_schema {
            add("json_schema", GrammarSpec::schema(schema_of("json_schema", schema)?));
        }
        if let [first, second, ..] = wanted.as_slice() {
            let reason = format!("{} asks for a structure too; give one of them", first.field);
            return Err(GrammarError { field: second.field, reason });
        }
        Ok(wanted.pop())
    }
}

fn response_format(format: &Value) -> Result<Option<GrammarSpec>, GrammarError> {
    let field = "response_format";
    let kind = format.get("type").and_then(Value::as_str).unwrap_or_default();
    let nested = format.get("json_schema").and_then(Value::as_object);
    let flat = format.as_object();
    match kind {
        "text" => Ok(None),
        // llama.cpp and others put a schema here too.
        "json_object" => Ok(Some(match schema(flat) {
            Some(schema) => GrammarSpec::schema(schema_of(field, schema)?),
            None => GrammarSpec::JsonObject,
        })),
        "json_schema" => {
            let fields = nested.or(flat);
            let Some(schema) = schema(fields) else { return Ok(Some(GrammarSpec::JsonObject)) };
            let strict = fields.and_then(|fields| fields.get("strict")).and_then(Value::as_bool);
            Ok(Some(GrammarSpec::JsonSchema {
                schema: schema_of(field, schema)?,
                is_lenient: strict != Some(true),
                space: None,
            }))
        }
        _ => Err(GrammarError {
            field,
            reason: format!(
                "its type is {}; give \"text\", \"json_object\" or \"json_schema\"",
                format.get("type").unwrap_or(&Value::Null)
            ),
        }),
    }
}

fn schema(fields: Option<&Map<String, Value>>) -> Option<&Value> {
    fields.and_then(|fields| fields.get("schema")).filter(|schema| !schema.is_null())
}

fn structured_outputs(outputs: &Value) -> Result<GrammarSpec, GrammarError> {
    let field = "structured_outputs";
    let error = |reason: String| GrammarError { field, reason };
    let known = ["json", "regex", "choice", "grammar", "json_object"];
    let is_given = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
    let given: Vec<(&str, &Value)> = known
        .iter()
        .filter_map(|name| Some((*name, outputs.get(name).filter(|value| is_given(value))?)))
        .collect();
    let [(name, value)] = given.as_slice() else {
        return Err(error(format!(
            "{} of its keys ask for something; give one of {}",
            given.len(),
            known.join(", ")
        )));
    };
    let text = || {
        let text = value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        text.ok_or_else(|| error(format!("{name} must be a text; give one")))
    };
    match *name {
        "json" => {
            let space = outputs.get("whitespace_pattern").and_then(Value::as_str);
            let is_compact =
                outputs.get("disable_any_whitespace").and_then(Value::as_bool) == Some(true);
            let space = if is_compact { Some("") } else { space };
            Ok(GrammarSpec::JsonSchema {
                schema: schema_of(field, value)?,
                is_lenient: false,
                space: space.map(str::to_owned),
            })
        }
        "regex" => Ok(GrammarSpec::Regex(text()?)),
        "grammar" => Ok(GrammarSpec::Grammar(text()?)),
        "json_object" => Ok(GrammarSpec::JsonObject),
        _ => {
            let choices = value.as_array().and_then(|choices| {
                choices.iter().map(|choice| choice.as_str().map(str::to_owned)).collect()
            });
            let choices = choices.ok_or_else(|| error("choice must be a list of texts".into()))?;
            Ok(GrammarSpec::Choice(choices))
        }
    }
}

/// A schema may be given as JSON or as a text of JSON.
fn schema_of(field: &'static str, given: &Value) -> Result<Value, GrammarError> {
    match given {
        Value::String(text) => serde_json::from_str(text).map_err(|error| GrammarError {
            field,
            reason: format!("the text is no JSON: {error}; give a JSON schema"),
        }),
        _ => Ok(given.clone()),
    }
}
