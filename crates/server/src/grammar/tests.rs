use std::time::Instant;

use reef_engine::constraint::TokenMask;

use super::testing::{Random, grammars, mask_of, members, tokenizer, tokenizer_of, walk};
use super::*;

fn wanted(spec: GrammarSpec) -> Structure {
    Structure { field: "guided", spec }
}

/// Whether `value` is what `schema` says, for the keywords of [`SCHEMAS`].
fn satisfies(schema: &Value, value: &Value) -> bool {
    if let Some(options) = schema.get("anyOf").or(schema.get("oneOf")).and_then(Value::as_array) {
        return options.iter().any(|option| satisfies(option, value));
    }
    if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
        return choices.contains(value);
    }
    let number = |name: &str| schema.get(name).and_then(Value::as_f64);
    match schema.get("type").and_then(Value::as_str) {
        Some("object") => {
            let Some(fields) = value.as_object() else { return false };
            let required = schema.get("required").and_then(Value::as_array);
            let has_all = required
                .is_none_or(|names| names.iter().all(|n| fields.contains_key(n.as_str().unwrap())));
            let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
            has_all
                && fields.iter().all(|(name, value)| {
                    match schema.get("properties").and_then(|known| known.get(name)) {
                        Some(schema) => satisfies(schema, value),
                        None => !is_closed,
                    }
                })
        }
        Some("array") => value.as_array().is_some_and(|items| {
            let count = items.len() as f64;
            let item = schema.get("items").cloned().unwrap_or(Value::Bool(true));
            count >= number("minItems").unwrap_or(0.0)
                && count <= number("maxItems").unwrap_or(f64::MAX)
                && items.iter().all(|value| satisfies(&item, value))
        }),
        Some("string") => value.as_str().is_some_and(|text| {
            let count = text.chars().count() as f64;
            count >= number("minLength").unwrap_or(0.0)
                && count <= number("maxLength").unwrap_or(f64::MAX)
        }),
        Some("integer") => value.as_f64().is_some_and(|n| {
            n.fract() == 0.0
                && n >= number("minimum").unwrap_or(f64::MIN)
                && n <= number("maximum").unwrap_or(f64::MAX)
        }),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        _ => true,
    }
}

fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object"}),
        json!({"type": "object", "additionalProperties": false, "required": ["name", "age"],
               "properties": {"name": {"type": "string", "maxLength": 12},
                              "age": {"type": "integer", "minimum": 0, "maximum": 150}}}),
        json!({"type": "array", "minItems": 1, "maxItems": 4,
               "items": {"anyOf": [{"type": "number"}, {"type": "null"}, {"type": "boolean"}]}}),
        json!({"type": "object", "additionalProperties": false, "required": ["kind"],
               "properties": {"kind": {"enum": ["é", "日本", "a\"b", 7]},
                              "tags": {"type": "array", "maxItems": 3,
                                       "items": {"type": "string", "minLength": 1, "maxLength": 5}}}}),
        json!({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}),
    ]
}

#[test]
fn walks_over_the_masks_of_a_schema_are_json_that_satisfies_it() {
    let Some(tokenizer) = tokenizer() else { return };
    let grammars = grammars(&tokenizer);
    let mut random = Random(7);
    for schema in schemas() {
        let wanted = wanted(GrammarSpec::schema(schema.clone()));
        let constraint = grammars.compile(&wanted).unwrap();
        let mut finished = 0;
        for _ in 0..60 {
            let Some(text) = walk(&tokenizer, constraint.clone_box(), &mut random, 250) else {
                continue;
            };
            finished += 1;
            let value: Value = serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{error}: {text:?} of {schema}"));
            assert!(satisfies(&schema, &value), "{text:?} of {schema}");
        }
        assert!(finished >= 20, "only {finished} walks of {schema} ended");
    }
}

