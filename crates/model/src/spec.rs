//! What a model is, read from its file's metadata: shapes, KV groups, rope, bytes per token.

use crate::gguf::Gguf;
use crate::rope::{RopeScaling, RopeSpec};
use crate::runner::LoadError;
use reef_kernels::ops::RopeStyle;
use reef_kv::page::{PageFormat, PageShape};

/// Architectures that Reef runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama, SmolLM2, Mistral.
    Llama,
    /// Qwen 2 and 2.5, dense.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
    /// Gemma 3 text models.
    Gemma3,
}

impl Architecture {
    /// Every architecture with its name in `general.architecture`.
    pub const ALL: [(&'static str, Architecture); 4] = [
        ("llama", Architecture::Llama),
        ("qwen2", Architecture::Qwen2),
        ("qwen3", Architecture::Qwen3),
        ("gemma3", Architecture::Gemma3),
    ];

    fn from_name(name: &str) -> Result<Architecture, LoadError> {
        let found = Architecture::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, architecture)| *architecture).ok_or_else(|| {
            let known: Vec<&str> = Architecture::ALL.iter().map(|(known, _)| *known).collect();
            LoadError::Unsupported {
                field: "general.architecture".into(),
                value: name.into(),
                mend: format!("Reef runs {}", known.join(", ")),
            }
        })
    }
}

/// Layers that cache alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// Indices of the model's layers, ascending.
    pub layers: Vec<usize>,
    /// Sliding window in tokens: a query at position p attends positions > p - window. `None` = full.
    pub window: Option<usize>,
}

/// Shapes and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Architecture.
    pub architecture: Architecture,
    /// Number of transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Width of the feed-forward hidden layer.
    pub hidden: usize,
    /// Vocabulary size.
    pub vocabulary: usize,
    /// Context length the model was trained for, in tokens.
    pub trained_context: usize,
    /// Epsilon of RMS norms.
    pub norm_epsilon: f32,
    /// Multiplier of attention scores.
    pub attention_scale: f32,
    /// Multiplier of embeddings.
    pub embedding_scale: f32,
    /// `c` in `c * tanh(logit / c)`, if any.
    pub logit_softcap: Option<f32>,
    /// KV groups; every layer is in exactly one.
    pub groups: Vec<GroupSpec>,
    /// Rope of each KV group.
    pub ropes: Vec<RopeSpec>,
}

/// Limits that keep a hostile header from asking for absurd shapes.
const LIMIT_LAYERS: usize = 1024;
const LIMIT_DIM: usize = 1 << 20;

impl ModelSpec {
    /// Reads the shapes of a model. Needs no tensors but those whose shape decides one
    /// (`token_embd.weight`, `rope_freqs.weight`).
    pub fn from_gguf(gguf: &Gguf) -> Result<ModelSpec, LoadError> {
        let header = Header::new(gguf)?;
        let layers = header.count("block_count", LIMIT_LAYERS)?;
        let width = header.count("embedding_length", LIMIT_DIM)?;
        let heads = header.count("attention.head_count", LIMIT_DIM)?;
        let kv_heads = header.count_or("attention.head_count_kv", LIMIT_DIM, heads)?;
        let head_dim = header.count_or("attention.key_length", LIMIT_DIM, width / heads)?;
        let value_dim = header.count_or("attention.value_length", LIMIT_DIM, head_dim)?;
        if value_dim != head_dim {
            return Err(header.unsupported(
                "attention.value_length",
                value_dim,
                "equal to the key length",
            ));
        }
        if heads % kv_heads != 0 {
            return Err(header.unsupported(
                "attention.head_count_kv",
                kv_heads,
                "a divisor of head_count",
            ));
        }
        if head_dim % 16 != 0 {
            return Err(header.unsupported("attention.key_length", head_dim, "a multiple of 16"));
        }
        if header.has("expert_count") && gguf.u32(&header.key("expert_count"))? > 0 {
            let experts = gguf.u32(&header.key("expert_count"))?;
            return Err(header.unsupported(
                "expert_count",
                experts,
                "0: mixtures of experts do not run yet",
            ));
        }
        let trained_context = header.count("context_length", u32::MAX as usize)?;
        let groups = header.groups(layers)?;
        let ropes = groups
            .iter()
            .map(|group| header.rope(group.window.is_some(), head_dim, trained_context))
            .collect::<Result<_, _>>()?;
        let architecture = header.architecture;
        let gemma = architecture == Architecture::Gemma3;
        Ok(ModelSpec {
            architecture,
            layers,
            width,
            heads,
            kv_heads,
            head_dim,
            hidden: header.count("feed_forward_length", LIMIT_DIM)?,
            vocabulary: header.vocabulary()?,
            trained_context,
            norm_epsilon: header.positive("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5),
            attention_scale: header.attention_scale(layers, width, heads, head_dim)?,
            embedding_scale: if gemma { (width as f32).sqrt() } else { 1.0 },
            logit_softcap: if gemma { header.float("final_logit_softcapping")? } else { None },
            groups,
            ropes,
        })
    }

    /// Shape of the pages of every KV group, for blocks of `block_size` tokens.
    pub fn page_shape(&self, block_size: usize) -> PageShape {
        PageShape { kv_heads: self.kv_heads, head_dim: self.head_dim, block_size }
    }

    /// Bytes of KV memory a token takes in `format` while no window has been left: all layers,
    /// scales included.
    pub fn bytes_per_token(&self, format: PageFormat, block_size: usize) -> f64 {
        let page = self.page_shape(block_size).page_bytes(format);
        (self.layers * page) as f64 / block_size as f64
    }

    /// The KV group of layer `layer` and the layer's index in it.
    pub fn group_of(&self, layer: usize) -> (usize, usize) {
        let position = |group: &GroupSpec| group.layers.iter().position(|l| *l == layer);
        let found = self.groups.iter().enumerate().find_map(|(g, s)| Some((g, position(s)?)));
        found.expect("every layer is in a group")
    }
}

/// Typed access to the keys of one architecture.
struct Header<'a> {
    gguf: &'a Gguf,
    architecture: Architecture,
    prefix: &'static str,
}

