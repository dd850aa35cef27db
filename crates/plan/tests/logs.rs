//! Real start-up logs (tests/data/logs/README.md has their sources), whatever wraps them, and any bytes.

use std::path::Path;

use proptest::prelude::*;
use reef_plan::engines::{self, GIB};
use reef_plan::log::compare::{Agreement, Comparison, compare};
use reef_plan::log::facts::{Quantity, Word};
use reef_plan::log::start::Known;
use reef_plan::log::{self, Reading};
use reef_plan::{device, html, source};

const MIB: f64 = (1_u64 << 20) as f64;

fn text(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/logs");
    std::fs::read(folder.join(name)).unwrap()
}

fn read(name: &str) -> Reading {
    log::read(&mut &text(name)[..]).unwrap()
}

fn compared(name: &str, model: &str, known: Known) -> Comparison {
    let reading = read(name);
    let model = source::read(model, &[]).unwrap();
    compare(engines::find(reading.engine).unwrap(), &model, &reading, &known).unwrap()
}

fn agreement(comparison: &Comparison, name: &str) -> (Agreement, String) {
    let line = comparison.lines.iter().find(|line| line.name == name).unwrap();
    (line.agreement, line.reason.clone().unwrap_or_default())
}

#[test]
fn every_excerpt_is_recognized() {
    let numbers = |name: &str, wanted: &[(Quantity, f64)]| {
        let reading = read(name);
        for (quantity, value) in wanted {
            let figure =
                reading.facts.figure(*quantity).unwrap_or_else(|| panic!("{name} {quantity:?}"));
            let near = (figure.value - value).abs() <= 1e-9 * value.abs();
            assert!(near, "{name} {quantity:?} {} {value}", figure.value);
            assert!(figure.explanation().starts_with("log line"), "{}", figure.explanation());
        }
        (reading.engine, reading.generation)
    };
    use Quantity::*;
    let v0 = ("vllm", Some("V0".to_string()));
    let v1 = ("vllm", Some("V1".to_string()));
    let first = [(Total, 23.58 * GIB), (Kv, 3.81 * GIB), (Blocks, 1952.0), (Concurrency, 1.56)];
    assert_eq!(numbers("vllm-v0-llama.log", &first), v0);
    let refused = [(MaxLen, 23648.0), (MaxModelLen, 29000.0), (Blocks, 1478.0)];
    assert_eq!(numbers("vllm-v0-refused.log", &refused), v0);
    let ranks = [(Weights, 21.21 * GIB), (Kv, 1.57 * GIB), (Reserved, 23.35 * GIB)];
    assert_eq!(numbers("vllm-v0-ranks.log", &ranks), v0);
    let table = [(NonTorch, 1.79 * GIB), (Activation, 1.26 * GIB), (Kv, 53.29 * GIB)];
    assert_eq!(numbers("vllm-v0-table.log", &table), v0);
    numbers("vllm-v1-blocks.log", &[(Blocks, 1381.0), (Weights, 67.7229 * GIB)]);
    let mtp = [(Tokens, 1_823_372.0), (DraftTokens, 2.0), (MaxModelLen, 1_048_576.0)];
    assert_eq!(numbers("vllm-v1-mtp.log", &mtp), v1);
    let hybrid = [(Kv, 5.98 * GIB), (Tokens, 567_978.0), (BatchedTokens, 8192.0)];
    assert_eq!(numbers("vllm-v1-hybrid.log", &hybrid), v1);
    assert_eq!(numbers("vllm-v1-ranks.log", &[(Graphs, 0.36 * GIB), (Utilization, 0.82)]), v1);
    let refused = [(KvNeeded, 36.0 * GIB), (Kv, 6.94 * GIB), (MaxLen, 50512.0)];
    assert_eq!(numbers("vllm-v1-refused.log", &refused), v1);
    assert_eq!(numbers("vllm-v1-journald.log", &[(Tokens, 215_401.0)]), v1);
    let moe = [(Kv, 2.0 * 76.44 * GIB), (Tokens, 1_669_816.0), (Weights, 56.98 * GIB)];
    assert_eq!(numbers("sglang-moe.log", &moe).0, "sglang");
    assert_eq!(numbers("sglang-mla.log", &[(Kv, 43.67 * GIB)]).0, "sglang");
    assert_eq!(numbers("sglang-ranks.log", &[(Kv, 17.68 * GIB)]).0, "sglang");
    let gemma = [(Kv, 144.0 * MIB), (Activation, 514.5 * MIB), (MaxModelLen, 8192.0)];
    assert_eq!(numbers("llamacpp-gemma3.log", &gemma).0, "llamacpp");
    assert_eq!(numbers("llamacpp-smollm2.log", &[(Kv, 180.0 * MIB)]).0, "llamacpp");
    assert_eq!(numbers("llamacpp-old.log", &[(Kv, 4096.0 * MIB)]).0, "llamacpp");
    assert_eq!(numbers("llamacpp-mla.log", &[(Kv, 1166.65 * MIB)]).0, "llamacpp");
    let built = [(Blocks, 8219.0), (BlockSize, 32.0), (Tokens, 263_008.0), (Kv, 16.05 * GIB)];
    assert_eq!(numbers("trtllm-llama.log", &built).0, "trtllm");
    let python = [(BytesPerToken, 163_840.0), (Total, 139.8 * GIB), (Tokens, 536_768.0)];
    assert_eq!(numbers("trtllm-pytorch.log", &python).0, "trtllm");
    assert_eq!(numbers("trtllm-triton.log", &[(Kv, 14_575_206_400.0)]).0, "trtllm");
}

