//! Tokens that prompt and output hold, for penalties.

use std::collections::HashMap;

use super::Sampling;

/// The distinct tokens of a sequence, with how often each was generated (0: only the prompt holds it).
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    outputs: HashMap<u32, u32>,
}

impl Seen {
    pub fn of_prompt(prompt: &[u32]) -> Seen {
        Seen { outputs: prompt.iter().map(|token| (*token, 0)).collect() }
    }

    pub fn add_output(&mut self, token: u32) {
        *self.outputs.entry(token).or_default() += 1;
    }

    /// As vLLM's `apply_penalties`: repetition first, over prompt and output; then frequency and presence,
    /// over the output. Every token is changed alone, so their order does not matter.
    pub fn penalize(&self, sampling: &Sampling, logits: &mut [f32]) {
        for (token, outputs) in &self.outputs {
            let Some(logit) = logits.get_mut(*token as usize) else { continue };
            let factor = sampling.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
            *logit -= sampling.frequency_penalty * *outputs as f32;
            if *outputs > 0 {
                *logit -= sampling.presence_penalty;
            }
        }
    }
}
