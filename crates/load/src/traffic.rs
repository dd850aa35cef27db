//! What the clients ask: a pure function of the seed, so that a run can be repeated and a peer gets the same.

use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};

use crate::transcript::Wanted;

/// Words of prompts; with its space each is about one token of an English vocabulary.
const WORDS: &str = "the water light people world house small great many long city road river stone \
    winter summer morning evening paper letter number story music garden window table horse field \
    forest mountain island ocean ship train bridge market money power energy science history language \
    question answer reason change system machine engine memory color green blue white black heavy simple \
    quick early never always between under after before around against through within across during";
/// Openings that several requests share, and their words.
const SHARED_OPENINGS: usize = 4;
const SHARED_WORDS: usize = 300;
/// Requests whose text is known from running them alone.
pub const KNOWN_REQUESTS: usize = 24;

/// When a client goes away before the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// So long after it has asked, whatever has come.
    After(Duration),
    /// When so many events have come.
    Events(usize),
}

/// A request, and what to make of its answer.
#[derive(Clone, Debug)]
pub struct Ask {
    /// `/v1/completions` or `/v1/chat/completions`.
    pub path: &'static str,
    /// The body.
    pub body: Value,
    /// What the answer must be like.
    pub wanted: Wanted,
    /// Whether the client leaves early, and whether by a reset instead of an orderly end.
    pub leave: Option<(Leave, bool)>,
    /// A reader that stops reading for so long after its first event.
    pub nap: Option<Duration>,
    /// Index of the request among those whose text is known.
    pub known: Option<usize>,
    /// Tokens of KV that it comes to hold, about: the prompt, and each choice.
    pub held_tokens: usize,
}

/// Prompt and generation, in tokens, with what a request of this kind is for.
#[derive(Clone, Copy)]
enum Shape {
    /// A turn of a chat.
    Turn,
    /// A long text to say something short of.
    Document,
    /// A short wish for a long text.
    Writer,
    /// A question behind an opening that others have too.
    Shared,
}

/// The traffic of one seed.
#[derive(Clone, Debug)]
pub struct Traffic {
    seed: u64,
    model: String,
    disconnects: f64,
    scale: f64,
}

impl Traffic {
    /// Traffic for a server's `model`, of whose requests the share `disconnects` (0 to 1) is left early.
    /// Lengths are multiplied by `scale`.
    pub fn new(seed: u64, model: &str, disconnects: f64, scale: f64) -> Traffic {
        Traffic { seed, model: model.into(), disconnects, scale }
    }

    /// The same kinds, a twentieth as long, of which none is left.
    pub fn short(&self) -> Traffic {
        Traffic { disconnects: 0.0, scale: self.scale / 20.0, ..self.clone() }
    }

    /// Request `number` of `client`.
    pub fn ask(&self, client: usize, number: usize) -> Ask {
        let mut rng = self.rng(1, ((client as u64) << 32) | number as u64);
        let mut ask = match rng.f64() < 0.25 {
            true => self.known(rng.usize(..KNOWN_REQUESTS)),
            false => self.any(&mut rng),
        };
        if rng.f64() < self.disconnects {
            let leave = match rng.bool() {
                true => Leave::After(Duration::from_millis(rng.u64(..3000))),
                false => Leave::Events(rng.usize(1..40)),
            };
            ask.leave = Some((leave, rng.bool()));
        }
        ask.nap = (rng.f64() < 0.05).then(|| Duration::from_millis(rng.u64(200..2000)));
        ask
    }

    /// Request `index` of those whose text is known: exact, one choice, greedy or seeded.
    pub fn known(&self, index: usize) -> Ask {
        let mut rng = self.rng(2, index as u64);
        let temperature = [0.0, 0.8][index % 2];
        let mut ask = self.draw(&mut rng, "exact", temperature, 1);
        ask.known = Some(index);
        ask
    }

    /// Tokens that a request comes to hold, on average over the first ones.
    pub fn mean_held_tokens(&self) -> f64 {
        const SAMPLE: usize = 1000;
        let held = (0..SAMPLE).map(|number| self.ask(number % 50, number / 50).held_tokens);
        held.sum::<usize>() as f64 / SAMPLE as f64
    }

    /// Tokens that the longest of the first requests comes to hold.
    pub fn longest_held_tokens(&self) -> usize {
        (0..1000).map(|number| self.ask(number % 50, number / 50).held_tokens).max().unwrap_or(1)
    }

    fn rng(&self, purpose: u64, number: u64) -> Rng {
        let mixed = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ purpose << 60;
        Rng::with_seed(mixed.wrapping_add(number.wrapping_mul(0xd134_2543_de82_ef95)))
    }

