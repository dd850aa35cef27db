use std::time::Instant;

use reef_engine::constraint::TokenMask;
use reef_model::gguf::Gguf;
use reef_model::tokenizer::{Decode, TokenType};

use super::*;

/// SmolLM2's tokenizer, out of the cache that `reef pull` fills.
fn tokenizer() -> Option<Arc<Tokenizer>> {
    let folder =
        |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(std::path::PathBuf::from);
    let home = folder("REEF_HOME")
        .or_else(|| folder("XDG_CACHE_HOME").map(|path| path.join("reef")))
        .or_else(|| folder("HOME").map(|path| path.join(".cache/reef")));
    let path = home.unwrap_or_default().join("smollm2.gguf");
    if !path.is_file() {
        eprintln!("skipped: smollm2.gguf is not in the cache (`reef pull smollm2` fetches it)");
        return None;
    }
    let file = Gguf::open(&path).expect("a fetched model opens");
    Some(Arc::new(Tokenizer::from_gguf(&file).expect("a tokenizer")))
}

fn grammars(tokenizer: &Arc<Tokenizer>) -> Grammars {
    Grammars::new(tokenizer.clone(), tokenizer.vocabulary().end_of_generation())
}

fn wanted(spec: GrammarSpec) -> Structure {
    Structure { field: "guided", spec }
}

/// Numbers that are the same on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

fn mask_of(constraint: &mut dyn Constraint, tokens: usize) -> TokenMask {
    let mut mask = TokenMask::default();
    mask.reset(tokens);
    constraint.allow(&mut mask);
    mask
}

fn members(mask: &TokenMask) -> Vec<u32> {
    (0..mask.tokens() as u32).filter(|token| mask.contains(*token)).collect()
}

/// A text out of tokens drawn from the masks; `None` where it did not end in `steps`.
fn walk(
    tokenizer: &Tokenizer,
    mut constraint: Box<dyn Constraint>,
    random: &mut Random,
    steps: usize,
) -> Option<String> {
    let vocabulary = tokenizer.vocabulary();
    let ends = vocabulary.end_of_generation();
    let mut ids = Vec::new();
    for _ in 0..steps {
        if constraint.is_complete() {
            return Some(tokenizer.decode(&ids, Decode::default()));
        }
        let allowed = members(&mask_of(&mut *constraint, vocabulary.len()));
        assert!(!allowed.is_empty(), "nothing may follow {:?}", ids);
        let can_end = allowed.iter().any(|id| ends.contains(id));
        // Tokens that close something come as often as all others, or texts never end.
        let closing: Vec<u32> = allowed
            .iter()
            .copied()
            .filter(|id| {
                let bytes = tokenizer.token_bytes(*id).unwrap_or_default();
                bytes.len() == 1 && b"\"}],0".contains(&bytes[0])
            })
            .collect();
        let pool = if !closing.is_empty() && random.below(2) == 0 { &closing } else { &allowed };
        let id = if can_end && random.below(3) == 0 {
            *allowed.iter().find(|id| ends.contains(id)).unwrap()
        } else {
            pool[random.below(pool.len())]
        };
        constraint.accept(id);
        if ends.contains(&id) {
            return Some(tokenizer.decode(&ids, Decode::default()));
        }
        assert_ne!(vocabulary.token_type(id), Some(TokenType::Control), "{id}");
        ids.push(id);
    }
    None
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
        (
            "deep rule",
            GrammarSpec::Grammar(format!("start: {}", deep(20_000).replace('a', "\"a\""))),
        ),
        ("left", GrammarSpec::Grammar("start: start".into())),
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
        assert!(start.elapsed().as_secs_f64() < 5.0, "{name} takes {:?}", start.elapsed());
    }
}
