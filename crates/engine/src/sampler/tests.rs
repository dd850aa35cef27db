use super::*;

fn counts(sampling: &Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(sampling.clone());
    let mut counts = vec![0; logits.len()];
    (0..draws).for_each(|_| counts[sampler.sample(logits) as usize] += 1);
    counts
}

fn row(random: &mut SplitMix64, count: usize) -> Vec<f32> {
    (0..count).map(|_| (random.unit() * 12.0 - 6.0) as f32).collect()
}

#[test]
fn greedy_takes_the_first_of_equals_and_never_nan() {
    assert_eq!(greedy(&[1.0, 3.0, f32::NAN, 3.0]), 1);
    assert_eq!(greedy(&[f32::NAN, -5.0]), 1);
}

#[test]
fn frequencies_follow_the_probabilities() {
    let sampling = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
    for top_k in [0, 3] {
        let sampling = Sampling { top_k, ..sampling.clone() };
        let logits = [0.0, 1f32.ln() + 2f32.ln(), f32::NAN, 4f32.ln()];
        let counts = counts(&sampling, &logits, 70_000);
        for (count, expected) in counts.iter().zip([10_000, 20_000, 0, 40_000]) {
            assert!(count.abs_diff(expected) < 600, "{counts:?}");
        }
    }
}

#[test]
fn top_k_top_p_and_min_p_cut_the_tail() {
    let logits = [3.0, 2.0, 1.0, 0.0];
    let base = Sampling { temperature: 1.0, seed: 1, ..Sampling::default() };
    let by_k = counts(&Sampling { top_k: 2, ..base.clone() }, &logits, 2000);
    assert!(by_k[0] > 0 && by_k[1] > 0 && by_k[2] == 0 && by_k[3] == 0);
    let by_p = counts(&Sampling { top_p: 0.5, ..base.clone() }, &logits, 500);
    assert_eq!(by_p[0], 500, "the first token alone has 64 %");
    // e^-1 is 0.37 of the likeliest, e^-2 is 0.14.
    let by_min_p = counts(&Sampling { min_p: 0.3, ..base }, &logits, 2000);
    assert!(by_min_p[1] > 0 && by_min_p[2] == 0 && by_min_p[3] == 0);
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
    let plain = Sampling::default();
    assert_eq!(plain.check(), Ok(()));
    let wrong = [
        (Sampling { top_p: 0.0, ..plain.clone() }, "top_p is 0"),
        (Sampling { temperature: f32::NAN, ..plain.clone() }, "temperature is NaN"),
        (Sampling { min_p: 1.5, ..plain.clone() }, "min_p is 1.5"),
        (Sampling { repetition_penalty: 0.0, ..plain.clone() }, "repetition_penalty is 0"),
        (Sampling { presence_penalty: 3.0, ..plain.clone() }, "presence_penalty is 3"),
        (Sampling { frequency_penalty: f32::NAN, ..plain.clone() }, "frequency_penalty is NaN"),
        (Sampling { logit_bias: vec![(7, 101.0)], ..plain }, "logit_bias of token 7 is 101"),
    ];
    for (sampling, begins) in wrong {
        let line = sampling.check().unwrap_err();
        assert!(line.starts_with(begins), "{line}");
    }
}

/// vLLM's `apply_penalties` over dense counts.
fn penalized(sampling: &Sampling, prompt: &[u32], output: &[u32], logits: &[f32]) -> Vec<f32> {
    let count = |tokens: &[u32], id: usize| tokens.iter().filter(|t| **t as usize == id).count();
    let of = |(id, logit): (usize, &f32)| {
        let mut logit = *logit;
        let bias: f32 =
            sampling.logit_bias.iter().filter(|(t, _)| *t as usize == id).map(|(_, b)| b).sum();
        logit += bias;
        if count(prompt, id) + count(output, id) > 0 {
            let factor = sampling.repetition_penalty;
            logit = if logit > 0.0 { logit / factor } else { logit * factor };
        }
        logit -= sampling.frequency_penalty * count(output, id) as f32;
        let present = f32::from(u8::from(count(output, id) > 0));
        logit - sampling.presence_penalty * present
    };
    logits.iter().enumerate().map(of).collect()
}