    fn any(&self, rng: &mut Rng) -> Ask {
        let fidelity = ["exact", "int8", "int4", "evict"][rng.usize(..4)];
        let temperature = [0.0, 0.7, 1.0][rng.usize(..3)];
        let choices = if rng.f64() < 0.08 { 2 } else { 1 };
        self.draw(rng, fidelity, temperature, choices)
    }

    fn draw(&self, rng: &mut Rng, fidelity: &str, temperature: f64, choices: usize) -> Ask {
        let shape = [Shape::Turn, Shape::Turn, Shape::Document, Shape::Writer, Shape::Shared];
        let shape = shape[rng.usize(..5)];
        let (words, max_tokens) = match shape {
            Shape::Turn => (rng.usize(20..120), rng.usize(48..192)),
            Shape::Document => (rng.usize(500..1200), rng.usize(32..96)),
            Shape::Writer => (rng.usize(10..50), rng.usize(192..448)),
            Shape::Shared => (rng.usize(10..60), rng.usize(48..128)),
        };
        let scaled = |count: usize| ((count as f64 * self.scale) as usize).max(4);
        let (words, max_tokens) = (scaled(words), scaled(max_tokens));
        let opening = match shape {
            Shape::Shared => {
                let mut rng = self.rng(3, rng.u64(..SHARED_OPENINGS as u64));
                sentence(&mut rng, scaled(SHARED_WORDS))
            }
            _ => String::new(),
        };
        let prompt = sentence(rng, words);
        let is_chat = rng.bool();
        let wanted = Wanted {
            choices,
            is_chat,
            max_tokens,
            exactly: rng.f64() < 0.5,
            usage: rng.f64() < 0.75,
            continuous_usage: false,
            logprobs: rng.f64() < 0.2,
        };
        let continuous_usage = wanted.usage && rng.f64() < 0.3;
        let wanted = Wanted { continuous_usage, ..wanted };
        let mut body = self.body(&wanted, fidelity, temperature, rng.u64(..1 << 31));
        match is_chat {
            true if opening.is_empty() => body["messages"] = json!([message("user", &prompt)]),
            true => {
                body["messages"] = json!([message("system", &opening), message("user", &prompt)]);
            }
            false => body["prompt"] = json!(format!("{opening} {prompt}").trim()),
        }
        let prompt_tokens = words + if opening.is_empty() { 8 } else { scaled(SHARED_WORDS) + 16 };
        let path = if is_chat { "/v1/chat/completions" } else { "/v1/completions" };
        let held_tokens = prompt_tokens + choices * max_tokens;
        Ask { path, body, wanted, leave: None, nap: None, known: None, held_tokens }
    }

    fn body(&self, wanted: &Wanted, fidelity: &str, temperature: f64, seed: u64) -> Value {
        let mut body = json!({
            "model": self.model,
            "stream": true,
            "max_tokens": wanted.max_tokens,
            "temperature": temperature,
            "seed": seed,
            "n": wanted.choices,
            "ignore_eos": wanted.exactly,
            "kv": { "fidelity": fidelity },
        });
        if wanted.usage {
            body["stream_options"] = json!({ "include_usage": true });
        }
        if wanted.continuous_usage {
            body["stream_options"]["continuous_usage_stats"] = json!(true);
        }
        match (wanted.logprobs, wanted.is_chat) {
            (true, true) => body["logprobs"] = json!(true),
            (true, false) => body["logprobs"] = json!(1),
            (false, _) => {}
        }
        body
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

fn sentence(rng: &mut Rng, words: usize) -> String {
    let all: Vec<&str> = WORDS.split_whitespace().collect();
    let drawn: Vec<&str> = (0..words).map(|_| all[rng.usize(..all.len())]).collect();
    drawn.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_traffic() {
        let traffic = Traffic::new(7, "m", 0.2, 1.0);
        let bodies = |seed| {
            let traffic = Traffic::new(seed, "m", 0.2, 1.0);
            (0..20).map(|n| traffic.ask(3, n).body.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(bodies(7), bodies(7));
        assert_ne!(bodies(7), bodies(8));
        let asks: Vec<Ask> = (0..400).map(|n| traffic.ask(n % 8, n / 8)).collect();
        let count = |is: &dyn Fn(&Ask) -> bool| asks.iter().filter(|ask| is(ask)).count();
        assert!((40..120).contains(&count(&|ask| ask.leave.is_some())));
        assert!((60..140).contains(&count(&|ask| ask.known.is_some())));
        assert!(count(&|ask| ask.wanted.choices == 2) > 5);
        for known in asks.iter().filter(|ask| ask.known.is_some()) {
            assert_eq!(known.body, traffic.known(known.known.unwrap()).body);
            assert_eq!(known.body["kv"]["fidelity"], "exact");
        }
    }
}
