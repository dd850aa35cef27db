use serde_json::{Value, json};

use super::*;

fn reader(family: Family) -> CallReader {
    CallReader::new(family, ["f", "g"].map(String::from).to_vec(), usize::MAX)
}

/// Content, and (name, arguments) of each call.
type Whole = (String, Vec<(String, String)>);

fn add(whole: &mut Whole, read: Read) {
    whole.0 += &read.content;
    for call in read.calls {
        match call.name {
            Some(name) => {
                assert_eq!(call.index as usize, whole.1.len());
                whole.1.push((name, call.arguments));
            }
            None => whole.1[call.index as usize].1 += &call.arguments,
        }
    }
}

fn read_in(mut reader: CallReader, pieces: &[&str]) -> Whole {
    let mut whole = Whole::default();
    for piece in pieces {
        let read = reader.push(piece);
        add(&mut whole, read);
    }
    let read = reader.finish();
    add(&mut whole, read);
    whole
}

/// Reads `text` whole, in every two pieces and letter by letter: always the same.
fn read(family: Family, text: &str) -> Whole {
    let expected = read_in(reader(family), &[text]);
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    for &at in &starts {
        assert_eq!(read_in(reader(family), &[&text[..at], &text[at..]]), expected, "{at}: {text}");
    }
    let letters: Vec<&str> =
        text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]).collect();
    assert_eq!(read_in(reader(family), &letters), expected, "letters: {text}");
    expected
}

fn calls(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(name, arguments)| (name.to_string(), arguments.to_string())).collect()
}

#[test]
fn hermes_calls_stand_between_tags_among_content() {
    let text = "Let me see. é\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call>\"}}\n</tool_call>\n\
                <tool_call>{\"arguments\": {\"y\": [1]}, \"name\": \"g\"}</tool_call>\n";
    let (content, found) = read(Family::Hermes, text);
    assert_eq!(content, "Let me see. é");
    assert_eq!(found, calls(&[("f", "{\"x\": \"</tool_call>\"}"), ("g", "{\"y\": [1]}")]));
}

#[test]
fn what_only_looks_like_a_call_is_content_to_the_letter() {
    for text in [
        "a < b <tool",
        "<tool_call> no",
        "x\n\n<tool_call>",
        "<tool_call>{\"a\": 1}</x>",
        "<tool_call>{\"name\": ",
        "a  b \n c",
        "<tool_call>{'name': 1}",
    ] {
        assert_eq!(read(Family::Hermes, text), (text.to_string(), vec![]));
    }
    for text in [
        "{\"answer\": 42}",
        "{\"name\": \"h\", \"parameters\": {}}",
        "{\"name\": \"f\"",
        "Hi {\"name\": \"f\", \"parameters\": {}}",
        "[1]",
        " {}",
    ] {
        assert_eq!(read(Family::Llama3, text), (text.to_string(), vec![]), "{text}");
    }
    assert_eq!(read(Family::Mistral, "[TOOL_CALL] x"), ("[TOOL_CALL] x".into(), vec![]));
}

#[test]
fn llama_mistral_and_their_lists() {
    let two = calls(&[("f", "{\"x\": 1}"), ("g", "{}")]);
    let llama = "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"x\": 1}}; {\"name\": \"g\", \"parameters\": {}}";
    assert_eq!(read(Family::Llama3, llama), (String::new(), two.clone()));
    assert_eq!(
        read(Family::Llama3, &llama["<|python_tag|>".len()..]),
        (String::new(), two.clone())
    );
    let mistral = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": {}}]";
    assert_eq!(read(Family::Mistral, mistral), (String::new(), two.clone()));
    let named = "Well.[TOOL_CALLS]f[CALL_ID]abc[ARGS]{\"x\": 1}[TOOL_CALLS]g[ARGS]{}";
    assert_eq!(read(Family::MistralNamed, named), ("Well.".into(), two));
}

#[test]
fn arguments_stream_as_they_come_and_odd_ones_are_mended() {
    let mut reader = reader(Family::Hermes);
    assert_eq!(reader.push("<tool_call>\n{\"name\": \"f\", \"argu"), Read::default());
    let begun = reader.push("ments\": {\"x\": \"ha");
    assert_eq!(
        begun.calls,
        [CallDelta { index: 0, name: Some("f".into()), arguments: "{\"x\": \"ha".into() }]
    );
    let more = reader.push("lf\"}");
    assert_eq!(more.calls, [CallDelta { index: 0, name: None, arguments: "lf\"}".into() }]);
    assert_eq!((reader.finish(), reader.has_calls()), (Read::default(), true));
    let text = "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 1}\"}</tool_call><tool_call>{\"name\": \"g\"}</tool_call>";
    assert_eq!(read(Family::Hermes, text).1, calls(&[("f", "{\"x\": 1}"), ("g", "{}")]));
}

