//! Files that the tests look for, and the line that says what was skipped without them.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use reef_model::gguf::Gguf;
use serde_json::Value;

/// Says what was skipped. Written past the test harness, which hides what passing tests print.
pub fn skipped(what: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {what}");
}

/// `name` in the shared folder, or `None` with a line that says so.
pub fn shared(name: &str) -> Option<PathBuf> {
    let root = std::env::var_os("REEF_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
        PathBuf::from,
    );
    let path = root.join(name);
    if path.exists() {
        return Some(path);
    }
    skipped(&format!("no {name} in the shared folder (REEF_SHARED names it)"));
    None
}

/// The fetched model `alias`, where `reef pull` puts it, or `None` with a line that says so.
pub fn fetched(alias: &str) -> Option<Gguf> {
    let folder = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = folder("REEF_HOME")
        .or_else(|| folder("XDG_CACHE_HOME").map(|path| path.join("reef")))
        .or_else(|| folder("HOME").map(|path| path.join(".cache/reef")));
    let path = home.unwrap_or_default().join(format!("{alias}.gguf"));
    if path.is_file() {
        return Some(Gguf::open(&path).expect("a fetched model opens"));
    }
    skipped(&format!("{alias}.gguf is not in the cache (`reef pull {alias}` fetches it)"));
    None
}

/// HF transformers' likelihood of a text, in f32, with weights dequantised from the same file.
pub struct Likelihood {
    /// Token ids of the text.
    pub ids: Vec<u32>,
    /// Mean negative log-likelihood in nats of all tokens but the first.
    pub mean_nll: f64,
    /// (index of a token, most likely next token, its log-probability, that of the second).
    pub top: Vec<(usize, u32, f64, f64)>,
}

impl Likelihood {
    /// The golden of model `alias`.
    pub fn golden(alias: &str) -> Likelihood {
        let text = match alias {
            "smollm2" => include_str!("../../data/nll-smollm2-opticks.json"),
            "gemma3" => include_str!("../../data/nll-gemma3-opticks.json"),
            other => panic!("no golden of {other}"),
        };
        let golden: Value = serde_json::from_str(text).unwrap();
        let ids = golden["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32);
        let tops = golden["top8_logprob_at"].as_object().unwrap().iter();
        let top = tops.map(|(index, best)| {
            let log_p = |rank: usize| best[rank][1].as_f64().unwrap();
            let token = best[0][0].as_u64().unwrap() as u32;
            (index.parse().unwrap(), token, log_p(0), log_p(1))
        });
        Likelihood {
            ids: ids.collect(),
            mean_nll: golden["mean_nll"].as_f64().unwrap(),
            top: top.collect(),
        }
    }
}
