//! Upper bounds of histogram buckets: vLLM's, so that dashboards made for it and quantiles over several
//! servers fit.

/// Seconds from arrival to the first token.
pub const FIRST_TOKEN_SECONDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];

/// Seconds between tokens.
pub const INTER_TOKEN_SECONDS: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];

/// Seconds of a request and of its phases.
pub const REQUEST_SECONDS: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// The request parameter `n`.
pub const CHOICES: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];

/// Times a request left the pool.
pub const PREEMPTIONS: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];

/// Tokens of a request: 1, 2, 5, 10, 20, ... up to `most`.
pub fn tokens(most: usize) -> Vec<f64> {
    let decades = (0..).map(|exponent| 10f64.powi(exponent));
    let series = decades.flat_map(|decade| [1.0, 2.0, 5.0].map(|mantissa| mantissa * decade));
    series.take_while(|bound| *bound <= most.max(1) as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_end_at_the_models_length() {
        assert_eq!(tokens(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(tokens(8192).last(), Some(&5000.0));
        assert_eq!(tokens(0), [1.0]);
    }
}
