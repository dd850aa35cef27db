//! What requests look like: the moments and quantiles that a plan needs, of a mixture or a trace, in
//! constant memory.

use serde::Serialize;

/// Buckets of the histogram: 16 a power of two, to 2^40 tokens.
const BUCKETS: usize = 16 * 40;
/// More tokens than any request has.
pub const LENGTH_MAX: u64 = 1 << 40;

/// Why traffic cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TrafficError {
    /// A part of `--lengths` that cannot be.
    #[error(
        "--lengths {part}: {mend}; write IN:OUT or IN:OUT:WEIGHT, for example 1000:256:3,8000:500:1"
    )]
    Lengths {
        /// The part.
        part: String,
        /// What is wrong.
        mend: &'static str,
    },
    /// No requests.
    #[error("{0} holds no request")]
    Empty(String),
    /// A trace that cannot be read.
    #[error("--trace {path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// What the system said.
        reason: String,
    },
    /// A line that is no request.
    #[error(
        "--trace {path}, line {line}: {reason}; want Mooncake JSON lines (input_length, output_length) or \
         Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens)"
    )]
    Line {
        /// The file.
        path: String,
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong.
        reason: String,
    },
}

/// Sums over requests.
#[derive(Clone, Debug)]
pub struct Traffic {
    weight: f64,
    input: f64,
    input_squared: f64,
    output: f64,
    /// Sum of (input + output / 2) × output: tokens held over the steps a request runs.
    held_steps: f64,
    longest: u64,
    longest_input: u64,
    histogram: Vec<f64>,
    /// Requests a second, where the source has times.
    pub rate: Option<f64>,
}

/// What a plan needs of the traffic; lengths in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Requests, or the sum of weights.
    pub requests: f64,
    /// Mean prompt.
    pub input_mean: f64,
    /// 90 % of prompts are at most this long (within a sixteenth of a power of two).
    pub input_p90: f64,
    /// Square of the coefficient of variation of prompts.
    pub input_cv2: f64,
    /// Mean reply, at least 1.
    pub output_mean: f64,
    /// Tokens that a running sequence holds, averaged over its steps.
    pub held_mean: f64,
    /// Longest prompt and reply together.
    pub longest: u64,
    /// Requests a second in the source.
    pub rate: Option<f64>,
}

impl Default for Traffic {
    fn default() -> Traffic {
        Traffic {
            weight: 0.0,
            input: 0.0,
            input_squared: 0.0,
            output: 0.0,
            held_steps: 0.0,
            longest: 0,
            longest_input: 0,
            histogram: vec![0.0; BUCKETS],
            rate: None,
        }
    }
}

impl Traffic {
    /// Counts `weight` requests of `input` and `output` tokens (a request without a reply counts as one
    /// token: its prefill makes it).
    pub fn add(&mut self, input: u64, output: u64, weight: f64) {
        let (tokens, reply) = (input.max(1), output.max(1));
        let (i, o) = (tokens as f64, reply as f64);
        self.weight += weight;
        self.input += weight * i;
        self.input_squared += weight * i * i;
        self.output += weight * o;
        self.held_steps += weight * (i + o / 2.0) * o;
        self.longest = self.longest.max(tokens + reply);
        self.longest_input = self.longest_input.max(tokens);
        let bucket = (16.0 * i.log2()) as usize;
        self.histogram[bucket.min(BUCKETS - 1)] += weight;
    }

    /// A mixture written as `IN:OUT[:WEIGHT],…`.
    pub fn parse(text: &str) -> Result<Traffic, TrafficError> {
        let mut traffic = Traffic::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let wrong = |mend| TrafficError::Lengths { part: part.to_string(), mend };
            let fields: Vec<&str> = part.split(':').collect();
            let (input, output, weight) = match fields[..] {
                [input, output] => (input, output, "1"),
                [input, output, weight] => (input, output, weight),
                _ => return Err(wrong("it has not two or three numbers")),
            };
            let length = |text: &str| {
                let parsed = text.parse::<u64>().ok();
                parsed.filter(|tokens| (1..=LENGTH_MAX).contains(tokens))
            };
            let input = length(input).ok_or_else(|| wrong("IN is no length of 1 token or more"))?;
            let output =
                length(output).ok_or_else(|| wrong("OUT is no length of 1 token or more"))?;
            let weight =
                weight.parse::<f64>().ok().filter(|weight| *weight > 0.0 && *weight <= 1e12);
            traffic.add(input, output, weight.ok_or_else(|| wrong("WEIGHT is not above 0"))?);
        }
        match traffic.weight > 0.0 {
            true => Ok(traffic),
            false => Err(TrafficError::Empty("--lengths".into())),
        }
    }

    /// Whether it holds no request.
    pub fn is_empty(&self) -> bool {
        self.weight == 0.0
    }

    /// What a plan needs of it; call it on traffic that is not empty.
    pub fn summary(&self) -> Summary {
        let input_mean = self.input / self.weight;
        let variance = (self.input_squared / self.weight - input_mean * input_mean).max(0.0);
        Summary {
            requests: self.weight,
            input_mean,
            input_p90: self.input_quantile(0.9),
            input_cv2: variance / (input_mean * input_mean),
            output_mean: self.output / self.weight,
            held_mean: self.held_steps / self.output,
            longest: self.longest,
            rate: self.rate,
        }
    }

    /// The upper end of the bucket in which the quantile lies, or the longest prompt if that is shorter.
    fn input_quantile(&self, share: f64) -> f64 {
        let mut below = 0.0;
        for (bucket, weight) in self.histogram.iter().enumerate() {
            below += weight;
            if below >= share * self.weight {
                return 2_f64.powf((bucket + 1) as f64 / 16.0).min(self.longest_input as f64);
            }
        }
        self.longest_input as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixture_has_the_moments_of_its_parts() {
        let summary = Traffic::parse("1000:200:3, 5000:600:1").unwrap().summary();
        assert_eq!(summary.requests, 4.0);
        assert_eq!(summary.input_mean, 2000.0);
        assert_eq!(summary.output_mean, 300.0);
        // (3 x 1100 x 200 + 5300 x 600) / (3 x 200 + 600)
        assert_eq!(summary.held_mean, 3200.0);
        assert_eq!(summary.input_cv2, 0.75);
        assert_eq!(summary.longest, 5600);
        assert_eq!(summary.input_p90, 5000.0);
        let spread = (1..=1000).map(|input| format!("{input}:1")).collect::<Vec<_>>().join(",");
        let p90 = Traffic::parse(&spread).unwrap().summary().input_p90;
        assert!((900.0..=940.0).contains(&p90), "{p90}");
    }

    #[test]
    fn what_is_no_mixture_is_refused() {
        for wrong in
            ["", "1000", "1000:0", "0:5", "a:b", "1:2:3:4", "1:2:-1", "1:2:nan", "9999999999999:1"]
        {
            let error = Traffic::parse(wrong).unwrap_err().to_string();
            assert!(error.contains("--lengths"), "{wrong}: {error}");
        }
    }
}
