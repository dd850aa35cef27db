//! Tiny models with random weights, written as GGUF files in memory.

use std::collections::HashMap;

use reef_kernels::dispatch::Tier;
use reef_model::gguf::Gguf;
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};

use super::builder::{ARRAY, BOOL, Builder, F32, STRING, U32, array, string};
use super::random::Random;

/// Formats of a tiny model's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    F32,
    Q8_0,
    Q4_0,
    /// Each matrix in another of the three.
    Mixed,
}

/// Context extension of a tiny model, as its file says it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    None,
    Linear(f32),
    /// Factor and original context.
    Yarn(f32, u32),
    /// `rope_freqs.weight`, as in Llama 3.
    Factors,
}

/// Shape of a tiny model.
#[derive(Clone, Copy, Debug)]
pub struct Tiny {
    pub architecture: &'static str,
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rope_dim: usize,
    pub hidden: usize,
    pub vocabulary: usize,
    pub context: usize,
    pub weights: Weights,
    pub scaling: Scaling,
    /// Window of Gemma's local layers (all but every third).
    pub window: usize,
    /// Added to one channel of every layer's K and V by their biases; that of K is past the rope.
    pub outlier: f32,
    pub seed: u64,
}

/// Epsilon of the norms, in every file.
pub const EPSILON: f32 = 1e-5;
/// Base of the rope of full layers, in every file.
pub const ROPE_BASE: f32 = 50_000.0;
/// `c` of `c * tanh(logit / c)` in Gemma files.
pub const SOFTCAP: f32 = 4.0;
/// The channel of the first KV head that [`Tiny::outlier`] is added to.
pub const OUTLIER_CHANNEL: usize = 20;
/// Every how many layers one is full, in Gemma files.
pub const PERIOD: usize = 3;

impl Tiny {
    /// A small model of an architecture with odd enough a shape.
    pub fn new(architecture: &'static str) -> Tiny {
        Tiny {
            architecture,
            layers: 3,
            width: 64,
            heads: 6,
            kv_heads: 2,
            head_dim: if architecture == "qwen3" { 48 } else { 32 },
            rope_dim: if architecture == "llama" { 16 } else { 32 },
            hidden: 96,
            vocabulary: 101,
            context: 4096,
            weights: Weights::F32,
            scaling: Scaling::None,
            window: 40,
            outlier: 0.0,
            seed: 1,
        }
    }

    pub fn is_gemma(&self) -> bool {
        self.architecture == "gemma3"
    }

    fn norms_heads(&self) -> bool {
        self.is_gemma() || self.architecture == "qwen3"
    }

    /// Whether `layer` sees a window only.
    pub fn is_local(&self, layer: usize) -> bool {
        self.is_gemma() && layer % PERIOD != PERIOD - 1
    }

    /// The model.
    pub fn build(self) -> TinyModel {
        let mut writer = Writer {
            random: Random(self.seed),
            builder: Builder::new(),
            tensors: HashMap::new(),
            weights: self.weights,
            outlier: self.outlier,
        };
        writer.keys(&self);
        writer.matrix("token_embd.weight", self.vocabulary, self.width, 3.0);
        writer.vector("output_norm.weight", self.width);
        if self.architecture != "gemma3" {
            writer.matrix("output.weight", self.vocabulary, self.width, 1.5);
            writer.vector("output.bias", self.vocabulary);
        }
        if self.scaling == Scaling::Factors {
            writer.vector("rope_freqs.weight", self.rope_dim / 2);
        }
        (0..self.layers).for_each(|layer| writer.layer(&self, layer));
        TinyModel { tiny: self, tensors: writer.tensors, file: writer.builder.bytes() }
    }
}

/// A tiny model: its file, and the same numbers for the reference.
pub struct TinyModel {
    pub tiny: Tiny,
    tensors: HashMap<String, Vec<f64>>,
    file: Vec<u8>,
}

impl TinyModel {
    /// Numbers of a tensor, row by row.
    pub fn tensor(&self, name: &str) -> Option<&[f64]> {
        self.tensors.get(name).map(Vec::as_slice)
    }

