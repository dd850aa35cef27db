//! From the name of a model in a log to a bundled config.

/// Words that do not change a model's shape: tunings, formats, publishers' habits.
const DECORATION: [&str; 44] = [
    "meta",
    "instruct",
    "it",
    "chat",
    "base",
    "hf",
    "thinking",
    "fp8",
    "fp16",
    "bf16",
    "f16",
    "int4",
    "int8",
    "nvfp4",
    "mxfp4",
    "awq",
    "gptq",
    "gguf",
    "4bit",
    "8bit",
    "w4a16",
    "w8a8",
    "w8a16",
    "quantized",
    "dynamic",
    "autoround",
    "bnb",
    "unsloth",
    "2507",
    "2512",
    "0324",
    "0528",
    "dspark",
    "marlin",
    "wna16",
    "modelopt",
    "compressed",
    "tensors",
    "int",
    "fp",
    "q4",
    "q8",
    "redhatai",
    "qat",
];

/// The bundled config that a log's model name means: the same name, or one that differs by words that do not
/// change the shape. `names` are those of [`crate::source::bundled`].
pub fn bundled<'a>(log: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = words(last_part(log));
    let fits = |name: &&str| {
        let words = words(name);
        let kept: Vec<&String> =
            wanted.iter().filter(|word| !is_decoration(word) || words.contains(word)).collect();
        let needed: Vec<&String> = words.iter().filter(|word| !is_decoration(word)).collect();
        let whole: Vec<&String> = words.iter().collect();
        !needed.is_empty() && (kept == needed || kept == whole)
    };
    // A longer name says more: `Qwen3-VL-30B-A3B-Instruct` before `Qwen3-30B-A3B`.
    names.filter(fits).max_by_key(|name| name.len())
}

fn is_decoration(word: &str) -> bool {
    let quantization = |word: &str| {
        let mut letters = word.chars();
        letters.next() == Some('q')
            && letters.next().is_some_and(|c| c.is_ascii_digit())
            && word.len() <= 3
    };
    DECORATION.contains(&word)
        || quantization(word)
        || matches!(word, "k" | "m" | "s" | "xl" | "ud")
}

/// The part of a path that names the model: `models--owner--NAME` of a hub's cache, else the last; without the
/// ending of a file.
fn last_part(log: &str) -> &str {
    let cached = log.split(['/', '\\']).find(|part| part.starts_with("models--"));
    if let Some(part) = cached {
        return part.rsplit("--").next().unwrap_or(part);
    }
    let last = log.trim_end_matches(['/', '\\']).rsplit(['/', '\\']).next().unwrap_or(log);
    last.strip_suffix(".gguf").unwrap_or(last)
}

/// Words in lower case; `___` stands for a dot in ModelScope's folders (vllm#42510).
fn words(name: &str) -> Vec<String> {
    let name = name.to_lowercase().replace("___", ".");
    let words = name.split(['-', '_', ' ', ':']).filter(|word| !word.is_empty());
    words.map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_logs_find_their_config_or_nothing() {
        let known = || crate::source::bundled();
        for (log, wanted) in [
            ("meta-llama/Llama-3.1-8B-Instruct", Some("Llama-3.1-8B")),
            (
                "/data/cache/modelscope/hub/models/LLM-Research/Meta-Llama-3___1-8B-Instruct",
                Some("Llama-3.1-8B"),
            ),
            (
                "/models/models--meta-llama--Meta-Llama-3.1-8B-Instruct/snapshots/0e9e39f",
                Some("Llama-3.1-8B"),
            ),
            (
                "/data/cache/huggingface/hub/models--nvidia--Llama-3.1-8B-Instruct-FP8/snapshots/026",
                Some("Llama-3.1-8B"),
            ),
            ("unsloth/Qwen3.6-27B-NVFP4", Some("Qwen3.6-27B")),
            ("/path/to/Qwen3-235B-A22B-FP8", Some("Qwen3-235B-A22B-FP8")),
            ("Qwen/Qwen3-VL-30B-A3B-Instruct", Some("Qwen3-VL-30B-A3B-Instruct")),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", Some("Qwen3-30B-A3B")),
            ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", None),
            ("Qwen/Qwen3-Coder-30B-A3B-Instruct", None),
            ("gpt-oss-20b-mxfp4.gguf", Some("gpt-oss-20b")),
            ("", None),
            ("Instruct", None),
        ] {
            assert_eq!(bundled(log, known()), wanted, "{log}");
        }
    }
}