#[test]
fn words_come_with_the_numbers() {
    let mtp = read("vllm-v1-mtp.log").facts;
    assert_eq!(mtp.word(Word::Version), Some(("0.25.1", 1)));
    assert_eq!(mtp.word(Word::KvDtype), Some(("nvfp4", 1)));
    let hybrid = read("vllm-v1-hybrid.log").facts;
    assert_eq!(hybrid.word(Word::KvDtype), Some(("fp8", 1)));
    assert_eq!(hybrid.word(Word::PrefixCaching), Some(("True", 1)));
    let refused = read("vllm-v1-refused.log").facts;
    assert!(refused.word(Word::Refusal).unwrap().0.starts_with("To serve at least one request"));
    let ranks = read("sglang-ranks.log").facts;
    let kv = ranks.figure(Quantity::Kv).unwrap();
    assert!(kv.explanation().contains("2 ranks say"), "{}", kv.explanation());
}

#[test]
fn logs_close_with_the_plan() {
    let closes = |comparison: &Comparison, names: &[&str]| {
        for name in names {
            let (found, reason) = agreement(comparison, name);
            assert_eq!(found, Agreement::Equal, "{name}: {reason}");
        }
    };
    let known = Known::default;
    let llama = compared("vllm-v0-llama.log", "Llama-3.1-8B", known());
    closes(&llama, &["blocks", "full requests at once"]);
    assert_ne!(agreement(&llama, "left for KV").0, Agreement::Differs);
    let refused = compared("vllm-v0-refused.log", "Llama-3.1-8B", known());
    closes(&refused, &["blocks", "longest request"]);
    assert!(refused.fit.plan.refusal.is_some());
    let hybrid = compared("vllm-v1-hybrid.log", "Qwen3.6-35B-A3B", known());
    closes(&hybrid, &["tokens as printed", "full requests at once"]);
    let vision = compared("vllm-v1-refused.log", "Qwen3-VL-4B-Instruct", known());
    closes(&vision, &["KV of one full request", "longest request"]);
    let moe = compared("sglang-moe.log", "Qwen3-30B-A3B", known());
    closes(&moe, &["tokens as printed"]);
    assert_eq!(agreement(&moe, "weights").0, Agreement::InRange);
    let mla = Known { max_model_len: Some(32768), ..known() };
    closes(&compared("llamacpp-mla.log", "DeepSeek-R1", mla), &["left for KV"]);
    let fp8 = reef_plan::dtype::KvDtype::Fp8;
    let trtllm = Known { kv: Some((fp8, fp8)), ..known() };
    let trtllm = compared("trtllm-llama.log", "Llama-3.1-8B", trtllm);
    closes(&trtllm, &["blocks", "tokens as printed", "tokens of a block"]);
}