impl<'a> Header<'a> {
    fn new(gguf: &'a Gguf) -> Result<Header<'a>, LoadError> {
        let architecture = Architecture::from_name(gguf.architecture()?)?;
        let named = Architecture::ALL.iter().find(|(_, a)| *a == architecture);
        Ok(Header { gguf, architecture, prefix: named.map_or("", |(name, _)| name) })
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn unsupported(&self, name: &str, value: impl ToString, mend: &str) -> LoadError {
        let mend = format!("it must be {mend}");
        LoadError::Unsupported { field: self.key(name), value: value.to_string(), mend }
    }

    fn has(&self, name: &str) -> bool {
        self.gguf.get(&self.key(name)).is_some()
    }

    /// A whole number in `1..=limit`.
    fn count(&self, name: &str, limit: usize) -> Result<usize, LoadError> {
        let value = self.gguf.u32(&self.key(name))? as usize;
        if (1..=limit).contains(&value) {
            return Ok(value);
        }
        Err(self.unsupported(name, value, &format!("between 1 and {limit}")))
    }

    fn count_or(&self, name: &str, limit: usize, default: usize) -> Result<usize, LoadError> {
        if self.has(name) { self.count(name, limit) } else { Ok(default) }
    }

    /// A float; 0 counts as absent, as llama.cpp writes 0 for "not used".
    fn float(&self, name: &str) -> Result<Option<f32>, LoadError> {
        if !self.has(name) {
            return Ok(None);
        }
        let value = self.gguf.f32(&self.key(name))?;
        if value.is_finite() {
            return Ok((value != 0.0).then_some(value));
        }
        Err(self.unsupported(name, value, "finite"))
    }

    /// A [`float`](Self::float) above 0.
    fn positive(&self, name: &str) -> Result<Option<f32>, LoadError> {
        match self.float(name)? {
            Some(value) if value < 0.0 => Err(self.unsupported(name, value, "positive")),
            value => Ok(value),
        }
    }

    fn vocabulary(&self) -> Result<usize, LoadError> {
        let name = "token_embd.weight";
        let tensor = self.gguf.tensor(name)?;
        match tensor.dims.get(1) {
            Some(&rows) => Ok(rows),
            None => Err(LoadError::Unsupported {
                field: format!("tensor {name}"),
                value: format!("of shape {:?}", tensor.dims),
                mend: "it must be a matrix, convert the model again".into(),
            }),
        }
    }

    /// Gemma 3's larger models scale by the width per head (the 27B), all others by the head dimension.
    fn attention_scale(
        &self,
        layers: usize,
        width: usize,
        heads: usize,
        head_dim: usize,
    ) -> Result<f32, LoadError> {
        let gemma_27b = self.architecture == Architecture::Gemma3 && layers == 62;
        let divisor = if gemma_27b { width / heads } else { head_dim };
        Ok(1.0 / (divisor as f32).sqrt())
    }

    /// One full group, or (Gemma 3) window layers and full layers. The pattern is a period (every n-th
    /// layer full; 6 where the file has none) or a flag per layer (1 = window).
    fn groups(&self, layers: usize) -> Result<Vec<GroupSpec>, LoadError> {
        let full = GroupSpec { layers: (0..layers).collect(), window: None };
        if self.architecture != Architecture::Gemma3 || !self.has("attention.sliding_window") {
            return Ok(vec![full]);
        }
        let window = self.count("attention.sliding_window", u32::MAX as usize)?;
        let windowed = self.window_layers(layers)?;
        let pick = |want: bool| (0..layers).filter(|l| windowed[*l] == want).collect::<Vec<_>>();
        let groups = [
            GroupSpec { layers: pick(false), window: None },
            GroupSpec { layers: pick(true), window: Some(window) },
        ];
        Ok(groups.into_iter().filter(|group| !group.layers.is_empty()).collect())
    }

    fn window_layers(&self, layers: usize) -> Result<Vec<bool>, LoadError> {
        const DEFAULT_PERIOD: usize = 6;
        let name = "attention.sliding_window_pattern";
        if let Ok(flags) = self.gguf.u32_array(&self.key(name)) {
            if flags.len() != layers {
                let found = format!("a list of {}", flags.len());
                return Err(self.unsupported(name, found, &format!("{layers} flags, one a layer")));
            }
            return Ok(flags.iter().map(|flag| *flag != 0).collect());
        }
        let period = self.count_or(name, LIMIT_LAYERS, DEFAULT_PERIOD)?;
        Ok((0..layers).map(|layer| layer % period < period - 1).collect())
    }

    fn rope(&self, windowed: bool, head_dim: usize, context: usize) -> Result<RopeSpec, LoadError> {
        let dim = self.count_or("rope.dimension_count", head_dim, head_dim)?;
        if dim % 2 != 0 {
            return Err(self.unsupported("rope.dimension_count", dim, "even"));
        }
        let style = match self.architecture {
            Architecture::Llama => RopeStyle::Interleaved,
            _ => RopeStyle::Half,
        };
        if windowed {
            let base = f64::from(self.positive("rope.freq_base_swa")?.unwrap_or(10_000.0));
            return Ok(RopeSpec { dim, base, style, scaling: RopeScaling::None, factors: None });
        }
        let base = f64::from(self.positive("rope.freq_base")?.unwrap_or(10_000.0));
        let scaling = self.scaling(context)?;
        Ok(RopeSpec { dim, base, style, scaling, factors: self.rope_factors(dim)? })
    }

    fn scaling(&self, context: usize) -> Result<RopeScaling, LoadError> {
        let Some(factor) = self.positive("rope.scaling.factor")?.map(f64::from) else {
            return Ok(RopeScaling::None);
        };
        let kind = match self.has("rope.scaling.type") {
            true => self.gguf.str(&self.key("rope.scaling.type"))?,
            false => "linear",
        };
        match kind {
            "none" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor }),
            "yarn" => {
                let name = "rope.scaling.original_context_length";
                let beta = |name, default| {
                    Ok::<f64, LoadError>(self.float(name)?.map_or(default, f64::from))
                };
                Ok(RopeScaling::Yarn {
                    factor,
                    original_context: self.count_or(name, u32::MAX as usize, context)? as f64,
                    beta_fast: beta("rope.scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: beta("rope.scaling.yarn_beta_slow", 1.0)?,
                    attention_factor: beta("rope.scaling.yarn_attn_factor", 1.0)?
                        * beta("rope.scaling.attn_factor", 1.0)?,
                })
            }
            other => Err(self.unsupported("rope.scaling.type", other, "none, linear or yarn")),
        }
    }

    fn rope_factors(&self, dim: usize) -> Result<Option<Vec<f32>>, LoadError> {
        if self.architecture != Architecture::Llama {
            return Ok(None);
        }
        crate::linear::load_optional(self.gguf, "rope_freqs.weight", dim / 2)
    }
}