#[test]
fn no_more_calls_than_asked_for() {
    let one = CallReader::new(Family::Hermes, vec![], 1);
    let call = |name| {
        format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{\"a\": 1}}}}</tool_call>")
    };
    let (content, found) = read_in(one, &[&call("f"), &call("g")]);
    assert_eq!((content, found), (String::new(), calls(&[("f", "{\"a\": 1}")])));
}

fn fields(choice: Value) -> ToolFields {
    ToolFields {
        tools: Some(vec![
            json!({"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "required": ["x", "tree"], "additionalProperties": false,
                "$defs": {"tree": {"type": "object", "required": ["leaf"], "additionalProperties": false,
                                   "properties": {"leaf": {"type": "boolean"}}}},
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99},
                               "tree": {"$ref": "#/$defs/tree"}}}}}),
            json!({"type": "function", "function": {"name": "g"}}),
        ]),
        tool_choice: Some(choice),
        parallel_tool_calls: None,
    }
}

const HERMES: &str = "{% if tools %}<tool_call>{% endif %}";

#[test]
fn fields_are_checked_and_errors_name_them() {
    let of = |fields: &ToolFields, template: &str| Tools::of(fields, template);
    assert!(of(&ToolFields::default(), "").unwrap().is_none());
    assert!(of(&fields(json!("none")), "").unwrap().is_none());
    assert_eq!(
        of(&fields(json!("auto")), "no such thing").unwrap_err().param.as_deref(),
        Some("tools")
    );
    assert!(!of(&fields(Value::Null), HERMES).unwrap().unwrap().are_demanded());
    for wrong in
        [json!("sometimes"), json!({"type": "function", "function": {"name": "h"}}), json!(3)]
    {
        let error = of(&fields(wrong), HERMES).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tool_choice"), "{error}");
    }
    for tool in [
        json!({}),
        json!({"type": "retrieval"}),
        json!({"function": {"name": "a b"}}),
        json!({"function": {"name": "a", "parameters": []}}),
    ] {
        let wrong = ToolFields { tools: Some(vec![tool]), ..ToolFields::default() };
        assert_eq!(of(&wrong, HERMES).unwrap_err().param.as_deref(), Some("tools"));
    }
    let alone = ToolFields { tool_choice: Some(json!("required")), ..ToolFields::default() };
    assert_eq!(of(&alone, HERMES).unwrap_err().param.as_deref(), Some("tool_choice"));
}

#[test]
fn ids_are_new_each_time_and_short_where_templates_want_them_so() {
    let tools = Tools::of(&fields(json!("auto")), HERMES).unwrap().unwrap();
    let (one, other) = (tools.call_id(), tools.call_id());
    assert!(one != other && one.starts_with("call_"), "{one}");
    let mistral = "{% if tools %}[TOOL_CALLS]{% endif %}";
    let id = Tools::of(&fields(json!("auto")), mistral).unwrap().unwrap().call_id();
    assert!(id.len() == 9 && id.chars().all(char::is_alphanumeric), "{id}");
}

#[test]
fn demanded_calls_are_what_the_reader_reads() {
    let Some(tokenizer) = crate::grammar::testing::tokenizer() else { return };
    let grammars = crate::grammar::testing::grammars(&tokenizer);
    let mut random = crate::grammar::testing::Random(11);
    let templates = [
        HERMES,
        "{% if tools %}<|start_header_id|>parameters{% endif %}",
        "{% if tools %}[TOOL_CALLS]{% endif %}",
        "{% if tools %}[TOOL_CALLS][ARGS]{% endif %}",
    ];
    for template in templates {
        let named = json!({"type": "function", "function": {"name": "f"}});
        for (choice, names) in [(json!("required"), vec!["f", "g"]), (named, vec!["f"])] {
            let tools = Tools::of(&fields(choice), template).unwrap().unwrap();
            let wanted = tools.structure(&tokenizer).expect("a demand");
            let constraint =
                grammars.compile(&wanted).unwrap_or_else(|e| panic!("{e}: {wanted:?}"));
            let mut finished = 0;
            for _ in 0..12 {
                let walk = crate::grammar::testing::walk;
                let Some(text) = walk(&tokenizer, constraint.clone_box(), &mut random, 300) else {
                    continue;
                };
                finished += 1;
                let (content, found) = read_in(tools.reader(), &[&text]);
                assert_eq!(content, "", "{text}");
                assert!(
                    !found.is_empty()
                        && found.iter().all(|(name, _)| names.contains(&name.as_str())),
                    "{text}"
                );
                for (name, arguments) in found {
                    let arguments: Value = serde_json::from_str(&arguments).unwrap();
                    let is_leaf = arguments.pointer("/tree/leaf").is_some_and(Value::is_boolean);
                    assert!(arguments.is_object() && (name == "g" || is_leaf), "{text}");
                }
            }
            assert!(finished > 3, "{finished} walks ended for {template}");
        }
    }
}
