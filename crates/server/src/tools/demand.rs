//! The grammar of an answer that must be calls.

use reef_model::tokenizer::{TokenType, Tokenizer};
use serde_json::{Map, Value, json};

use super::family::Family;
use super::fields::{Choice, Function};

/// Calls in one answer at most, so that a demanded answer ends.
const CALLS_MAX: usize = 16;

/// A grammar in Lark's syntax; `None`: nothing is demanded.
pub(super) fn grammar(
    family: Family,
    functions: &[Function],
    choice: Choice,
    is_parallel: bool,
    tokenizer: &Tokenizer,
) -> Option<String> {
    let (functions, most) = match choice {
        Choice::Auto => return None,
        Choice::Required if is_parallel => (functions, CALLS_MAX),
        Choice::Required => (functions, 1),
        Choice::Named(index) => (&functions[index..=index], 1),
    };
    let tag = |text| tag(tokenizer, text);
    Some(match family {
        Family::Hermes => {
            let call = embedded(&one_of(functions, "arguments"), functions);
            let (open, close) = (tag("<tool_call>"), tag("</tool_call>"));
            let more = match most {
                1 => String::new(),
                _ => format!(" (\"\\n\" call){{0,{}}}", most - 1),
            };
            format!("start: call{more}\ncall: {open} \"\\n\" body \"\\n\" {close}\nbody: {call}\n")
        }
        Family::Llama3 => {
            format!(
                "start: body\nbody: {}\n",
                embedded(&one_of(functions, "parameters"), functions)
            )
        }
        Family::Mistral => {
            let list = json!({
                "type": "array",
                "items": one_of(functions, "arguments"),
                "minItems": 1,
                "maxItems": most,
            });
            format!("start: {} body\nbody: {}\n", tag("[TOOL_CALLS]"), embedded(&list, functions))
        }
        Family::MistralNamed => named(functions, most, &tag("[TOOL_CALLS]"), &tag("[ARGS]")),
    })
}

fn named(functions: &[Function], most: usize, open: &str, arguments: &str) -> String {
    let rules: Vec<String> = (0..functions.len()).map(|index| format!("call_{index}")).collect();
    let mut lark = format!("start: call{{1,{most}}}\ncall: {}\n", rules.join(" | "));
    for (function, rule) in functions.iter().zip(&rules) {
        let name = json!(function.name);
        let schema = embedded(&reference(0), std::slice::from_ref(function));
        lark += &format!("{rule}: {open} {name} {arguments} {rule}_body\n{rule}_body: {schema}\n");
    }
    lark
}

/// The object of a call of any of `functions`.
fn one_of(functions: &[Function], arguments: &str) -> Value {
    let calls = functions.iter().enumerate().map(|(index, function)| {
        json!({
            "type": "object",
            "properties": {"name": {"const": function.name}, arguments: reference(index)},
            "required": ["name", arguments],
            "additionalProperties": false,
        })
    });
    json!({"anyOf": calls.collect::<Vec<_>>()})
}

fn reference(index: usize) -> Value {
    json!({"$ref": format!("#/$defs/tool{index}")})
}

/// `schema` as a part of a Lark grammar, with the schemas of `functions` that it refers to.
fn embedded(schema: &Value, functions: &[Function]) -> String {
    let mut schema = schema.clone();
    let definitions: Map<String, Value> = functions
        .iter()
        .enumerate()
        .map(|(index, function)| {
            let root = format!("#/$defs/tool{index}");
            (format!("tool{index}"), moved(&closed(&function.parameters), &root))
        })
        .collect();
    schema["$defs"] = Value::Object(definitions);
    let is_lenient = !functions.iter().all(|function| function.is_strict);
    schema["x-guidance"] = crate::grammar::json_options(is_lenient, None);
    format!("%json {schema}")
}

/// A tool's schema whose objects have the properties that it names and no others, unless it says otherwise:
/// what it does not name the tool does not know, and a small model invents properties without end. (What
/// `allOf` joins describes one object together, and stays open.)
fn closed(schema: &Value) -> Value {
    match schema {
        Value::Object(fields) => {
            let parts = fields.iter().map(|(name, value)| match name.as_str() {
                "allOf" | "const" | "enum" | "default" | "examples" => {
                    (name.clone(), value.clone())
                }
                _ => (name.clone(), closed(value)),
            });
            let mut fields: Map<String, Value> = parts.collect();
            let says =
                ["additionalProperties", "unevaluatedProperties", "patternProperties", "allOf"];
            if fields.get("type").is_some_and(|kind| kind == "object")
                && fields.get("properties").is_some_and(Value::is_object)
                && !says.iter().any(|field| fields.contains_key(*field))
            {
                fields.insert("additionalProperties".into(), Value::Bool(false));
            }
            Value::Object(fields)
        }
        Value::Array(items) => Value::Array(items.iter().map(closed).collect()),
        other => other.clone(),
    }
}

/// A schema whose place in a document is `root`: references within it go there.
fn moved(schema: &Value, root: &str) -> Value {
    match schema {
        Value::Object(fields) => {
            let moved = fields.iter().map(|(name, value)| {
                let value =
                    match (name.as_str(), value.as_str().and_then(|to| to.strip_prefix('#'))) {
                        ("$ref", Some(within)) => Value::String(format!("{root}{within}")),
                        _ => moved(value, root),
                    };
                (name.clone(), value)
            });
            // A name of its own would make references within it go elsewhere.
            let is_kept = |(name, value): &(String, Value)| {
                !(matches!(name.as_str(), "$id" | "$schema") && value.is_string())
            };
            Value::Object(moved.filter(is_kept).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(|item| moved(item, root)).collect()),
        other => other.clone(),
    }
}

/// A tag in Lark: the token that the vocabulary has for it where that is a mark, else its text.
fn tag(tokenizer: &Tokenizer, text: &str) -> String {
    let vocabulary = tokenizer.vocabulary();
    let is_mark = |id: &u32| vocabulary.token_type(*id) == Some(TokenType::Control);
    match vocabulary.find(text).filter(is_mark) {
        Some(id) => format!("<[{id}]>"),
        None => json!(text).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_what_they_name_unless_they_say_otherwise() {
        let schema = json!({
            "type": "object",
            "properties": {
                "type": {"enum": ["object"]},
                "properties": {"type": "object", "properties": {"a": {}}},
                "open": {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
                "joined": {"allOf": [{"type": "object", "properties": {"a": {}}}]},
                "free": {"type": "object"},
            },
        });
        let mut expected = schema.clone();
        expected["additionalProperties"] = json!(false);
        expected["properties"]["properties"]["additionalProperties"] = json!(false);
        assert_eq!(closed(&schema), expected);
    }
}