#[test]
fn sentencepiece_vocabularies_are_walked_as_well() {
    let Some(tokenizer) = tokenizer_of("gemma3") else { return };
    let grammars = grammars(&tokenizer);
    let mut random = Random(2);
    let schema = schemas().swap_remove(3);
    let constraint = grammars.compile(&wanted(GrammarSpec::schema(schema.clone()))).unwrap();
    let mut finished = 0;
    for _ in 0..12 {
        let walked = walk(&tokenizer, constraint.clone_box(), &mut random, 120);
        let Some(text) = walked else { continue };
        finished += 1;
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text:?}"));
        assert!(satisfies(&schema, &value), "{text:?}");
    }
    assert!(finished >= 6, "{finished} walks ended");
    let choices = ["two words", " a space", "\u{1f980}\n\n"].map(String::from).to_vec();
    let constraint = grammars.compile(&wanted(GrammarSpec::Choice(choices.clone()))).unwrap();
    for _ in 0..12 {
        let text = walk(&tokenizer, constraint.clone_box(), &mut random, 40).expect("it ends");
        assert!(choices.contains(&text), "{text:?}");
    }
}

#[test]
fn walks_over_an_expression_and_a_choice_match_them() {
    let Some(tokenizer) = tokenizer() else { return };
    let grammars = grammars(&tokenizer);
    let mut random = Random(3);
    let expression = r"^(\d{1,3}\.){3}\d{1,3}( é+)?$";
    let matcher = regex_lite(expression);
    let constraint = grammars.compile(&wanted(GrammarSpec::Regex(expression.into()))).unwrap();
    for _ in 0..40 {
        let text = walk(&tokenizer, constraint.clone_box(), &mut random, 400).expect("it ends");
        assert!(matcher(&text), "{text:?}");
    }
    let choices: Vec<String> =
        ["yes", "yes, but", "no", "日本語 \"x\"\n"].map(String::from).to_vec();
    let constraint = grammars.compile(&wanted(GrammarSpec::Choice(choices.clone()))).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..60 {
        let text = walk(&tokenizer, constraint.clone_box(), &mut random, 40).expect("it ends");
        assert!(choices.contains(&text), "{text:?}");
        seen.insert(text);
    }
    assert_eq!(seen.len(), choices.len());
}

/// The expression of the test above, by hand: the crate `regex` is no dependency of the server.
fn regex_lite(_of: &str) -> impl Fn(&str) -> bool {
    |text: &str| {
        let (address, tail) = text.split_once(' ').map_or((text, None), |(a, t)| (a, Some(t)));
        let parts: Vec<&str> = address.split('.').collect();
        parts.len() == 4
            && parts.iter().all(|part| {
                (1..=3).contains(&part.chars().count()) && part.chars().all(char::is_numeric)
            })
            && tail.is_none_or(|tail| !tail.is_empty() && tail.chars().all(|c| c == 'é'))
    }
}

