//! A loaded model that turns a batch of tokens into logits over the pages it is given.

use crate::arch::pass::{Buffers, GroupShape, Pass, PassShape};
use crate::arch::{self, Model};
use crate::gguf::{Gguf, GgufError};
use crate::reference_attention::ReferenceAttention;
use crate::rope::Rope;
use crate::spec::ModelSpec;
use reef_kernels::attention::AttentionShape;
use reef_kernels::dispatch::Tier;
use reef_kernels::matmul::{PackError, QuantizedRows};
use reef_kernels::ops;
use reef_kernels::pool::BarrierPool;
use reef_kernels::rows::for_each_light_row;
use reef_kv::arena::Arena;
use reef_kv::page::SequenceView;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is not a well-formed GGUF, or lacks a key or tensor.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor that the architecture needs is absent.
    #[error("tensor {0} is missing: the file is incomplete, fetch or convert it again")]
    Missing(String),
    /// A value that Reef does not run.
    #[error("{field} is {value}: {mend}")]
    Unsupported {
        /// Metadata key or tensor.
        field: String,
        /// Its value.
        value: String,
        /// What would be accepted.
        mend: String,
    },
    /// A tensor with another shape than the metadata says.
    #[error("tensor {tensor} has shape {found:?}, the metadata asks for {expected:?}")]
    Shape {
        /// Tensor name.
        tensor: String,
        /// Dimensions in the file, fastest first.
        found: Vec<usize>,
        /// Dimensions expected.
        expected: Vec<usize>,
    },
    /// A matrix that could not be packed.
    #[error("tensor {tensor}: {source}")]
    Pack {
        /// Tensor name.
        tensor: String,
        /// Why.
        source: PackError,
    },
}

/// Why a batch could not be run. Nothing was computed or written.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BatchError {
    /// A token id outside the vocabulary.
    #[error("token id {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The id.
        token: u32,
        /// Vocabulary size.
        vocabulary: usize,
    },
}

/// Precision of the activations that meet quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// 8-bit codes per 32 values: the fast path.
    Int8,
    /// f32: the reference path.
    F32,
}

/// How keys are turned before they are written into pages, and queries to match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeyRotation {
    /// As the rope left them.
    #[default]
    None,
    /// By the normalized Walsh-Hadamard matrix of the head: scores stay what they were, outlier
    /// channels are spread over all (QuaRot, arXiv 2404.00456). Pages of one rotation are worthless
    /// under another, whatever their format.
    Hadamard,
}

impl KeyRotation {
    /// Every rotation.
    pub const ALL: [KeyRotation; 2] = [KeyRotation::None, KeyRotation::Hadamard];

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            KeyRotation::None => "none",
            KeyRotation::Hadamard => "hadamard",
        }
    }
}

/// What arithmetic runs on.
pub struct Compute {
    /// CPU tier.
    pub tier: Tier,
    /// Threads.
    pub pool: BarrierPool,
    /// Whether activations are quantised before a matrix product.
    pub quantize: bool,
}

/// How to run a model.
#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// Threads, at least 1.
    pub threads: usize,
    /// CPU tier.
    pub tier: Tier,
    /// Precision of activations.
    pub activations: Activations,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// Rotation of keys in all pages.
    pub key_rotation: KeyRotation,
}

/// One sequence's part of a batch: tokens at consecutive positions, whose pages exist.
#[derive(Clone, Copy, Debug)]
pub struct BatchSequence<'a> {
    /// Token ids, at least one.
    pub tokens: &'a [u32],
    /// Original position of the first token.
    pub first_position: u32,
    /// Pages of the sequence up to the last token's position.
    pub view: &'a SequenceView,
    /// Whether [`ModelRunner::masses`] is asked for afterwards.
    pub observe: bool,
}

/// A loaded model.
pub struct ModelRunner {
    spec: ModelSpec,
    model: Box<dyn Model>,
    compute: Compute,
    shape: PassShape,
    buffers: Buffers,
    selected: Vec<f32>,
    codes: QuantizedRows,
    logits: Vec<f32>,
    reference: Option<Box<dyn ReferenceAttention>>,
}

