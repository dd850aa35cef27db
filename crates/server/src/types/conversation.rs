//! The messages of a request as chat templates want them: content is a text, arguments of calls are JSON and
//! not a text of it, and what is null is not there (templates ask whether a field is).

use serde_json::{Map, Value};

use crate::error::ApiError;

/// `messages` for a template, which knows the role `developer` or does not.
///
/// # Errors
/// What is no message, or content that is not text.
pub fn conversation(
    messages: Vec<Value>,
    knows_developer: bool,
) -> Result<Vec<Map<String, Value>>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty: give at least one"));
    }
    let each = messages.into_iter().enumerate();
    each.map(|(index, message)| one(index, message, knows_developer)).collect()
}

fn one(
    index: usize,
    message: Value,
    knows_developer: bool,
) -> Result<Map<String, Value>, ApiError> {
    let wrong = |what: &str| ApiError::invalid("messages", format!("messages[{index}]: {what}"));
    let Value::Object(fields) = message else {
        return Err(wrong("is no object; give {\"role\": ..., \"content\": ...}"));
    };
    let mut fields: Map<String, Value> =
        fields.into_iter().filter(|(_, value)| !value.is_null()).collect();
    let role = match fields.get("role").and_then(Value::as_str).unwrap_or_default() {
        "developer" if !knows_developer => "system",
        role @ ("developer" | "system" | "user" | "assistant" | "tool") => role,
        _ => {
            return Err(wrong(
                "has no role, or another than system, developer, user, assistant and tool",
            ));
        }
    }
    .to_owned();
    let calls = match fields.remove("tool_calls") {
        Some(Value::Array(calls)) if role == "assistant" => calls,
        None => Vec::new(),
        Some(Value::Array(calls)) if calls.is_empty() => calls,
        Some(_) => {
            return Err(wrong("tool_calls must be a list, and stands in an assistant's message"));
        }
    };
    let content = match fields.remove("content") {
        Some(content) => text(content).map_err(|what| wrong(&format!("content {what}")))?,
        None if role == "assistant" => String::new(),
        None => return Err(wrong("has no content; give a text")),
    };
    if !calls.is_empty() {
        let calls: Option<Vec<Value>> = calls.into_iter().map(call).collect();
        let calls = calls.ok_or_else(|| {
            wrong(
                "tool_calls: give {\"id\": ..., \"function\": {\"name\": ..., \"arguments\": ...}}",
            )
        })?;
        fields.insert("tool_calls".into(), Value::Array(calls));
    }
    fields.insert("role".into(), role.into());
    fields.insert("content".into(), content.into());
    Ok(fields)
}

/// The text of a message's content: as it is, or the lines that its parts are.
fn text(content: Value) -> Result<String, String> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => return Err("must be a text, or a list of parts".into()),
    };
    let texts: Vec<String> = parts.into_iter().map(part).collect::<Result<_, _>>()?;
    Ok(texts.join("\n"))
}

fn part(part: Value) -> Result<String, String> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
    let inside = match kind {
        "text" | "input_text" | "output_text" => part.get("text"),
        "refusal" => part.get("refusal"),
        _ => {
            let kind: String = kind.escape_default().take(40).collect();
            return Err(format!(
                "has a part of type `{kind}`: this model reads text; give parts of type text only"
            ));
        }
    };
    match (inside.and_then(Value::as_str), part.as_str()) {
        (Some(text), _) | (None, Some(text)) => Ok(text.to_owned()),
        _ => Err("has a part without text; give {\"type\": \"text\", \"text\": ...}".into()),
    }
}

/// A call whose arguments are JSON where they are a text of it; `None`: it is none.
fn call(mut call: Value) -> Option<Value> {
    let function = call.get_mut("function")?.as_object_mut()?;
    function.get("name")?.as_str()?;
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        // A model's own mistakes come back in histories: they stay texts.
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => {
            serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()))
        }
        Some(arguments) => arguments.clone(),
    };
    function.insert("arguments".into(), arguments);
    let fields = call.as_object_mut()?;
    fields.entry("type").or_insert_with(|| "function".into());
    Some(call)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(messages: Value) -> Result<Value, ApiError> {
        let Value::Array(messages) = messages else { panic!() };
        let all = conversation(messages, false)?;
        Ok(Value::Array(all.into_iter().map(Value::Object).collect()))
    }

    #[test]
    fn messages_of_all_roles_become_what_templates_want() {
        let given = json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
             "name": null},
            {"role": "assistant", "content": null, "refusal": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
                {"id": "2", "function": {"name": "g", "arguments": "no JSON"}}]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            {"role": "assistant", "content": "four", "tool_calls": []}
        ]);
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": "no JSON"}}]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            {"role": "assistant", "content": "four"}
        ]);
        assert_eq!(of(given).unwrap(), expected);
        let developer = vec![json!({"role": "developer", "content": "x"})];
        assert_eq!(conversation(developer, true).unwrap()[0]["role"], "developer");
    }

    #[test]
    fn what_is_no_message_is_refused_by_its_place() {
        for wrong in [
            json!(["hi"]),
            json!([{"content": "x"}]),
            json!([{"role": "robot", "content": "x"}]),
            json!([{"role": "user"}]),
            json!([{"role": "user", "content": 3}]),
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            json!([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            json!([{"role": "assistant", "tool_calls": [{"function": {}}]}]),
            json!([{"role": "user", "content": "x", "tool_calls": [{}]}]),
        ] {
            let error = of(wrong.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("messages"), "{wrong}");
            assert!(error.message.starts_with("messages[0]: "), "{}", error.message);
        }
        assert!(of(json!([])).is_err());
    }
}