#[test]
fn grammars_in_gbnf_and_in_lark_are_kept_to() {
    let Some(tokenizer) = tokenizer() else { return };
    let grammars = grammars(&tokenizer);
    let mut random = Random(9);
    let gbnf = r#"# sums
root   ::= term (sign-x term){0,3} end?
term   ::= [0-9]+ | "(" ws? root ")" |
           "\"" [^"\\\x00-\x1F\x7F]{1,4} "\""
sign-x ::= " " [-+*/] " " # an operator
ws     ::= " " | ""
end    ::= "\n" | "\u00e9" "!""#;
    let lark = "start: item (\",\" item){0,3}\nitem: NAME \"=\" /[0-9]+/\nNAME: /[a-z]{1,8}/";
    let is_balanced = |text: &str| {
        let outside: String = text.split('"').step_by(2).collect();
        outside.matches('(').count() == outside.matches(')').count()
            && outside.chars().all(|c| c.is_ascii_digit() || "()+-*/ \n\u{e9}!".contains(c))
    };
    let is_list = |text: &str| {
        text.split(',').all(|item| {
            item.split_once('=').is_some_and(|(name, value)| {
                (1..=8).contains(&name.len())
                    && name.bytes().all(|b| b.is_ascii_lowercase())
                    && !value.is_empty()
                    && value.bytes().all(|b| b.is_ascii_digit())
            })
        })
    };
    type Check<'a> = &'a dyn Fn(&str) -> bool;
    let checks: [(&str, Check<'_>); 2] = [(gbnf, &is_balanced), (lark, &is_list)];
    for (grammar, check) in checks {
        let spec = GrammarSpec::Grammar(grammar.into());
        let constraint = grammars.compile(&wanted(spec)).unwrap_or_else(|error| panic!("{error}"));
        let mut finished = 0;
        for _ in 0..30 {
            let walked = walk(&tokenizer, constraint.clone_box(), &mut random, 200);
            let Some(text) = walked else { continue };
            finished += 1;
            assert!(check(&text), "{text:?}");
        }
        assert!(finished >= 10, "{finished} walks ended of {grammar}");
    }
}

#[test]
fn fields_of_every_dialect_ask_for_the_same() {
    let of = |value: Value| serde_json::from_value::<StructureFields>(value).unwrap().structure();
    let schema = json!({"type": "object"});
    let strict = GrammarSpec::schema(schema.clone());
    let text = schema.to_string();
    for (fields, spec) in [
        (json!({"guided_json": schema}), &strict),
        (json!({"guided_json": text}), &strict),
        (json!({"json_schema": schema, "guided_regex": null}), &strict),
        (json!({"structured_outputs": {"json": text, "regex": null}}), &strict),
        (json!({"response_format": {"type": "json_object", "schema": schema}}), &strict),
        (
            json!({"response_format": {"type": "json_schema",
                                       "json_schema": {"name": "x", "strict": true, "schema": schema}}}),
            &strict,
        ),
        (json!({"response_format": {"type": "json_object"}}), &GrammarSpec::JsonObject),
        (json!({"structured_outputs": {"json_object": true}}), &GrammarSpec::JsonObject),
        (json!({"guided_regex": "a"}), &GrammarSpec::Regex("a".into())),
        (json!({"structured_outputs": {"choice": ["a"]}}), &GrammarSpec::Choice(vec!["a".into()])),
        (json!({"grammar": "root ::= \"a\""}), &GrammarSpec::Grammar("root ::= \"a\"".into())),
    ] {
        assert_eq!(of(fields.clone()).unwrap().map(|it| it.spec).as_ref(), Some(spec), "{fields}");
    }
    for nothing in [json!({}), json!({"response_format": {"type": "text"}}), json!({"grammar": ""})]
    {
        assert_eq!(of(nothing).unwrap(), None);
    }
    for (wrong, field) in [
        (json!({"response_format": {"type": "xml"}}), "response_format"),
        (json!({"response_format": "json"}), "response_format"),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"structured_outputs": {}}), "structured_outputs"),
        (json!({"structured_outputs": {"json": {}, "regex": "a"}}), "structured_outputs"),
        (json!({"structured_outputs": {"choice": [1]}}), "structured_outputs"),
        (json!({"guided_regex": "a", "guided_choice": ["b"]}), "guided_choice"),
    ] {
        assert_eq!(of(wrong.clone()).unwrap_err().field, field, "{wrong}");
    }
}

#[test]
fn an_end_is_allowed_where_the_text_may_end_and_all_ends_are() {
    let Some(tokenizer) = tokenizer() else { return };
    let grammars = grammars(&tokenizer);
    let tokens = tokenizer.vocabulary().len();
    let ends = tokenizer.vocabulary().end_of_generation();
    let mut constraint = grammars.compile(&wanted(GrammarSpec::Regex("a+".into()))).unwrap();
    let a = tokenizer.vocabulary().find("a").unwrap();
    let mask = mask_of(&mut *constraint, tokens);
    assert!(mask.contains(a) && !ends.iter().any(|end| mask.contains(*end)));
    constraint.accept(a);
    let mask = mask_of(&mut *constraint, tokens);
    assert_eq!(mask, mask_of(&mut *constraint, tokens), "the same however often it is asked");
    assert!(ends.len() > 1 && mask.contains(a) && ends.iter().all(|end| mask.contains(*end)));
    assert!(!constraint.is_complete());
    constraint.accept(ends[0]);
    assert!(constraint.is_complete());
    let mut fixed = grammars.compile(&wanted(GrammarSpec::Choice(vec!["a".into()]))).unwrap();
    fixed.accept(a);
    assert!(fixed.is_complete(), "nothing can follow");
}

