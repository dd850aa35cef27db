//! Choosing the next token from logits.

/// How to choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 = greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep the most likely tokens whose probabilities sum to at least this (nucleus sampling,
    /// arXiv 1904.09751); 1 keeps all.
    pub top_p: f32,
    /// Keep this many most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Seed of the random numbers: same seed, same logits, same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }
}

impl Sampling {
    /// Checks ranges; the error names the field, the value and the mend.
    pub fn check(&self) -> Result<(), String> {
        if !(0.0..=100.0).contains(&self.temperature) {
            return Err(format!("temperature is {}: it must be from 0 to 100", self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(format!("top_p is {}: it must be above 0 and at most 1", self.top_p));
        }
        Ok(())
    }
}

/// The sampler's state: its random numbers and a buffer of candidates.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: SplitMix64,
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    /// A sampler at the start of its sequence of random numbers.
    pub fn new(sampling: Sampling) -> Sampler {
        Sampler { sampling, random: SplitMix64(sampling.seed), candidates: Vec::new() }
    }

    /// The next token: an index into `logits`. NaN logits are never chosen while another is left.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        if self.sampling.temperature == 0.0 {
            return greedy(logits);
        }
        self.rank(logits);
        let total = self.keep_nucleus();
        let mut left = self.random.unit() * total;
        for (weight, token) in &self.candidates {
            left -= f64::from(*weight);
            if left < 0.0 {
                return *token;
            }
        }
        self.candidates.last().map_or(0, |(_, token)| *token)
    }

    /// Fills `candidates` with (probability up to a factor, token), most likely first, ties by id.
    fn rank(&mut self, logits: &[f32]) {
        let tokens = 0..logits.len() as u32;
        let finite = logits.iter().copied().zip(tokens).filter(|(logit, _)| !logit.is_nan());
        self.candidates.clear();
        self.candidates.extend(finite);
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let top_k = self.sampling.top_k;
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, order);
            self.candidates.truncate(top_k);
        }
        self.candidates.sort_unstable_by(order);
        let best = self.candidates.first().map_or(0.0, |(logit, _)| *logit);
        for (logit, _) in &mut self.candidates {
            *logit = ((*logit - best) / self.sampling.temperature).exp();
        }
    }

    /// Cuts the candidates to the nucleus; returns the sum of what is left.
    fn keep_nucleus(&mut self) -> f64 {
        let total: f64 = self.candidates.iter().map(|(weight, _)| f64::from(*weight)).sum();
        let (mut kept, mut sum) = (0, 0.0);
        while kept < self.candidates.len()
            && (kept == 0 || sum < total * f64::from(self.sampling.top_p))
        {
            sum += f64::from(self.candidates[kept].0);
            kept += 1;
        }
        self.candidates.truncate(kept);
        sum
    }
}

/// Index of the largest logit, the lowest on ties; NaN never wins.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (logit, token) in logits.iter().zip(0..) {
        if *logit > best.0 {
            best = (*logit, token);
        }
    }
    best.1
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
mod tests {
    use super::*;

    fn counts(sampling: Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(sampling);
        let mut counts = vec![0; logits.len()];
        (0..draws).for_each(|_| counts[sampler.sample(logits) as usize] += 1);
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_never_nan() {
        assert_eq!(greedy(&[1.0, 3.0, f32::NAN, 3.0]), 1);
        assert_eq!(greedy(&[f32::NAN, -5.0]), 1);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let sampling = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        let counts = counts(sampling, &[0.0, 1f32.ln() + 2f32.ln(), 4f32.ln()], 70_000);
        for (count, expected) in counts.iter().zip([10_000, 20_000, 40_000]) {
            assert!(count.abs_diff(expected) < 600, "{counts:?}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [3.0, 2.0, 1.0, 0.0];
        let base = Sampling { temperature: 1.0, seed: 1, ..Sampling::default() };
        let by_k = counts(Sampling { top_k: 2, ..base }, &logits, 2000);
        assert!(by_k[0] > 0 && by_k[1] > 0 && by_k[2] == 0 && by_k[3] == 0);
        let by_p = counts(Sampling { top_p: 0.5, ..base }, &logits, 500);
        assert_eq!(by_p[0], 500, "the first token alone has 64 %");
    }

    #[test]
    fn same_seed_same_tokens() {
        let draw = |seed| {
            let mut s = Sampler::new(Sampling { temperature: 1.0, seed, ..Sampling::default() });
            (0..50).map(|_| s.sample(&[0.1, 0.2, 0.3, 0.4])).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }

    #[test]
    fn ranges_are_checked_by_name() {
        let bad = Sampling { top_p: 0.0, ..Sampling::default() };
        assert!(bad.check().unwrap_err().starts_with("top_p is 0"));
        let bad = Sampling { temperature: f32::NAN, ..Sampling::default() };
        assert!(bad.check().unwrap_err().starts_with("temperature is NaN"));
    }
}