#[test]
fn penalties_and_bias_are_those_of_vllm() {
    let mut random = SplitMix64(11);
    for round in 0..200 {
        let sampling = Sampling {
            repetition_penalty: [1.0, 1.3, 0.8][round % 3],
            presence_penalty: [0.0, 1.5, -0.5][round / 3 % 3],
            frequency_penalty: [0.0, 0.4, -0.2][round / 9 % 3],
            logit_bias: if round % 2 == 0 {
                vec![]
            } else {
                vec![(3, 4.0), (900, 1.0), (5, -100.0)]
            },
            ..Sampling::default()
        };
        let prompt: Vec<u32> = (0..10).map(|_| (random.unit() * 20.0) as u32).collect();
        let mut sampler = Sampler::begin(sampling.clone(), &prompt, &[], None);
        let mut output = Vec::new();
        for _ in 0..12 {
            let logits = row(&mut random, 20);
            let expected = greedy(&penalized(&sampling, &prompt, &output, &logits));
            assert_eq!(sampler.sample(&logits), expected, "{sampling:?}");
            output.push(expected);
        }
    }
}

#[test]
fn min_tokens_bar_the_end_tokens_until_then() {
    let sampling = Sampling { min_tokens: 3, ..Sampling::default() };
    let mut sampler = Sampler::begin(sampling, &[], &[1, 2, 77], None);
    let logits = [0.0, 9.0, 8.0, 1.0];
    let tokens: Vec<u32> = (0..5).map(|_| sampler.sample(&logits)).collect();
    assert_eq!(tokens, [3, 3, 3, 1, 1]);
}

#[test]
fn log_probabilities_are_those_of_the_unchanged_logits() {
    let mut random = SplitMix64(3);
    for round in 0..50 {
        let logits = row(&mut random, [10, 300, 5000][round % 3]);
        let temperature = [0.0, 1.7][round % 2];
        let sampling = Sampling {
            temperature,
            seed: round as u64,
            logit_bias: vec![(4, 3.0)],
            repetition_penalty: 1.2,
            ..Sampling::default()
        };
        let mut sampler = Sampler::begin(sampling, &[1, 2, 3], &[], None);
        let sampled = sampler.next(&logits, Some(7)).unwrap();
        let exact: Vec<f64> = {
            let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            logits.iter().map(|logit| f64::from(*logit) - sum.ln()).collect()
        };
        let close =
            |token: u32, found: f32| (f64::from(found) - exact[token as usize]).abs() < 2e-6;
        assert!(close(sampled.token, sampled.logprob.unwrap()));
        assert_eq!(sampled.top.len(), 7);
        assert!(sampled.top.iter().all(|(token, found)| close(*token, *found)));
        assert!(sampled.top.is_sorted_by(|a, b| a.1 >= b.1));
        assert_eq!(sampled.top[0].0, greedy(&logits));
        // One number per token, or clients that compare the two see a token that is not the likeliest.
        for (token, found) in &sampled.top {
            assert_eq!(token_logprobs(&logits, *token, 0), (*found, vec![]));
        }
    }
}

#[test]
fn log_probabilities_of_strange_rows_are_told() {
    let (logprob, top) = token_logprobs(&[0.0, f32::NEG_INFINITY, f32::NAN], 9, 5);
    assert_eq!((logprob, top), (f32::NEG_INFINITY, vec![(0, 0.0)]));
    assert!(token_logprobs(&[f32::NAN; 3], 0, 5).0.is_nan());
    assert!(token_logprobs(&[], 0, 5).0.is_nan());
}

#[test]
fn what_cannot_be_chosen_is_an_error_and_changes_nothing() {
    let sampling = Sampling { temperature: 1.0, seed: 5, ..Sampling::default() };
    let mut sampler = Sampler::new(sampling.clone());
    for bad in [&[f32::NAN, f32::NEG_INFINITY][..], &[], &[1.0, f32::INFINITY]] {
        assert_eq!(sampler.next(bad, None), Err(NoToken::NotFinite));
    }
    let mut fresh = Sampler::new(sampling);
    let logits = [0.1, 0.2, 0.3];
    assert!((0..20).all(|_| sampler.sample(&logits) == fresh.sample(&logits)));
}