#[test]
fn a_difference_names_the_assumption_that_closes_it() {
    let trtllm = compared("trtllm-llama.log", "Llama-3.1-8B", Known::default());
    let (found, reason) = agreement(&trtllm, "tokens as printed");
    assert_eq!(found, Agreement::Differs);
    assert!(reason.contains("the KV format is fp8"), "{reason}");
    let ranks =
        compared("vllm-v0-ranks.log", "DeepSeek-R1", Known { tp: Some(16), ..Known::default() });
    let (found, reason) = agreement(&ranks, "weights");
    assert_eq!(found, Agreement::Differs);
    assert!(reason.contains("--weights awq"), "{reason}");
    let l4 = Known { device: Some(device::find("L4").unwrap()), ..Known::default() };
    let (_, reason) = agreement(&compared("vllm-v0-llama.log", "Llama-3.1-8B", l4), "left for KV");
    assert!(reason.contains("activation peak +0.16"), "{reason}");
}

/// What ships logs puts before them, and what terminals leave in them, changes nothing.
#[test]
fn wrapped_logs_read_the_same() {
    let wraps: [(&str, &str); 5] = [
        ("engine-1  | ", "\n"),
        ("Sep 11 01:16:15 host vllm[1884]: ", "\n"),
        ("\u{1b}[1;36m(EngineCore pid=9)\u{1b}[0m ", "\r\n"),
        ("{\"log\":\"", "\\n\",\"stream\":\"stderr\"}\n"),
        (" 12%|#   | 3/23 [00:08<00:00]\r", "\n"),
    ];
    for name in ["vllm-v0-llama.log", "vllm-v1-hybrid.log", "sglang-moe.log", "trtllm-llama.log"] {
        let plain = read(name);
        for (before, after) in wraps {
            let text = String::from_utf8(text(name)).unwrap();
            let wrapped: String =
                text.lines().map(|line| format!("{before}{line}{after}")).collect();
            let found = log::read(&mut wrapped.as_bytes()).unwrap();
            assert_eq!(found.engine, plain.engine);
            let numbers = |reading: &Reading| -> Vec<(Quantity, f64)> {
                reading.facts.figures().map(|(quantity, figure)| (quantity, figure.value)).collect()
            };
            assert_eq!(numbers(&found), numbers(&plain), "{name} {before:?}");
        }
    }
}

#[test]
fn the_last_start_counts_and_draft_models_do_not_add_up() {
    let header =
        "INFO Initializing a V1 LLM engine (v0.11.0) with config: model='x', max_seq_len=4096,\n";
    let start = |kv: &str| format!("{header}Available KV cache memory: {kv} GiB\n");
    let reading = log::read(&mut (start("9.5") + &start("3.25")).as_bytes()).unwrap();
    assert_eq!(reading.starts, 2);
    assert_eq!(reading.facts.figure(Quantity::Kv).unwrap().value, 3.25 * GIB);
    assert!(reading.notes[0].contains("2 starts"));
    let twice = [text("llamacpp-smollm2.log"), text("llamacpp-gemma3.log")].concat();
    let reading = log::read(&mut &twice[..]).unwrap();
    assert_eq!(reading.facts.figure(Quantity::Kv).unwrap().value, 180.0 * MIB);
    assert!(
        reading.notes.iter().any(|note| note.contains("a second model")),
        "{:?}",
        reading.notes
    );
}

/// Values of all `<data value="…">`, and all numbers of a JSON document.
fn values(page: &str) -> Vec<f64> {
    let parts = page.split("<data value=\"").skip(1);
    parts.map(|part| serde_json::from_str(part.split('"').next().unwrap()).unwrap()).collect()
}

fn all_numbers(value: &serde_json::Value, found: &mut Vec<f64>) {
    match value {
        serde_json::Value::Number(number) => found.push(number.as_f64().unwrap()),
        serde_json::Value::Array(values) => values.iter().for_each(|v| all_numbers(v, found)),
        serde_json::Value::Object(values) => values.values().for_each(|v| all_numbers(v, found)),
        _ => {}
    }
}