#[test]
fn a_copy_goes_its_own_way() {
    let Some(tokenizer) = tokenizer() else { return };
    let grammars = grammars(&tokenizer);
    let tokens = tokenizer.vocabulary().len();
    let find = |text| tokenizer.vocabulary().find(text).unwrap();
    let choices = ["abc", "axy"].map(String::from).to_vec();
    let mut first = grammars.compile(&wanted(GrammarSpec::Choice(choices))).unwrap();
    first.accept(find("a"));
    let before = mask_of(&mut *first, tokens);
    let mut second = first.clone_box();
    first.accept(find("b"));
    assert_eq!(mask_of(&mut *second, tokens), before);
    second.accept(find("x"));
    assert!(mask_of(&mut *first, tokens).contains(find("c")));
    assert!(mask_of(&mut *second, tokens).contains(find("y")));
    assert!(!mask_of(&mut *second, tokens).contains(find("c")));
}

#[test]
fn a_character_may_come_in_pieces() {
    let Some(tokenizer) = tokenizer() else { return };
    let grammars = grammars(&tokenizer);
    let tokens = tokenizer.vocabulary().len();
    let crab = "\u{1f980}";
    let mut constraint = grammars
        .compile(&wanted(GrammarSpec::Choice(vec![format!("{crab}!"), "é".into()])))
        .unwrap();
    let bytes_of = |id: u32| tokenizer.token_bytes(id).unwrap();
    let mut written = Vec::new();
    while written.len() < crab.len() {
        let mask = mask_of(&mut *constraint, tokens);
        let shortest = members(&mask)
            .into_iter()
            .filter(|id| crab.as_bytes()[written.len()..].starts_with(&bytes_of(*id)))
            .min_by_key(|id| bytes_of(*id).len())
            .expect("a piece of the character");
        written.extend(bytes_of(shortest));
        constraint.accept(shortest);
    }
    assert_eq!(written, crab.as_bytes());
    let mask = mask_of(&mut *constraint, tokens);
    assert_eq!(members(&mask), [tokenizer.vocabulary().find("!").unwrap()]);
}

