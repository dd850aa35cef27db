//! A plain forward pass in f64: no pages, no batches, no SIMD; the conventions of llama.cpp.

use super::tiny::{EPSILON, ROPE_BASE, SOFTCAP, Scaling, Tiny, TinyModel};

/// What a row of a full layer (layer, row, token) sees of a token: `None` if nothing, else by how many
/// tokens the row's query appears shifted back for it.
pub type Sight<'a> = dyn Fn(usize, usize, usize) -> Option<usize> + 'a;

/// Every row sees every token up to itself.
pub fn causal(_layer: usize, row: usize, token: usize) -> Option<usize> {
    (token <= row).then_some(0)
}

/// Logits of every token, `[tokens][vocabulary]`. K and V are rounded to f16, as pages hold them.
pub fn logits(model: &TinyModel, tokens: &[u32], sight: &Sight<'_>) -> Vec<Vec<f64>> {
    let tiny = &model.tiny;
    let scale = if tiny.is_gemma() { (tiny.width as f64).sqrt() } else { 1.0 };
    let table = model.tensor("token_embd.weight").unwrap();
    let embed = |token: &u32| {
        let row = &table[*token as usize * tiny.width..][..tiny.width];
        row.iter().map(|value| value * scale).collect::<Vec<f64>>()
    };
    let mut x: Vec<Vec<f64>> = tokens.iter().map(embed).collect();
    for layer in 0..tiny.layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let mut delta = attention(model, layer, &x, sight);
        add(&mut x, &mut delta, model, &name("post_attention_norm"));
        let mut delta: Vec<Vec<f64>> = x.iter().map(|x| feed_forward(model, layer, x)).collect();
        add(&mut x, &mut delta, model, &name("post_ffw_norm"));
    }
    x.iter().map(|x| head(model, x)).collect()
}

fn head(model: &TinyModel, x: &[f64]) -> Vec<f64> {
    let normed = norm(model, "output_norm", x);
    if model.tensor("output.weight").is_some() {
        return linear(model, "output", &normed, Scale::Product);
    }
    let cap = f64::from(SOFTCAP);
    let logits = linear(model, "token_embd", &normed, Scale::Product);
    logits.iter().map(|logit| cap * (logit / cap).tanh()).collect()
}

/// x += delta, normed first where the model has such a norm.
fn add(x: &mut [Vec<f64>], delta: &mut [Vec<f64>], model: &TinyModel, post_norm: &str) {
    for (x, delta) in x.iter_mut().zip(delta) {
        if model.tensor(&format!("{post_norm}.weight")).is_some() {
            *delta = norm(model, post_norm, delta);
        }
        x.iter_mut().zip(delta).for_each(|(x, delta)| *x += *delta);
    }
}

fn norm(model: &TinyModel, name: &str, x: &[f64]) -> Vec<f64> {
    let weight = model.tensor(&format!("{name}.weight")).unwrap();
    let mean_square = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean_square + f64::from(EPSILON)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * factor * w).collect()
}

/// Where a matrix's scale goes.
#[derive(Clone, Copy, PartialEq)]
enum Scale {
    Product,
    Sum,
    Ignored,
}

fn linear(model: &TinyModel, name: &str, x: &[f64], rule: Scale) -> Vec<f64> {
    let weight = model.tensor(&format!("{name}.weight")).unwrap();
    let bias = model.tensor(&format!("{name}.bias"));
    let scale = model.tensor(&format!("{name}.scale")).map_or(1.0, |scale| scale[0]);
    let rows = weight.chunks_exact(x.len()).enumerate();
    rows.map(|(row, weight)| {
        let product: f64 = weight.iter().zip(x).map(|(w, x)| w * x).sum();
        let bias = bias.map_or(0.0, |bias| bias[row]);
        match rule {
            Scale::Product => product * scale + bias,
            Scale::Sum => (product + bias) * scale,
            Scale::Ignored => product + bias,
        }
    })
    .collect()
}

fn feed_forward(model: &TinyModel, layer: usize, x: &[f64]) -> Vec<f64> {
    let tiny = &model.tiny;
    let rule = match tiny.architecture {
        "llama" | "qwen3" => Scale::Sum,
        _ => Scale::Ignored,
    };
    let name = |part: &str| format!("blk.{layer}.ffn_{part}");
    let x = norm(model, &name("norm"), x);
    let gate = linear(model, &name("gate"), &x, rule);
    let up = linear(model, &name("up"), &x, rule);
    let activate = |x: f64| match tiny.is_gemma() {
        true => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        false => x / (1.0 + (-x).exp()),
    };
    let gated: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| activate(*g) * u).collect();
    linear(model, &name("down"), &gated, rule)
}