    /// The model's file.
    pub fn gguf(&self) -> Gguf {
        Gguf::from_bytes(self.file.clone()).unwrap()
    }

    /// The model, loaded.
    pub fn runner(&self, options: RunnerOptions) -> ModelRunner {
        ModelRunner::load(&self.gguf(), options).unwrap()
    }

    /// The model, loaded as users do but with one thread.
    pub fn plain_runner(&self) -> ModelRunner {
        self.runner(options(Activations::Int8))
    }
}

/// One thread, the best tier, blocks of 32.
pub fn options(activations: Activations) -> RunnerOptions {
    RunnerOptions {
        threads: 1,
        tier: Tier::detect(),
        activations,
        block_size: 32,
        key_rotation: KeyRotation::None,
    }
}

/// The text of token `id` of every tiny model.
pub fn token_text(id: usize) -> String {
    format!("token {id}")
}

struct Writer {
    random: Random,
    builder: Builder,
    tensors: HashMap<String, Vec<f64>>,
    weights: Weights,
    outlier: f32,
}

impl Writer {
    fn key(&mut self, name: &str, value_type: u32, value: impl AsRef<[u8]>) {
        self.builder =
            std::mem::replace(&mut self.builder, Builder::new()).key(name, value_type, value);
    }

    fn keys(&mut self, tiny: &Tiny) {
        let prefix = tiny.architecture;
        self.key("general.architecture", STRING, string(prefix));
        for (name, value) in [
            ("block_count", tiny.layers),
            ("embedding_length", tiny.width),
            ("attention.head_count", tiny.heads),
            ("attention.head_count_kv", tiny.kv_heads),
            ("attention.key_length", tiny.head_dim),
            ("attention.value_length", tiny.head_dim),
            ("rope.dimension_count", tiny.rope_dim),
            ("feed_forward_length", tiny.hidden),
            ("context_length", tiny.context),
            // Present in every file; only Gemma is to use it.
            ("attention.sliding_window", tiny.window),
        ] {
            self.key(&format!("{prefix}.{name}"), U32, (value as u32).to_le_bytes());
        }
        for (name, value) in [
            ("attention.layer_norm_rms_epsilon", EPSILON),
            ("rope.freq_base", ROPE_BASE),
            ("final_logit_softcapping", SOFTCAP),
        ] {
            self.key(&format!("{prefix}.{name}"), F32, value.to_le_bytes());
        }
        let local: Vec<u8> = (0..tiny.layers).map(|l| u8::from(tiny.is_local(l))).collect();
        let flags = array(BOOL, tiny.layers as u64, &local);
        self.key(&format!("{prefix}.attention.sliding_window_pattern"), ARRAY, flags);
        let (kind, factor) = match tiny.scaling {
            Scaling::Linear(factor) => ("linear", factor),
            Scaling::Yarn(factor, context) => {
                let name = format!("{prefix}.rope.scaling.original_context_length");
                self.key(&name, U32, context.to_le_bytes());
                ("yarn", factor)
            }
            // A factor of 0 means none.
            Scaling::None | Scaling::Factors => ("linear", 0.0),
        };
        self.key(&format!("{prefix}.rope.scaling.type"), STRING, string(kind));
        self.key(&format!("{prefix}.rope.scaling.factor"), F32, factor.to_le_bytes());
        let texts: Vec<u8> = (0..tiny.vocabulary).flat_map(|id| string(token_text(id))).collect();
        self.key("tokenizer.ggml.tokens", ARRAY, array(STRING, tiny.vocabulary as u64, &texts));
    }