#[test]
fn mistakes_are_named_and_hostile_grammars_end() {
    let Some(tokenizer) = tokenizer() else { return };
    let grammars = grammars(&tokenizer);
    // The vocabulary is prepared once, before the clock starts.
    grammars.compile(&wanted(GrammarSpec::JsonObject)).unwrap();
    let deep = |n: usize| format!("{}a{}", "(".repeat(n), ")".repeat(n));
    let suffixes: Vec<String> = (0..12).map(|n| format!("/.*x{n}/")).collect();
    let chain: String = (0..5000).map(|n| format!("T{n}: \"(\" T{} \")\"\n", n + 1)).collect();
    let refs: Map<String, Value> = (0..5000)
        .map(|n| (format!("d{n}"), json!({"allOf": [{"$ref": format!("#/$defs/d{}", n + 1)}]})))
        .collect();
    let hostile: Vec<(&str, GrammarSpec)> = vec![
        ("open class", GrammarSpec::Regex("[a".into())),
        ("empty", GrammarSpec::Regex("^$".into())),
        ("look-ahead", GrammarSpec::Regex("(?=a)b".into())),
        ("deep", GrammarSpec::Regex(deep(20_000))),
        ("powers", GrammarSpec::Regex("((((a{500}){500}){500}){500}){500}".into())),
        ("no rule", GrammarSpec::Grammar("start: missing".into())),
        ("no rule in GBNF", GrammarSpec::Grammar("root ::= missing".into())),
        (
            "deep rule",
            GrammarSpec::Grammar(format!("start: {}", deep(20_000).replace('a', "\"a\""))),
        ),
        ("left", GrammarSpec::Grammar("start: start".into())),
        ("suffixes", GrammarSpec::Grammar(format!("start: A\nA: {}", suffixes.join(" & ")))),
        ("literal", GrammarSpec::Regex("ab".repeat(GRAMMAR_BYTES_MAX / 2))),
        ("chain", GrammarSpec::Grammar(format!("start: T0\n{chain}T5000: \"a\""))),
        ("no root", GrammarSpec::Grammar("other ::= \"a\"".into())),
        ("false", GrammarSpec::schema(json!(false))),
        ("text", GrammarSpec::schema(json!("x"))),
        ("type", GrammarSpec::schema(json!({"type": "objekt"}))),
        ("remote", GrammarSpec::schema(json!({"$ref": "https://example.com/schema"}))),
        ("itself", GrammarSpec::schema(json!({"$ref": "#"}))),
        ("all of itself", GrammarSpec::schema(json!({"allOf": [{"$ref": "#"}]}))),
        ("refs", GrammarSpec::schema(json!({"$ref": "#/$defs/d0", "$defs": refs}))),
        ("impossible", GrammarSpec::schema(json!({"type": "integer", "minimum": 2, "maximum": 1}))),
        ("no choice", GrammarSpec::Choice(vec![])),
        ("long", GrammarSpec::Regex("a".repeat(SPEC_BYTES_MAX + 1))),
    ];
    for (name, spec) in hostile {
        let start = Instant::now();
        match grammars.compile(&wanted(spec)) {
            Ok(mut constraint) => {
                for _ in 0..5 {
                    let allowed = members(&mask_of(&mut *constraint, tokenizer.vocabulary().len()));
                    let Some(first) = allowed.first() else { break };
                    constraint.accept(*first);
                }
                eprintln!("{name}: taken in {:?}", start.elapsed());
            }
            Err(error) => {
                assert_eq!(error.field, "guided");
                assert!(!error.reason.is_empty() && !error.reason.contains('\n'), "{error}");
                eprintln!("{name}: {error} ({:?})", start.elapsed());
            }
        }
        // Seconds on a machine of its own; this is against what never ends.
        assert!(start.elapsed().as_secs() < 120, "{name} takes {:?}", start.elapsed());
    }
}

/// `cargo test -p reef-server --lib how_long -- --ignored --nocapture`
#[test]
#[ignore = "prints timings"]
fn how_long_masks_take() {
    let Some(tokenizer) = tokenizer() else { return };
    let grammars = grammars(&tokenizer);
    let start = Instant::now();
    grammars.compile(&wanted(GrammarSpec::JsonObject)).unwrap();
    eprintln!("the vocabulary and a first grammar: {:?}", start.elapsed());
    let mut random = Random(5);
    let mut took = Vec::new();
    for schema in schemas() {
        let start = Instant::now();
        let constraint = grammars.compile(&wanted(GrammarSpec::schema(schema.clone()))).unwrap();
        let compiled = start.elapsed();
        let start = Instant::now();
        drop(constraint.clone_box());
        eprintln!("compiled in {compiled:?}, copied in {:?}: {schema}", start.elapsed());
        for _ in 0..20 {
            let mut one = constraint.clone_box();
            let mut mask = TokenMask::default();
            for _ in 0..100 {
                if one.is_complete() {
                    break;
                }
                mask.reset(tokenizer.vocabulary().len());
                let start = Instant::now();
                one.allow(&mut mask);
                let masked = start.elapsed();
                let allowed = members(&mask);
                let Some(token) = allowed.get(random.below(allowed.len().max(1))) else { break };
                let start = Instant::now();
                one.accept(*token);
                took.push((masked + start.elapsed()).as_nanos() as f64 / 1000.0);
            }
        }
    }
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    let [p50, p99, most] = [0.5, 0.99, 1.0].map(at);
    eprintln!(
        "mask and accept, {} tokens: p50 {p50:.0} us, p99 {p99:.0} us, max {most:.0} us",
        took.len()
    );
}