#[test]
fn the_page_loads_nothing_and_its_numbers_are_those_of_the_json() {
    let mut model = source::read("Qwen3.6-35B-A3B", &[]).unwrap();
    model.name = "<img src=x onerror=alert(1)>&\"'</script>".into();
    let reading = read("vllm-v1-hybrid.log");
    let engine = engines::find("vllm").unwrap();
    let known = Known { device: Some(device::find("RTX 5090").unwrap()), ..Known::default() };
    let comparison = compare(engine, &model, &reading, &known).unwrap();
    let page = html::page(engine, &model, &comparison.fit, Some(&comparison.lines)).unwrap();
    // The only addresses are in texts: nothing has an attribute or a style that loads.
    for load in ["src=", "href=", "url(", "@import", "<link", "<iframe", "<object", "http-equiv"] {
        let raw = page.replace("&lt;img src=x", "").replace("\\u003cimg src=x", "");
        assert!(!raw.contains(load), "{load}");
    }
    assert!(!page.contains("http://") && !page.contains("https://"));
    assert!(
        !page.contains("<img")
            && page.contains("&lt;img src=x onerror=alert(1)&gt;&amp;&quot;&#39;")
    );
    assert_eq!(page.matches("</script>").count(), 1);
    let json = page.split("id=\"plan\">").nth(1).unwrap().split("</script>").next().unwrap();
    let document: serde_json::Value = serde_json::from_str(json).unwrap();
    // Through text, as readers get it: parsing may be off by the last bit.
    let fit = serde_json::to_string(&comparison.fit).unwrap();
    assert_eq!(document["fit"], serde_json::from_str::<serde_json::Value>(&fit).unwrap());
    let mut numbers = Vec::new();
    all_numbers(&document, &mut numbers);
    // What is left over is the one number that the page counts itself.
    let shown: Vec<f64> = values(&page);
    assert!(shown.len() > 40);
    for value in shown {
        assert!(numbers.contains(&value), "{value} is not in the JSON");
    }
    for word in ["measured", "derived", "assumed", "preferred-color-scheme", "prefers-color-scheme"]
    {
        assert_eq!(page.contains(word), word != "preferred-color-scheme", "{word}");
    }
}

/// Pieces of real lines, so that any order and any cut of them is met.
fn pieces() -> impl Strategy<Value = Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/logs");
    let mut lines = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        lines.extend(bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec));
    }
    lines.sort();
    let line = prop_oneof![
        6 => (proptest::sample::select(lines), any::<(u8, u8)>()).prop_map(|(mut line, (at, byte))| {
            if !line.is_empty() && byte % 3 == 0 {
                let at = at as usize % line.len();
                line[at] = byte;
            }
            line
        }),
        1 => proptest::collection::vec(any::<u8>(), 0..80),
        1 => "Available KV cache memory: [0-9,.]{1,30} GiB".prop_map(String::into_bytes),
        1 => "[a-z=']{0,9}max_seq_len=[0-9]{1,15}, tensor_parallel_size=[0-9]{1,7}".prop_map(String::into_bytes),
    ];
    let end = prop_oneof![Just(&b"\n"[..]), Just(&b"\r\n"[..]), Just(&b"\r"[..]), Just(&b""[..])];
    proptest::collection::vec((line, end), 0..30).prop_map(|lines| {
        lines.into_iter().flat_map(|(line, end)| [line, end.to_vec()].concat()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_log_makes_it_panic(bytes in pieces()) {
        let Ok(reading) = log::read(&mut &bytes[..]) else {
            return Ok(());
        };
        let model = source::read("gpt-oss-20b", &[]).unwrap();
        let engine = engines::find(reading.engine).unwrap();
        if let Ok(comparison) = compare(engine, &model, &reading, &Known::default()) {
            let _ = log::report::comparison(&comparison);
            let page = html::page(engine, &model, &comparison.fit, Some(&comparison.lines));
            prop_assert!(page.is_ok());
        }
        let _ = log::report::facts(&reading);
    }
}