/// `(`, `)`, a letter and an end (tokens 0 to 3): parentheses match, at most `deepest` open at once.
#[derive(Clone, Debug)]
struct Parentheses {
    open: usize,
    deepest: usize,
    ended: bool,
}

impl Constraint for Parentheses {
    fn allow(&mut self, mask: &mut TokenMask) {
        if self.ended {
            return;
        }
        if self.open < self.deepest {
            mask.insert(0);
        }
        mask.insert(2);
        mask.insert(if self.open > 0 { 1 } else { 3 });
    }

    fn accept(&mut self, token: u32) {
        match token {
            0 => self.open += 1,
            1 => self.open -= 1,
            _ => self.ended = token == 3,
        }
    }

    fn is_complete(&self) -> bool {
        self.ended
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

fn constrained(seed: u64) -> Sampler {
    let sampling = Sampling { temperature: 1.5, seed, ..Sampling::default() };
    let grammar = Parentheses { open: 0, deepest: 3, ended: false };
    Sampler::begin(sampling, &[], &[3], Some(Box::new(grammar)))
}

/// What `sampler` writes until its end, over logits that depend on the place.
fn written(sampler: &mut Sampler, from: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    while !sampler.is_complete() {
        let place = (from + tokens.len()) as f32;
        // Tokens 4 to 6, which no grammar has, are by far the likeliest.
        let logits = [(place * 0.7).sin(), 0.3, (place * 1.3).cos(), -1.0, 9.0, 9.0, 9.0];
        tokens.push(sampler.next(&logits, None).unwrap().token);
    }
    tokens
}

#[test]
fn a_constraint_is_kept_to_and_ends_the_text() {
    let mut deepest = 0;
    for seed in 0..200 {
        let mut sampler = constrained(seed);
        let tokens = written(&mut sampler, 0);
        let mut open = 0_i32;
        for token in &tokens {
            open += match token {
                0 => 1,
                1 => -1,
                _ => 0,
            };
            deepest = deepest.max(open);
            assert!((0..=3).contains(&open) && *token <= 3, "{tokens:?}");
        }
        assert_eq!((open, tokens.last()), (0, Some(&3)));
        assert_eq!(sampler.next(&[1.0; 7], None), Err(NoToken::Barred));
    }
    assert_eq!(deepest, 3);
}

#[test]
fn a_clone_goes_on_exactly() {
    let mut differ = 0;
    for seed in 0..50 {
        let whole = written(&mut constrained(seed), 0);
        let mut sampler = constrained(seed);
        let half = whole.len() / 2;
        for (place, expected) in whole[..half].iter().enumerate() {
            let place = place as f32;
            let logits = [(place * 0.7).sin(), 0.3, (place * 1.3).cos(), -1.0, 9.0, 9.0, 9.0];
            assert_eq!(sampler.next(&logits, None).unwrap().token, *expected);
        }
        let mut clone = sampler.clone();
        assert_eq!(written(&mut sampler, half), whole[half..]);
        // The original's progress is not the clone's.
        assert_eq!(written(&mut clone, half), whole[half..]);
        differ += usize::from(whole != written(&mut constrained(seed + 1000), 0));
    }
    assert!(differ > 25);
}

#[test]
fn a_token_takes_one_random_number_at_most() {
    let mut sampler = Sampler::new(Sampling { temperature: 0.9, seed: 8, ..Sampling::default() });
    let mut random = SplitMix64(8);
    for _ in 0..20 {
        sampler.sample(&[0.5, 0.6, 0.7]);
        random.unit();
        assert_eq!(sampler.random.0, random.0);
    }
    let mut greedy = Sampler::new(Sampling { seed: 8, ..Sampling::default() });
    greedy.sample(&[0.5, 0.6, 0.7]);
    assert_eq!(greedy.random.0, 8);
}