fn attention(model: &TinyModel, layer: usize, x: &[Vec<f64>], sight: &Sight<'_>) -> Vec<Vec<f64>> {
    let tiny = &model.tiny;
    let (dim, group) = (tiny.head_dim, tiny.heads / tiny.kv_heads);
    let name = |part: &str| format!("blk.{layer}.attn_{part}");
    let rope = Rope::new(model, layer);
    let project = |part: &str, x: &[f64]| -> Vec<Vec<f64>> {
        let normed = norm(model, &name("norm"), x);
        let flat = linear(model, &name(part), &normed, Scale::Product);
        let head_norm = name(&format!("{part}_norm"));
        let heads = flat.chunks_exact(dim).map(|head| {
            match model.tensor(&format!("{head_norm}.weight")).is_some() {
                true => norm(model, &head_norm, head),
                false => head.to_vec(),
            }
        });
        heads.collect()
    };
    let queries: Vec<_> = x.iter().map(|x| project("q", x)).collect();
    let keys: Vec<Vec<Vec<f64>>> = x
        .iter()
        .enumerate()
        .map(|(at, x)| project("k", x).iter().map(|k| half(&rope.rotate(k, at))).collect())
        .collect();
    let values: Vec<Vec<Vec<f64>>> =
        x.iter().map(|x| project("v", x).iter().map(|v| half(v)).collect()).collect();
    let row = |row: usize| {
        let seen: Vec<(usize, usize)> = (0..=row)
            .filter_map(|token| match tiny.is_local(layer) {
                true => (token + tiny.window > row).then_some((token, 0)),
                false => sight(layer, row, token).map(|shift| (token, shift)),
            })
            .collect();
        let mut attended = Vec::with_capacity(tiny.heads * dim);
        for (head, query) in queries[row].iter().enumerate() {
            let score = |(token, shift): &(usize, usize)| {
                let query = rope.rotate(query, row - shift);
                dot(&query, &keys[*token][head / group]) / (dim as f64).sqrt()
            };
            let scores: Vec<f64> = seen.iter().map(score).collect();
            attended
                .extend(mix(&scores, seen.iter().map(|(token, _)| &values[*token][head / group])));
        }
        linear(model, &name("output"), &attended, Scale::Product)
    };
    (0..x.len()).map(row).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Softmax-weighted sum of `values`.
fn mix<'a>(scores: &[f64], values: impl Iterator<Item = &'a Vec<f64>>) -> Vec<f64> {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut out = Vec::new();
    for (weight, value) in weights.iter().zip(values) {
        out.resize(value.len(), 0.0);
        out.iter_mut().zip(value).for_each(|(out, value)| *out += weight / total * value);
    }
    out
}

/// Nearest IEEE halves, ties to even (the values here are far from overflow).
fn half(values: &[f64]) -> Vec<f64> {
    let round = |value: &f64| {
        let exponent = value.abs().log2().floor().max(-14.0);
        let quantum = (exponent - 10.0).exp2();
        if *value == 0.0 { 0.0 } else { (value / quantum).round_ties_even() * quantum }
    };
    values.iter().map(round).collect()
}

struct Rope {
    interleaved: bool,
    frequencies: Vec<f64>,
    magnitude: f64,
}

impl Rope {
    fn new(model: &TinyModel, layer: usize) -> Rope {
        let tiny = &model.tiny;
        let (dim, local) = (tiny.rope_dim as f64, tiny.is_local(layer));
        let base = if local { 10_000.0 } else { f64::from(ROPE_BASE) };
        let scaling = if local { Scaling::None } else { tiny.scaling };
        let factors = model.tensor("rope_freqs.weight");
        let frequency = |pair: usize| {
            let plain = base.powf(-(2.0 * pair as f64) / dim);
            match scaling {
                Scaling::None => plain,
                Scaling::Linear(factor) => plain / f64::from(factor),
                Scaling::Factors => plain / factors.unwrap()[pair],
                Scaling::Yarn(factor, context) => yarn(tiny, base, factor, context, pair),
            }
        };
        let magnitude = match scaling {
            Scaling::Yarn(factor, _) => 1.0 + 0.1 * f64::from(factor).ln(),
            _ => 1.0,
        };
        Rope {
            interleaved: tiny.architecture == "llama",
            frequencies: (0..tiny.rope_dim / 2).map(frequency).collect(),
            magnitude,
        }
    }

    fn rotate(&self, head: &[f64], position: usize) -> Vec<f64> {
        let mut out = head.to_vec();
        let pairs = self.frequencies.len();
        for (pair, frequency) in self.frequencies.iter().enumerate() {
            let (a, b) = match self.interleaved {
                true => (2 * pair, 2 * pair + 1),
                false => (pair, pair + pairs),
            };
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            out[a] = (head[a] * cos - head[b] * sin) * self.magnitude;
            out[b] = (head[a] * sin + head[b] * cos) * self.magnitude;
        }
        out
    }
}

/// YaRN (arXiv 2309.00071) as ggml has it, beta 32 and 1: a pair that turns more than 32 times in the
/// original context keeps its frequency, one that turns less than once is slowed by the factor.
fn yarn(tiny: &Tiny, base: f64, factor: f32, context: u32, pair: usize) -> f64 {
    let dim = tiny.rope_dim as f64;
    let plain = base.powf(-(2.0 * pair as f64) / dim);
    let pair_that_turns = |turns: f64| {
        dim * (f64::from(context) / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln())
    };
    let low = pair_that_turns(32.0).floor().max(0.0);
    let high = pair_that_turns(1.0).ceil().min(dim - 1.0);
    let slowed = ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
    plain * (1.0 - slowed) + plain / f64::from(factor) * slowed
}
