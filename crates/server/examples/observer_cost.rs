//! What metrics add to a token on the engine's thread: `cargo run --release -p reef-server --example observer_cost`.

use std::time::Instant;

use reef_engine::event::{Event, Token};
use reef_kv::ByFormat;
use reef_server::metrics::{Arrival, ModelMetrics, Served};

const STREAMS: usize = 64;
const STEPS: usize = 2_000;
const REPEATS: usize = 7;

fn main() {
    let served = Served {
        model_name: "model".into(),
        max_model_len: 8192,
        block_size: 32,
        f16_blocks: 1024,
        prefix_caching: true,
        tenants: vec![reef_engine::Tenant::default()],
    };
    let metrics = ModelMetrics::new(served);
    let arrival = Arrival {
        prompt_tokens: 100,
        tenant: 0,
        n: 1,
        max_tokens: None,
        looks_up_prefix: true,
        at: Instant::now(),
    };
    let step = Event::Step { step: 0, tokens: 0, used: ByFormat::default(), elapsed_us: None };
    let token = Event::Token(Token { branch: 0, id: 7, logprobs: None, is_last: false });
    let mut nanoseconds: Vec<f64> = (0..REPEATS)
        .map(|_| {
            let observe = |_| metrics.observe(arrival, Box::new(|_| {}));
            let mut observers: Vec<_> = (0..STREAMS).map(observe).collect();
            let start = Instant::now();
            for _ in 0..STEPS {
                for observer in &mut observers {
                    observer.hear(&step);
                    observer.hear(&token);
                }
            }
            start.elapsed().as_nanos() as f64 / (STREAMS * STEPS) as f64
        })
        .collect();
    nanoseconds.sort_by(f64::total_cmp);
    println!("{:.0} ns a token (median of {REPEATS})", nanoseconds[REPEATS / 2]);
}
