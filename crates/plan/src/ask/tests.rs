//! Every question against its own example, its sources and the scope document.

use super::*;

fn given(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn is_near(found: f64, wanted: f64, tolerance: f64) -> bool {
    (found - wanted).abs() <= tolerance * wanted.abs().max(1e-12)
}

#[test]
fn every_example_gives_the_answer_worked_out_by_hand() {
    let mut wrong = Vec::new();
    for question in questions() {
        let (about, example) = (question.about(), question.example());
        match ask(*question, &given(example.given), &[]) {
            Err(error) => wrong.push(format!("{}: {error}", about.name)),
            Ok(answer) if !is_near(answer.figure.value, example.answer, 1e-4) => {
                wrong
                    .push(format!("{}: {} != {}", about.name, answer.figure.value, example.answer));
            }
            Ok(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_example_agrees_with_a_published_figure() {
    let mut wrong = Vec::new();
    for question in questions() {
        let (about, example) = (question.about(), question.example());
        let cited = example.cited;
        let Ok(answer) = ask(*question, &given(example.given), &[]) else { continue };
        let step = answer.steps.iter().find(|step| step.name == cited.step);
        let value = step.map(|step| step.figure.value);
        if !value.is_some_and(|value| is_near(value, cited.value, cited.tolerance + 1e-12)) {
            wrong.push(format!("{} {}: {value:?} != {}", about.name, cited.step, cited.value));
        }
        if cited.from.is_empty() || about.source.is_empty() {
            wrong.push(format!("{}: no source", about.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn moving_two_inputs_changes_every_answer_as_worked_out_by_hand() {
    let mut wrong = Vec::new();
    for question in questions() {
        let (about, example) = (question.about(), question.example());
        for moved in example.moves {
            let mut given = given(example.given);
            given.retain(|(name, _)| name.replace('-', "_") != moved.input);
            given.push((moved.input.to_string(), moved.to.to_string()));
            match ask(*question, &given, &[]) {
                Err(error) => wrong.push(format!("{} {}: {error}", about.name, moved.input)),
                Ok(answer) if !is_near(answer.figure.value, moved.answer, 1e-4) => {
                    wrong.push(format!(
                        "{} --{} {}: {} != {}",
                        about.name, moved.input, moved.to, answer.figure.value, moved.answer
                    ))
                }
                Ok(_) => {}
            }
        }
        let [a, b] = example.moves;
        assert!(a.input != b.input || a.answer != b.answer, "{}: one move twice", about.name);
        let moves_it = |moved: &Move| !is_near(moved.answer, example.answer, 1e-3);
        assert!(example.moves.iter().any(moves_it), "{}: nothing moves", about.name);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_of_the_37_questions_has_exactly_one_home() {
    let covered: Vec<&str> =
        questions().iter().flat_map(|q| q.about().covers.iter().copied()).collect();
    for number in 1..=37 {
        let name = format!("E{number}");
        let homes = covered.iter().filter(|covers| **covers == name).count();
        // E1 asks two things: the crossover and the ridge.
        assert_eq!(homes, if number == 1 { 2 } else { 1 }, "{name}");
    }
    let mut words: Vec<&str> = questions()
        .iter()
        .flat_map(|question| {
            let about = question.about();
            std::iter::once(about.name).chain(about.aliases.iter().copied())
        })
        .collect();
    let count = words.len();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), count, "two questions share a name");
}

fn answer_of(name: &str, pairs: &[(&str, &str)]) -> Answer {
    ask(find(name).unwrap(), &given(pairs), &[]).unwrap()
}

fn step_of(answer: &Answer, name: &str) -> f64 {
    answer.steps.iter().find(|step| step.name == name).unwrap().figure.value
}

#[test]
fn the_sizes_that_the_field_quotes_are_exact() {
    let sequence = answer_of("concurrency", &[("model", "Llama-3.1-70B"), ("pool", "1GiB")]);
    assert_eq!(step_of(&sequence, "sequence_bytes"), 2_684_354_560.0);
    let beams = answer_of("beams", &[("kv-bytes", "128KiB"), ("tokens", "1200")]);
    assert_eq!(step_of(&beams, "apart"), 600.0 * 1_048_576.0);
    assert_eq!(step_of(&beams, "shared"), 156.0 * 1_048_576.0);
    let latent = answer_of("mla", &[("model", "DeepSeek-V3")]);
    assert_eq!(
        latent.inputs.iter().find(|input| input.name == "kv_bytes").unwrap().value,
        Value::Number(70_272.0)
    );
}

#[test]
fn published_numbers_come_out_beside_those_of_the_examples() {
    let near = |name: &str, pairs: &[(&str, &str)], step: &str, wanted: f64, tolerance: f64| {
        let found = step_of(&answer_of(name, pairs), step);
        assert!(is_near(found, wanted, tolerance), "{name} {step}: {found} != {wanted}");
    };
    // Economics, rows 3, 4, 8, 9, 11, 12 and 14 (the numbers that `cited` figures quote).
    near("block-size", &[("block-size", "32")], "worst_share", 0.030, 0.01);
    near("block-size", &[("block-size", "128"), ("length", "200")], "worst_share", 0.39, 0.01);
    near("little", &[("arrivals", "10")], "running", 30.0, 0.01);
    near("little", &[("arrivals", "15")], "tpot", 0.0156, 0.01);
    near("little", &[("arrivals", "15")], "limit", 30.4, 0.002);
    near("spec", &[("acceptance", "0.7")], "expected", 2.77, 0.002);
    near("spec", &[("acceptance", "0.6")], "expected", 2.31, 0.002);
    near("spec", &[("gpu", "H100")], "batch_limit", 59.0, 0.002);
    near("spec", &[("gpu", "A100")], "batch_limit", 30.6, 0.002);
    near("ridge", &[("gpu", "CPU-roofline")], "batch", 9.0, 0.01);
    // Twice the arithmetic on half the bytes; without units for fp8 half the batch.
    near("ridge", &[("gpu", "H100"), ("weights", "fp8")], "batch", 295.0, 0.002);
    near("ridge", &[("gpu", "A100"), ("weights", "fp8")], "batch", 76.5, 0.002);
    let eight = [("model", "Llama-3.1-70B"), ("count", "8")];
    near("disaggregate", &eight, "needed", 9.3e9, 0.01);
    near("tiers", &[], "budget", 14.0e15, 0.002);
    near("tiers", &[], "spills", 13e6, 0.01);
    near("fp8-range", &[("format", "e5m2")], "smallest_normal", 6.10e-5, 0.001);
    // Start-up log C005: 53.29 GiB for KV; a sequence of 8,192 tokens takes 1 GiB.
    let logged = [("memory", "79.22GiB"), ("weight-bytes", "14.96GiB"), ("overhead", "3.05GiB")];
    near("concurrency", &logged, "by_memory", 53.29, 0.001);
    // The logged block and padding of Qwen3.5-0.8B.
    near("recurrent", &[], "padding", 0.0264, 0.005);
    // vLLM PR 11051 and others: 51 capture sizes up to 512.
    near("graphs", &[("policy", "vllm")], "sizes", 51.0, 0.0);
}

#[test]
fn what_moves_an_answer_most_is_found() {
    // Break-even = 2 x kv_bytes x peak x mfu / (2 x parameters): all first order, parameters inverse.
    let swap = answer_of("swap-or-recompute", &[]);
    let strongest = &swap.sensitivity[0];
    assert_eq!(strongest.input, "active_parameters");
    assert!(is_near(strongest.lower.change.unwrap(), 0.25, 1e-9), "{strongest:?}");
    assert!(is_near(strongest.higher.change.unwrap(), -1.0 / 6.0, 1e-9), "{strongest:?}");
    let link = swap.sensitivity.iter().find(|varied| varied.input == "link");
    assert!(link.is_none(), "the link decides nothing here: {link:?}");
    // A fifth more arrivals crosses the limit: no answer counts as the strongest move.
    let near_limit = answer_of("little", &[("arrivals", "28")]);
    let strongest = &near_limit.sensitivity[0];
    assert!(strongest.lower.answer.is_none() || strongest.higher.answer.is_none(), "{strongest:?}");
    // A changed decision outranks a larger change of the number.
    let close = answer_of("disaggregate", &[("link", "5.6GB/s")]);
    let flip = |side: &sensitivity::Variation| side.decision.as_deref() == Some("too slow");
    let strongest = &close.sensitivity[0];
    assert!(flip(&strongest.lower) || flip(&strongest.higher), "{strongest:?}");
}

#[test]
fn whole_numbers_are_varied_by_whole_steps() {
    let beams = answer_of("beams", &[("beams", "2")]);
    let varied = beams.sensitivity.iter().find(|varied| varied.input == "beams").unwrap();
    assert_eq!((varied.lower.input, varied.higher.input), (1.0, 3.0));
}

#[test]
fn inputs_from_tables_can_be_replaced_by_numbers() {
    let table = answer_of("swap-or-recompute", &[("gpu", "A100"), ("model", "Llama-3.1-8B")]);
    let numbers = answer_of(
        "swap-or-recompute",
        &[("peak", "312TFLOP/s"), ("kv-bytes", "131072"), ("active-parameters", "7504924672")],
    );
    assert_eq!(table.figure.value, numbers.figure.value);
    let set = ["num_key_value_heads=4".to_string()];
    let halved = ask(find("swap-or-recompute").unwrap(), &given(&[("gpu", "A100")]), &set).unwrap();
    let kv_bytes = |answer: &Answer| {
        answer.inputs.iter().find(|input| input.name == "kv_bytes").unwrap().value.clone()
    };
    assert_eq!(kv_bytes(&halved), Value::Number(65_536.0));
}

#[test]
fn bad_input_is_refused_with_field_value_and_mend() {
    let error = |name: &str, pairs: &[(&str, &str)]| {
        ask(find(name).unwrap(), &given(pairs), &[]).unwrap_err().to_string()
    };
    for (name, pairs, wanted) in [
        ("spill", &[("matched", "many")][..], "--matched = `many`: write a number"),
        ("spill", &[("matched", "-5")], "--matched = `-5`: write a value from 1"),
        ("spill", &[("mfu", "150%")], "--mfu = `150%`: write a value from 1% to 100%"),
        ("spill", &[("color", "red")], "--color: `spill` has no such input; it has --model"),
        ("spill", &[("gpu", "Voodoo")], "--gpu `Voodoo`: no such device"),
        ("spill", &[("model", "no-such-model")], "--model: no-such-model is neither"),
        ("beams", &[("beams", "2.5")], "--beams = `2.5`: write a whole number"),
        ("graphs", &[("policy", "some")], "--policy = `some`: write one of eights, vllm"),
        (
            "eviction-order",
            &[("blocks", "2"), ("evicted", "3")],
            "--evicted = `3`: write at most --blocks",
        ),
        ("little", &[("arrivals", "31")], "--arrivals = 31 req/s is not below the limit of 30.4"),
        ("mla", &[("model", "Llama-3.1-8B")], "it has no latent cache"),
        ("recurrent", &[("model", "Llama-3.1-8B")], "does not mix recurrent and attention"),
        (
            "concurrency",
            &[("model", "Llama-3.1-405B")],
            "no KV memory is left: weights of 756 GiB a rank",
        ),
    ] {
        let message = error(name, pairs);
        assert!(message.contains(wanted), "{name} {pairs:?}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
    assert!(
        find("meaning-of-life").is_err_and(|error| error.to_string().contains("crossover, ridge"))
    );
}

#[test]
fn extreme_input_gives_an_answer_or_an_error_and_no_panic() {
    for question in questions() {
        let inputs = question.inputs();
        for input in inputs
            .iter()
            .filter(|input| matches!(input.fallback, Fallback::Number(_) | Fallback::Worked(..)))
        {
            for extreme in [input.limits.0, input.limits.1, 1.0, 1e-300, 1e300, 0.0, -1.0] {
                let given = [(input.name.to_string(), format!("{extreme:e}"))];
                if let Ok(answer) = ask(*question, &given, &[]) {
                    assert!(
                        answer.figure.value.is_finite(),
                        "{} {}",
                        question.about().name,
                        input.name
                    );
                }
            }
        }
    }
}

#[test]
fn json_has_every_key_on_every_question() {
    for question in questions() {
        let json = ask(*question, &given(question.example().given), &[]).unwrap().json();
        for key in [
            "question",
            "covers",
            "asks",
            "answer",
            "decision",
            "advice",
            "inputs",
            "steps",
            "comparisons",
            "sensitivity",
            "moves_most",
            "explanation",
            "source",
        ] {
            assert!(json.get(key).is_some(), "{key}");
        }
        assert!(json["answer"]["value"].is_number() && json["answer"]["formula"].is_string());
        assert!(
            json["steps"].as_array().unwrap().iter().all(|step| step["with_numbers"].is_string())
        );
        let moves =
            json["moves_most"].is_string() || json["sensitivity"].as_array().unwrap().is_empty();
        assert!(moves, "{}", json["question"]);
    }
}

#[test]
fn overheads_are_those_of_the_engines_plan_however_little_fits() {
    // 131 GiB of weights on one device of 75: the pool is lost, the overhead is what it was. (Below 70 GiB
    // vLLM's default batch is another one.)
    let roomy = answer_of("million-tokens", &[("weights", "int4"), ("memory", "79GiB")]);
    let tight = answer_of("million-tokens", &[("weights", "bf16"), ("memory", "75GiB")]);
    let overhead = |answer: &Answer| {
        answer.inputs.iter().find(|input| input.name == "overhead").unwrap().value.clone()
    };
    assert_eq!(overhead(&roomy), overhead(&tight));
    let Value::Number(bytes) = overhead(&roomy) else { panic!("a number") };
    assert!((1e9..1e10).contains(&bytes), "{bytes}");
}

#[test]
fn a_refusal_is_in_the_engines_own_words() {
    let refused = answer_of("startup", &[("gpu", "L4"), ("pool", "4.6GiB")]);
    assert_eq!(refused.decision.as_deref(), Some("refuses"));
    for words in [
        "max seq len (131072)",
        "(16.00 GiB KV cache is needed",
        "available KV cache memory (4.60 GiB)",
        "estimated maximum model length is 37680",
    ] {
        assert!(refused.advice.contains(words), "{words} is not in {}", refused.advice);
    }
    // cases.csv C003, first engine: 2,356 blocks of 16 fit 4.6 GiB.
    assert!(is_near(refused.figure.value, 2356.0 * 16.0, 0.001));
    let started =
        answer_of("startup", &[("gpu", "L4"), ("pool", "4.6GiB"), ("max_model_len", "32768")]);
    assert_eq!(started.decision.as_deref(), Some("starts"));
}

#[test]
fn windows_states_and_latents_count_as_what_they_are() {
    let value = |name: &str, pairs: &[(&str, &str)]| answer_of(name, pairs).figure.value;
    // Gemma 3 27B at 32 K keeps 18.75 % of a full cache: 5.33 times the sequences.
    let long = [("model", "gemma-3-27b-it"), ("context", "32768")];
    let kv_bytes =
        answer_of("crossover", &long).inputs.into_iter().find(|i| i.name == "kv_bytes").unwrap();
    assert_eq!(kv_bytes.value, Value::Number(507_904.0 * 0.1875));
    // One latent on every rank: DP-attention pays; GQA heads divide: TP stays.
    assert!(value("mla-tp", &[("model", "Kimi-K2-Instruct")]) > 4.0);
    assert!(value("mla-tp", &[("model", "Llama-3.1-70B")]) < 1.0);
    let latent = ask(find("packed-gqa").unwrap(), &given(&[("model", "DeepSeek-V3")]), &[]);
    assert!(latent.unwrap_err().to_string().contains("reef plan ask mla"));
    // A hybrid's longest context follows vLLM's groups, not bytes a token.
    let model = ("model", "gemma-3-27b-it");
    let pool = ("pool", "8GiB");
    let hybrid = value("startup", &[model, ("gpu", "H200"), pool, ("max-model-len", "131072")]);
    assert!(hybrid > 1.5 * 8.0 * 1_073_741_824.0 / 507_904.0, "{hybrid}");
}
