//! Chat templates against Jinja2's output (`xtask/golden/chat_template.py`), and hostile ones.

use std::path::PathBuf;
use std::time::{Duration, Instant, UNIX_EPOCH};

use reef_model::chat_template::{ChatTemplate, ChatTemplateError, Message, Render};
use serde_json::{Value, json};

fn data(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn prompts_are_those_of_jinja2() {
    let golden: Value = serde_json::from_str(&data("chat_template.json")).unwrap();
    let now = UNIX_EPOCH + Duration::from_secs(golden["now_s"].as_u64().unwrap());
    for case in golden["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let source = data(&format!("chat_templates/{name}.jinja"));
        let token = |index: usize| golden["tokens"][name][index].as_str().unwrap();
        let template = ChatTemplate::with_tokens(&source, token(0), token(1)).unwrap();
        let options = Render {
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            tools: Some(case["tools"].clone()).filter(|tools| !tools.is_null()),
            now,
            ..Render::default()
        };
        let outcome = template.render(case["messages"].as_array().unwrap(), &options);
        match (outcome, case["refused"].as_str()) {
            (Ok(text), None) => assert_eq!(text, case["text"].as_str().unwrap(), "{case}"),
            (Err(ChatTemplateError::Refused { reason }), Some(expected)) => {
                assert_eq!(reason, expected, "{case}");
            }
            (outcome, _) => panic!("{outcome:?}: {case}"),
        }
    }
}

fn rendered(source: &str) -> Result<String, ChatTemplateError> {
    let message = Message { role: "user".into(), content: "hi".into() };
    ChatTemplate::with_tokens(source, "", "")?.render(&[message], &Render::default())
}

#[test]
fn hostile_templates_end() {
    let sources = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{{ [1] | tojson(indent=100000000000) }}{{ missing.attribute }}",
        "{{ '%999999999d' | format(1) }}",
        "{% include 'chat' %}",
    ];
    for source in sources {
        let start = Instant::now();
        let error = rendered(source).unwrap_err();
        assert!(!error.to_string().contains('\n'), "{error}");
        assert!(start.elapsed() < Duration::from_secs(20), "{source}");
    }
}

#[test]
fn deep_values_neither_overflow_the_stack_nor_the_json() {
    let mut deep = json!([]);
    for _ in 0..100 {
        deep = json!([deep]);
    }
    let template = ChatTemplate::with_tokens("{{ tools | tojson }}", "", "").unwrap();
    let options = Render { tools: Some(deep.clone()), ..Render::default() };
    assert_eq!(template.render(&[json!({})], &options).unwrap(), deep.to_string());
}

#[test]
fn what_is_wrong_is_said_in_one_line_with_the_mend() {
    let syntax = rendered("{% for message in %}").unwrap_err();
    assert!(matches!(syntax, ChatTemplateError::Syntax { .. }));
    assert!(syntax.to_string().contains("--chat-template FILE"), "{syntax}");
    let failed = rendered("{{ messages[0]['content'] / 3 }}").unwrap_err();
    assert!(matches!(failed, ChatTemplateError::Failed { .. }), "{failed}");
    let refused = rendered("{{ raise_exception('roles\nmust alternate') }}").unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the chat template refuses this conversation: roles\\nmust alternate"
    );
    assert!(ChatTemplateError::Missing.to_string().contains("--chat-template FILE"));
}

#[test]
fn more_variables_reach_the_template_but_not_the_messages() {
    let source = "{{ enable_thinking }} {{ messages | length }}";
    let template = ChatTemplate::with_tokens(source, "", "").unwrap();
    let variables = json!({"enable_thinking": false, "messages": []}).as_object().unwrap().clone();
    let message = Message { role: "user".into(), content: "hi".into() };
    let options = Render { variables, ..Render::default() };
    assert_eq!(template.render(&[message], &options).unwrap(), "False 1");
}