    fn layer(&mut self, tiny: &Tiny, layer: usize) {
        let (q, kv) = (tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim);
        for (name, rows, columns, gain) in [
            ("attn_q", q, tiny.width, 1.0),
            ("attn_k", kv, tiny.width, 1.0),
            ("attn_v", kv, tiny.width, 1.0),
            ("attn_output", tiny.width, q, 1.0),
            ("ffn_gate", tiny.hidden, tiny.width, 1.0),
            ("ffn_up", tiny.hidden, tiny.width, 1.0),
            ("ffn_down", tiny.width, tiny.hidden, 1.0),
        ] {
            let name = format!("blk.{layer}.{name}");
            self.matrix(&format!("{name}.weight"), rows, columns, gain);
            self.vector(&format!("{name}.bias"), rows);
            self.vector(&format!("{name}.scale"), 1);
        }
        let mut norms = vec![("attn_norm", tiny.width), ("ffn_norm", tiny.width)];
        if tiny.norms_heads() {
            norms.extend([("attn_q_norm", tiny.head_dim), ("attn_k_norm", tiny.head_dim)]);
        }
        if tiny.is_gemma() {
            norms.extend([("post_attention_norm", tiny.width), ("post_ffw_norm", tiny.width)]);
        }
        for (name, len) in norms {
            self.vector(&format!("blk.{layer}.{name}.weight"), len);
        }
    }

    /// Numbers around 1 (norms, factors, scales) or around 0 (biases), as F32.
    fn vector(&mut self, name: &str, len: usize) {
        let (center, spread) = if name.ends_with("bias") { (0.0, 0.2) } else { (1.0, 0.3) };
        let random = &mut self.random;
        let mut values: Vec<f32> =
            (0..len).map(|_| (center + spread * random.symmetric()) as f32).collect();
        if name.ends_with("attn_k.bias") || name.ends_with("attn_v.bias") {
            values[OUTLIER_CHANNEL] += self.outlier;
        }
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, &[len as u64], 0, bytes, values.iter().map(|v| f64::from(*v)).collect());
    }

    /// A matrix whose products have about `gain` times the size of the input.
    fn matrix(&mut self, name: &str, rows: usize, columns: usize, gain: f64) {
        let weights = match self.weights {
            Weights::Mixed => [Weights::F32, Weights::Q8_0, Weights::Q4_0][self.random.below(3)],
            weights => weights,
        };
        let spread = gain * (3.0 / columns as f64).sqrt();
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for _ in 0..rows * columns / 32 {
            match weights {
                Weights::Q8_0 => self.block(8, spread, &mut bytes, &mut values),
                Weights::Q4_0 => self.block(4, spread, &mut bytes, &mut values),
                _ => {
                    let block = [(); 32].map(|()| (spread * self.random.symmetric()) as f32);
                    bytes.extend(block.iter().flat_map(|v| v.to_le_bytes()));
                    values.extend(block.map(f64::from));
                }
            }
        }
        let type_id = match weights {
            Weights::Q8_0 => 8,
            Weights::Q4_0 => 2,
            _ => 0,
        };
        self.tensor(name, &[columns as u64, rows as u64], type_id, bytes, values);
    }

    /// 32 numbers of `bits` bits with one f16 scale (Q4_0 or Q8_0), at most about `spread`.
    fn block(&mut self, bits: u32, spread: f64, bytes: &mut Vec<u8>, values: &mut Vec<f64>) {
        let limit = 1i64 << (bits - 1);
        // An f16 below the scale wanted: 2^exponent * (1 + mantissa / 1024).
        let exponent = (spread / limit as f64).log2().floor() as i64;
        let mantissa = self.random.below(1024) as i64;
        let scale = 2f64.powi(exponent as i32) * (1.0 + mantissa as f64 / 1024.0);
        bytes.extend(((((exponent + 15) << 10) | mantissa) as u16).to_le_bytes());
        let codes = [(); 32].map(|()| self.random.below(2 * limit as usize) as i64 - limit);
        match bits {
            8 => bytes.extend(codes.map(|code| code as i8 as u8)),
            _ => bytes.extend((0..16).map(|i| ((codes[i] + 8) | ((codes[i + 16] + 8) << 4)) as u8)),
        }
        values.extend(codes.map(|code| code as f64 * scale));
    }

    fn tensor(&mut self, name: &str, dims: &[u64], type_id: u32, bytes: Vec<u8>, values: Vec<f64>) {
        let mut builder = std::mem::replace(&mut self.builder, Builder::new());
        builder.data.resize(builder.data.len().next_multiple_of(32), 0);
        builder = {
            let offset = builder.data.len() as u64;
            builder.tensor(name, dims, type_id, offset)
        };
        builder.data.extend(bytes);
        self.builder = builder;
        self.tensors.insert(name.to_string(), values);
    }
}
