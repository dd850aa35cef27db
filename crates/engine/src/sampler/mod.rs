//! Choosing the next token from logits.
//!
//! One token takes at most one random number, and a sampler's state is its own: the tokens of a sequence
//! depend on its logits alone, whatever runs beside it, whether drafts were tried, and whether it stood
//! still in between.

mod candidates;
mod logprobs;
mod seen;

use std::cell::RefCell;

use reef_kernels::dispatch::Tier;
use reef_kernels::logits;

use crate::constraint::{Constraint, TokenMask};
use candidates::Candidates;
use seen::Seen;

pub use logprobs::{likeliest_logprobs, token_logprobs};

/// How to choose. Applied in vLLM's order: bias, bar on end tokens, penalties, constraint, temperature,
/// `min_p`, `top_k`, `top_p`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 = greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep the most likely tokens whose probabilities sum to at least this (nucleus sampling,
    /// arXiv 1904.09751); 1 keeps all.
    pub top_p: f32,
    /// Keep this many most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep tokens at least this fraction as likely as the most likely one (arXiv 2407.01082); 0 keeps
    /// all.
    pub min_p: f32,
    /// Divides positive logits of tokens in prompt and output, multiplies negative ones (CTRL, arXiv
    /// 1909.05858); 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the output, once for each time they are there.
    pub frequency_penalty: f32,
    /// (token, what is added to its logit). Tokens that the model does not have change nothing; of a
    /// token named twice both count.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens to generate before an end token may be chosen.
    pub min_tokens: usize,
    /// Seed of the random numbers: same seed, same logits, same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            min_tokens: 0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Checks ranges; the error names the field, the value and the mend.
    pub fn check(&self) -> Result<(), String> {
        let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        if !(0.0..=100.0).contains(&temperature) {
            return Err(format!("temperature is {temperature}: it must be from 0 to 100"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(format!("top_p is {top_p}: it must be above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(format!("min_p is {min_p}: it must be from 0 to 1"));
        }
        if !(0.01..=100.0).contains(&repetition_penalty) {
            let field = format!("repetition_penalty is {repetition_penalty}");
            return Err(format!("{field}: it must be from 0.01 to 100 (1: none)"));
        }
        let penalties = [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ];
        for (name, value) in penalties {
            if !(-2.0..=2.0).contains(&value) {
                return Err(format!("{name} is {value}: it must be from -2 to 2"));
            }
        }
        let wrong = self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias));
        wrong.map_or(Ok(()), |(token, bias)| {
            Err(format!("logit_bias of token {token} is {bias}: it must be from -100 to 100"))
        })
    }

    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// Why there is no next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoToken {
    /// No logit is finite, or one is plus infinity: the weights are damaged or overflow.
    #[error("the logits are not finite")]
    NotFinite,
    /// The constraint allows none of the tokens that are left: what it describes cannot go on.
    #[error("the constraint allows no token")]
    Barred,
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Natural logarithm of its probability before anything of [`Sampling`] changed it, where asked for.
    pub logprob: Option<f32>,
    /// (token, the same of it), likeliest first, as many as asked for. The chosen token is among them only
    /// where it is one of the likeliest.
    pub top: Vec<(u32, f32)>,
}

/// Buffers of a choice, `[vocabulary]` each.
#[derive(Default)]
struct Scratch {
    changed: Vec<f32>,
    mask: TokenMask,
    candidates: Candidates,
}

thread_local! {
    /// A megabyte for a vocabulary of 65,536: one a thread, not one a sequence, and none in a clone.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The state of one sequence's choices. A clone goes on exactly as the original.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    tier: Tier,
    random: SplitMix64,
    /// Tokens chosen so far.
    generated: usize,
    end_ids: Vec<u32>,
    seen: Seen,
    constraint: Option<Box<dyn Constraint>>,
}

impl Sampler {
    /// A sampler at the start of its sequence of random numbers, that knows no prompt, no end tokens and
    /// no constraint.
    pub fn new(sampling: Sampling) -> Sampler {
        Sampler::begin(sampling, &[], &[], None)
    }

    /// A sampler for what follows `prompt`. `end_ids` are barred until `min_tokens` are generated;
    /// `constraint` must be at the start of what it describes.
    pub fn begin(
        sampling: Sampling,
        prompt: &[u32],
        end_ids: &[u32],
        constraint: Option<Box<dyn Constraint>>,
    ) -> Sampler {
        let seen = if sampling.has_penalties() { Seen::of_prompt(prompt) } else { Seen::default() };
        Sampler {
            tier: Tier::detect(),
            random: SplitMix64(sampling.seed),
            sampling,
            generated: 0,
            end_ids: end_ids.to_vec(),
            seen,
            constraint,
        }
    }

    /// The next token: an index into `logits`, `[vocabulary]`. NaN logits are never chosen while another
    /// is left.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        self.next(logits, None).map_or_else(|_| greedy(logits), |sampled| sampled.token)
    }

    /// The next token, which counts as generated from then on; `logits` is `[vocabulary]`. With `logprobs`,
    /// its log-probability and that of so many of the likeliest ones.
    ///
    /// # Errors
    /// See [`NoToken`]; the sampler is as it was.
    pub fn next(&mut self, logits: &[f32], logprobs: Option<usize>) -> Result<Sampled, NoToken> {
        SCRATCH.with_borrow_mut(|scratch| {
            let token = self.choose(logits, scratch)?;
            self.accept(token);
            let (logprob, top) = match logprobs {
                Some(count) => {
                    let found = logprobs::of_token(
                        self.tier,
                        logits,
                        token,
                        count,
                        &mut scratch.candidates,
                    );
                    (Some(found.0), found.1)
                }
                None => (None, Vec::new()),
            };
            Ok(Sampled { token, logprob, top })
        })
    }

    /// Whether the constraint is at an end: no token may follow.
    pub fn is_complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(|constraint| constraint.is_complete())
    }

    /// Why the constraint can say no more, where it has failed.
    pub fn fault(&self) -> Option<String> {
        self.constraint.as_ref().and_then(|constraint| constraint.fault())
    }

    /// Takes `token` as generated without choosing it: for a sequence that begins with given output, and
    /// for beams.
    pub fn accept(&mut self, token: u32) {
        self.generated += 1;
        if self.sampling.has_penalties() {
            self.seen.add_output(token);
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token);
        }
    }

    /// Changes `logits`, `[vocabulary]`, as they are before a choice: bias, bar on end tokens, penalties,
    /// constraint. For beams, which are chosen among their logits together.
    pub fn prepare(&mut self, logits: &mut [f32]) {
        if self.changes_logits() {
            SCRATCH.with_borrow_mut(|scratch| self.change(logits, &mut scratch.mask));
        }
    }

    fn choose(&mut self, logits: &[f32], scratch: &mut Scratch) -> Result<u32, NoToken> {
        let Scratch { changed, mask, candidates } = scratch;
        let row = match self.changes_logits() {
            true => {
                changed.clear();
                changed.extend_from_slice(logits);
                self.change(changed, mask);
                changed
            }
            false => logits,
        };
        let best = logits::argmax(self.tier, row);
        let largest = row.get(best as usize).copied().unwrap_or(f32::NAN);
        if !largest.is_finite() {
            let raw = logits.get(greedy(logits) as usize);
            let barred = raw.is_some_and(|raw| raw.is_finite());
            return Err(if barred { NoToken::Barred } else { NoToken::NotFinite });
        }
        if self.sampling.temperature == 0.0 {
            return Ok(best);
        }
        candidates.weigh(self.tier, row, largest, self.sampling.temperature);
        Ok(candidates.draw(self.tier, &self.sampling, self.random.unit()))
    }

    fn bars_ends(&self) -> bool {
        self.generated < self.sampling.min_tokens && !self.end_ids.is_empty()
    }

    fn changes_logits(&self) -> bool {
        self.constraint.is_some()
            || self.bars_ends()
            || self.sampling.has_penalties()
            || !self.sampling.logit_bias.is_empty()
    }

    fn change(&mut self, logits: &mut [f32], mask: &mut TokenMask) {
        for (token, bias) in &self.sampling.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        if self.bars_ends() {
            for token in &self.end_ids {
                if let Some(logit) = logits.get_mut(*token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        self.seen.penalize(&self.sampling, logits);
        if let Some(constraint) = &mut self.constraint {
            mask.reset(logits.len());
            constraint.allow(mask);
            logits::mask(self.tier, logits, mask.words());
        }
    }
}

/// Index of the largest logit, the lowest on ties; NaN never wins.
pub fn greedy(logits: &[f32]) -> u32 {
    logits::argmax(Tier::detect(), logits)
}

/// Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (OOPSLA 2014).
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    /// Uniform in [0, 1) with 53 bits.
    pub(crate) fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests;
