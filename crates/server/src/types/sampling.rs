//! How tokens are chosen and when text ends: fields that completions and chat share.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};

use reef_engine::{Branches, Sampling};
use serde::Deserialize;

use super::OneOrMany;
use crate::error::ApiError;
use crate::settings::Settings;

/// Stop strings at most, and the bytes of each: every token is compared with all.
const STOPS_MAX: usize = 64;
const STOP_BYTES_MAX: usize = 1024;
/// Entries of `logit_bias` and `stop_token_ids` at most.
const IDS_MAX: usize = 4096;

/// How tokens are chosen and when text ends.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct SamplingFields {
    /// 0: the likeliest; OpenAI's default is 1.
    pub temperature: Option<f32>,
    /// Nucleus sampling.
    pub top_p: Option<f32>,
    /// 0 or -1: all.
    pub top_k: Option<i64>,
    /// Least share of the likeliest token's probability.
    pub min_p: Option<f32>,
    /// Of tokens that were generated.
    pub presence_penalty: Option<f32>,
    /// The same, for each time.
    pub frequency_penalty: Option<f32>,
    /// Of tokens in prompt and output.
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of tokens, by id.
    pub logit_bias: Option<BTreeMap<String, f32>>,
    /// Same seed, same text; random where missing.
    pub seed: Option<i64>,
    /// Continuations given.
    pub n: Option<usize>,
    /// Continuations made, of which the `n` likeliest are given.
    pub best_of: Option<usize>,
    /// Beam search over `best_of` (else `n`) beams (vLLM).
    pub use_beam_search: Option<bool>,
    /// Of beam search.
    pub length_penalty: Option<f32>,
    /// Of beam search: end as soon as there are enough.
    pub early_stopping: Option<bool>,
    /// Strings before which text ends.
    pub stop: Option<OneOrMany<String>>,
    /// Tokens that end text.
    pub stop_token_ids: Option<Vec<u32>>,
    /// The stop string belongs to the text.
    pub include_stop_str_in_output: Option<bool>,
    /// Go on past the model's end tokens.
    pub ignore_eos: Option<bool>,
    /// Tokens before an end token may come.
    pub min_tokens: Option<usize>,
    /// Control tokens are no text.
    pub skip_special_tokens: Option<bool>,
}

impl SamplingFields {
    /// How tokens are chosen.
    ///
    /// # Errors
    /// A value out of range.
    pub fn sampling(&self) -> Result<Sampling, ApiError> {
        let default = Sampling::default();
        let top_k = self.top_k.unwrap_or(0);
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(1.0),
            top_k: usize::try_from(top_k.max(0)).unwrap_or(usize::MAX),
            min_p: self.min_p.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias: self.logit_bias()?,
            min_tokens: self.min_tokens.unwrap_or(default.min_tokens),
            seed: self.seed.map_or_else(random_seed, |seed| seed as u64),
        };
        match top_k {
            -1.. => sampling.check().map_err(|text| ApiError::invalid(field_of(&text), text))?,
            _ => {
                let text = format!("top_k is {top_k}: give at least 1, or 0 or -1 for all");
                return Err(ApiError::invalid("top_k", text));
            }
        }
        Ok(sampling)
    }

    fn logit_bias(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        let entries = self.logit_bias.iter().flatten();
        let bias = entries.map(|(token, bias)| match token.parse() {
            Ok(token) => Ok((token, *bias)),
            Err(_) => Err(ApiError::invalid(
                "logit_bias",
                format!("logit_bias: `{token}` is no token id: give ids as whole numbers"),
            )),
        });
        let bias: Vec<(u32, f32)> = bias.collect::<Result<_, _>>()?;
        at_most(bias.len(), IDS_MAX, "logit_bias", "entries")?;
        Ok(bias)
    }

    /// How many continuations, and how they are found.
    ///
    /// # Errors
    /// Counts that are out of range or do not go together.
    pub fn branches(&self, settings: &Settings) -> Result<Branches, ApiError> {
        let n = self.n.unwrap_or(1);
        let width = self.best_of.unwrap_or(n);
        let most = settings.branches_max;
        if n == 0 || n > most {
            return Err(ApiError::invalid("n", format!("n is {n}: it must be from 1 to {most}")));
        }
        if width < n || width > most {
            let text = format!("best_of is {width}: it must be from n = {n} to {most}");
            return Err(ApiError::invalid("best_of", text));
        }
        if self.use_beam_search.unwrap_or(false) {
            let length_penalty = self.length_penalty.unwrap_or(1.0);
            if !(-10.0..=10.0).contains(&length_penalty) {
                let text = format!("length_penalty is {length_penalty}: it must be from -10 to 10");
                return Err(ApiError::invalid("length_penalty", text));
            }
            let early_stopping = self.early_stopping.unwrap_or(false);
            return Ok(Branches::Beams { width, n, length_penalty, early_stopping });
        }
        Ok(if width == 1 { Branches::One } else { Branches::Sample { n, best_of: width } })
    }

    /// Strings before which text ends.
    ///
    /// # Errors
    /// Too many, or too long ones.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = self.stop.clone().map(OneOrMany::into_vec).unwrap_or_default();
        at_most(stops.len(), STOPS_MAX, "stop", "strings")?;
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        at_most(longest, STOP_BYTES_MAX, "stop", "bytes in a string")?;
        Ok(stops)
    }

    /// Tokens that end text: the model's `ends`, and those asked for.
    ///
    /// # Errors
    /// Too many.
    pub fn end_ids(&self, ends: &[u32]) -> Result<Vec<u32>, ApiError> {
        let mut ids = if self.ignore_eos.unwrap_or(false) { Vec::new() } else { ends.to_vec() };
        let more = self.stop_token_ids.as_deref().unwrap_or_default();
        at_most(more.len(), IDS_MAX, "stop_token_ids", "ids")?;
        ids.extend_from_slice(more);
        Ok(ids)
    }
}

/// Refuses to stream what is chosen when all of it has ended.
pub fn can_stream(branches: Branches) -> Result<(), ApiError> {
    if branches.is_ranked() {
        let text = "best_of and beam search choose at the end: they cannot be streamed";
        return Err(ApiError::invalid("stream", text));
    }
    Ok(())
}

/// Refuses more of something than is taken.
pub fn at_most(count: usize, most: usize, field: &'static str, what: &str) -> Result<(), ApiError> {
    if count <= most {
        return Ok(());
    }
    let text = format!("{field} has {count} {what}: at most {most} are taken");
    Err(ApiError::invalid(field, text))
}

/// The engine's errors begin with the field.
pub fn field_of(text: &str) -> Option<&'static str> {
    const FIELDS: [&str; 7] = [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    ];
    FIELDS.into_iter().find(|field| text.starts_with(field))
}

/// A seed that nobody can foresee: a fresh state of std's hasher is random.
fn random_seed() -> u64 {
    RandomState::new().hash_one(0)
}
