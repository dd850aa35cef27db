//! Text that repeats itself, with drafts looked up in it and without.

use reef_engine::Request;
use reef_engine::speculate::Ngram;
use reef_kv::Fidelity;
use reef_model::tokenizer::{Encode, Tokenizer};
use serde_json::{Value, json};

use super::Setting;
use super::drive::Drive;

const GENERATED: usize = 256;

/// Code of a kind that repeats: the model goes on with it.
const CODE: &str = "def test_addition_of_one():\n    result = add(1, 1)\n    assert result == 2\n\n\
    def test_addition_of_two():\n    result = add(1, 2)\n    assert result == 3\n\n\
    def test_addition_of_three():\n    result = add(1, 3)\n    assert result == 4\n\n\
    def test_addition_of_four():\n    result = add(1, 4)\n    assert result == 5\n\n\
    def test_addition_of_five():\n";

/// A text to copy: twice, and the beginning of a third time.
const COPY: &str = "The ship left the harbor at dawn with a cargo of salt and timber. Her captain, a \
    quiet woman of fifty, had sailed this coast since she was a girl, and knew each rock by the name of \
    the boat it had sunk. By noon the wind had backed to the west.\n\n";

/// Tokens a second, with and without, in turn.
pub fn measure(setting: &Setting) -> anyhow::Result<Value> {
    let tokenizer = Tokenizer::from_gguf(&setting.gguf)?;
    let copied = format!("{COPY}{COPY}{COPY}{COPY}The ship left");
    let mut found = serde_json::Map::new();
    for (name, text) in [("code", CODE), ("copy", copied.as_str())] {
        let prompt = tokenizer.encode(text, Encode::default())?;
        let (plain, expected, _) = speed(setting, &prompt, false)?;
        let (drafted, tokens, drafts) = speed(setting, &prompt, true)?;
        let mut note = |what: &str, value: Value| found.insert(format!("{name}_{what}"), value);
        note("plain_tok_s", json!(plain));
        note("drafted_tok_s", json!(drafted));
        note("ratio", json!(drafted / plain));
        note("same_text", json!(f64::from(u8::from(tokens == expected))));
        note("proposed", json!(drafts.0));
        note("accepted", json!(drafts.1));
    }
    Ok(Value::Object(found))
}

/// Decode speed, the tokens, and (drafts proposed, accepted).
fn speed(
    setting: &Setting,
    prompt: &[u32],
    drafts: bool,
) -> anyhow::Result<(f64, Vec<u32>, (usize, usize))> {
    let budget = setting.bytes(2 * (prompt.len() + GENERATED))? + (4 << 20);
    let mut engine = setting.engine(budget, |_| {})?;
    if drafts {
        engine.set_drafter(Box::new(Ngram::new(2, 4)), 0.0);
    }
    let mut drive = Drive::new(engine);
    let plain = Request::new(prompt.to_vec(), Fidelity::Exact);
    let stream = drive.submit(Request { max_tokens: Some(GENERATED), ..plain })?;
    drive.finish(&[stream])?;
    let stream = &drive.streams[stream];
    let seconds = stream.tokens.last().unwrap_or(&f64::NAN) - stream.tokens[0];
    let outcome = stream.outcome.as_ref();
    let usage = outcome.map_or((0, 0), |outcome| outcome.usage.drafts);
    let tokens = outcome.map(|outcome| outcome.continuations[0].token_ids.clone());
    Ok(((GENERATED - 1) as f64 / seconds, tokens.unwrap_or_default(), usage))
}
