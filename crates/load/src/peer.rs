//! `llama-server` with the bytes of KV memory that Reef gets, in the ways that suit it best.

use std::path::Path;

/// A way to divide its memory.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its name in reports.
    pub name: &'static str,
    /// What it means.
    pub meaning: &'static str,
    divides: Divides,
    cache_type: &'static str,
    /// Bytes of a value of that type, over those of f16.
    size: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Divides {
    /// As many slots as the longest request fits into: nobody is cut short, the others wait.
    Slots,
    /// A slot for each client, all sharing the memory: more at once, as long as it lasts.
    Shared,
}

/// Bytes of a `q8_0` value (34 bytes for 32 values) over those of f16.
const Q8_0: f64 = 34.0 / 64.0;

/// The ways that were found best.
pub const SETTINGS: [Setting; 3] = [
    Setting {
        name: "slots",
        meaning: "f16; as many slots as the longest request fits into",
        divides: Divides::Slots,
        cache_type: "f16",
        size: 1.0,
    },
    Setting {
        name: "shared",
        meaning: "f16; a slot for each client, one unified buffer",
        divides: Divides::Shared,
        cache_type: "f16",
        size: 1.0,
    },
    Setting {
        name: "slots-q8_0",
        meaning: "q8_0; as many slots as the longest request fits into",
        divides: Divides::Slots,
        cache_type: "q8_0",
        size: Q8_0,
    },
];

/// What it is to serve.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Bytes of KV memory.
    pub kv_bytes: u64,
    /// Bytes of a token in f16.
    pub bytes_per_token: f64,
    /// Clients at once.
    pub clients: usize,
    /// Tokens that the longest request comes to hold.
    pub longest_tokens: usize,
    /// Threads.
    pub threads: usize,
}

impl Setting {
    /// The options of `llama-server`. Batch sizes are its own (2,048 and 512), continuous batching is on as by
    /// default. `--cache-ram 0`: it would else keep KV of ended requests beside the bytes it is given.
    pub fn arguments(&self, model: &Path, demand: &Demand) -> Vec<String> {
        let tokens = (demand.kv_bytes as f64 / (demand.bytes_per_token * self.size)) as usize;
        let slots = match self.divides {
            Divides::Slots => (tokens / demand.longest_tokens.max(1)).clamp(1, demand.clients),
            Divides::Shared => demand.clients,
        };
        let mut words = vec!["--model".into(), model.display().to_string()];
        let mut add = |name: &str, value: String| words.extend([name.to_string(), value]);
        add("--ctx-size", tokens.to_string());
        add("--parallel", slots.to_string());
        add("--threads", demand.threads.to_string());
        add("--cache-type-k", self.cache_type.into());
        add("--cache-type-v", self.cache_type.into());
        add("--flash-attn", "on".into());
        add("--cache-ram", "0".into());
        words.push("--cont-batching".into());
        words.push(match self.divides {
            Divides::Slots => "--no-kv-unified".into(),
            Divides::Shared => "--kv-unified".into(),
        });
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gets_the_same_bytes() {
        let demand = Demand {
            kv_bytes: 23_040_000,
            bytes_per_token: 23_040.0,
            clients: 64,
            longest_tokens: 300,
            threads: 2,
        };
        let value = |setting: &Setting, name: &str| {
            let words = setting.arguments(Path::new("m"), &demand);
            let at = words.iter().position(|word| word == name).unwrap();
            words[at + 1].clone()
        };
        let ctx_and_slots = SETTINGS.map(|s| [value(&s, "--ctx-size"), value(&s, "--parallel")]);
        assert_eq!(
            ctx_and_slots,
            [["1000", "3"], ["1000", "64"], ["1882", "6"]].map(|w| w.map(String::from))
        );
    }
}