impl ModelRunner {
    /// Loads the weights of `gguf`, repacked for this CPU.
    pub fn load(gguf: &Gguf, options: RunnerOptions) -> Result<ModelRunner, LoadError> {
        let spec = ModelSpec::from_gguf(gguf)?;
        let model = arch::load(gguf, &spec)?;
        let compute = Compute {
            tier: options.tier,
            pool: BarrierPool::new(options.threads),
            quantize: options.activations == Activations::Int8,
        };
        Ok(ModelRunner {
            shape: pass_shape(&spec, &options),
            spec,
            model,
            compute,
            buffers: Buffers::default(),
            selected: Vec::new(),
            codes: QuantizedRows::default(),
            logits: Vec::new(),
            reference: None,
        })
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// What arithmetic runs on; between passes others may use the threads.
    pub fn compute(&self) -> &Compute {
        &self.compute
    }

    /// Precision of activations.
    pub fn activations(&self) -> Activations {
        if self.compute.quantize { Activations::Int8 } else { Activations::F32 }
    }

    /// Changes the precision of activations from the next pass on.
    pub fn set_activations(&mut self, activations: Activations) {
        self.compute.quantize = activations == Activations::Int8;
    }

    /// How keys are rotated.
    pub fn key_rotation(&self) -> KeyRotation {
        self.shape.groups.first().map_or(KeyRotation::None, |group| group.key_rotation)
    }

    /// Changes the rotation of keys: for sequences that begin after it, since pages do not say how
    /// theirs were rotated.
    pub fn set_key_rotation(&mut self, key_rotation: KeyRotation) {
        self.shape.groups.iter_mut().for_each(|group| group.key_rotation = key_rotation);
    }

    /// From the next pass on, has `reference` attend in place of the pages (`None`: the pages again).
    /// For measurements; nothing is observed meanwhile.
    pub fn set_reference_attention(&mut self, reference: Option<Box<dyn ReferenceAttention>>) {
        self.reference = reference;
    }

    /// Checks that every token is in the vocabulary, before work is begun that needs them all.
    ///
    /// # Errors
    /// The first token that is not.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), BatchError> {
        let vocabulary = self.spec.vocabulary;
        match tokens.iter().find(|token| **token as usize >= vocabulary) {
            Some(&token) => Err(BatchError::Token { token, vocabulary }),
            None => Ok(()),
        }
    }

    /// Runs the batch: writes K and V of every token into its page of `arena` and leaves the hidden
    /// states for [`logits`](Self::logits). Rows are numbered through the batch in order. A row's
    /// result does not depend on the rest of the batch, to the bit.
    pub fn forward(
        &mut self,
        arena: &Arena,
        batch: &[BatchSequence<'_>],
    ) -> Result<(), BatchError> {
        batch.iter().try_for_each(|sequence| self.check_tokens(sequence.tokens))?;
        let reference = self.reference.as_deref_mut().map(|r| r as &mut dyn ReferenceAttention);
        let ModelRunner { compute, shape, buffers, .. } = self;
        let mut pass = Pass::new(compute, shape, batch, arena, buffers, reference);
        self.model.forward(&mut pass);
        Ok(())
    }

    /// How much attention sequence `sequence` (its index in the last batch) paid to each page of layer
    /// `layer` of KV group `group`: probabilities summed over the layer's query heads,
    /// `[rows][pages of the view]`. Empty where it was not observed, and for groups with a window.
    pub fn masses(&self, sequence: usize, group: usize, layer: usize) -> &[f32] {
        self.buffers.masses.of(sequence, group, layer)
    }

    /// Logits of the given rows of the last batch, `[rows.len()][vocabulary]`.
    ///
    /// # Panics
    /// If a row is not of the last batch.
    pub fn logits(&mut self, rows: &[usize]) -> &[f32] {
        let (width, epsilon) = (self.spec.width, self.spec.norm_epsilon);
        self.selected.resize(rows.len() * width, 0.0);
        let ends = self.model.ends();
        let x = &self.buffers.x;
        let (tier, pool) = (self.compute.tier, &self.compute.pool);
        for_each_light_row(pool, rows.len(), (&mut self.selected, width), &|i, out| {
            ops::rms_norm(tier, &x[rows[i] * width..][..width], &ends.norm.weight, epsilon, out);
        });
        let head = ends.head();
        head.multiply(&self.compute, &self.selected, &mut self.codes, &mut self.logits);
        let logits = &mut self.logits[..rows.len() * self.spec.vocabulary];
        if let Some(cap) = self.spec.logit_softcap {
            logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
        }
        logits
    }

    /// Exchanges the buffer that [`logits`](Self::logits) was answered from with `buffer`, so that the
    /// rows can be kept without copying them: `[rows.len()][vocabulary]` at its start.
    pub fn swap_logits(&mut self, buffer: &mut Vec<f32>) {
        std::mem::swap(&mut self.logits, buffer);
    }
}

fn pass_shape(spec: &ModelSpec, options: &RunnerOptions) -> PassShape {
    let group = |(group, rope): (&crate::spec::GroupSpec, &crate::rope::RopeSpec)| GroupShape {
        layers: group.layers.len(),
        attention: AttentionShape {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            block_size: options.block_size,
            scale: spec.attention_scale,
            window: group.window,
        },
        rope: Rope::new(rope),
        key_rotation: options.key_rotation,
    };
    PassShape {
        width: spec.width,
        hidden: spec.hidden,
        groups: spec.groups.iter().zip(&spec.ropes).map(group).collect(),
        norm_epsilon: spec.norm_epsilon,
    }
}
