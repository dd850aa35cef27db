//! vLLM's KV pool: pages per layer, groups that share block tables, blocks per request.
//!
//! Follows `get_kv_cache_groups` and `_get_kv_cache_groups_uniform_page_size` of
//! `vllm/v1/core/kv_cache_utils.py` (about 0.10.1 and 0.20) and, for hybrid models,
//! `HybridAttentionMambaModelConfig.verify_and_update_config`.

use super::behavior::{self, Change};
use crate::engines::PlanError;
use crate::engines::setup::{DraftKind, Setup};
use crate::families::drafter;
use crate::model::{Cache, Heads, Model};

/// What a group keeps of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every token.
    Full,
    /// The last tokens.
    Window(u64),
    /// The current chunk.
    Chunk(u64),
    /// A state.
    State,
}

/// Layers of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spec {
    kind: Kind,
    /// Bytes per token, or of the whole state.
    bytes: u64,
    /// Heads tell layers of equal size apart.
    heads: Option<Heads>,
    /// Tokens of a block.
    block: u64,
}

impl Spec {
    fn charge(&self) -> Charge {
        Charge { kind: self.kind, block: self.block, bytes: self.page_bytes() }
    }

    fn page_bytes(&self) -> u64 {
        match self.kind {
            Kind::State => self.bytes,
            _ => self.bytes * self.block,
        }
    }
}

/// Groups of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// What its layers keep.
    pub kind: Kind,
    /// Layers of the model that have this shape.
    pub layers: u64,
    /// Groups they are split into.
    pub groups: u64,
    /// Tokens of a block.
    pub block: u64,
}

/// Layers that a start's check charges alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Charge {
    kind: Kind,
    block: u64,
    /// Bytes of a block in all these layers.
    bytes: u64,
}

/// How the pool of one rank is cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Groups by shape.
    pub groups: Vec<Group>,
    /// Layers of each group, padding included.
    pub group_size: u64,
    /// Bytes of a block: the page of a layer times the layers of a group.
    pub block_bytes: u64,
    /// Layers of padding.
    pub padding: u64,
    /// Bytes that one token adds inside every window, all layers.
    pub token_bytes: u64,
    /// How that sum is made up, with the numbers put in.
    pub token_formula: String,
    /// The same for a block's bytes.
    pub block_formula: String,
    /// What was charged in an unexpected way.
    pub notes: Vec<String>,
    charges: Vec<Charge>,
    batched_tokens: u64,
    states: u64,
    context_ranks: u64,
    counts_tokens: bool,
}

impl Layout {
    /// Cuts the pool of the rank with the most layers.
    ///
    /// # Errors
    /// A model without any layer that caches.
    pub fn new(model: &Model, setup: &Setup, batched_tokens: u64) -> Result<Layout, PlanError> {
        let mut notes = Vec::new();
        let compressed =
            |layer: &Cache| matches!(layer, Cache::Latent(latent) if latent.compression > 1);
        if model.layers.iter().any(compressed) {
            return Err(PlanError::Unsupported {
                engine: "vllm",
                what: format!("the pool of {}, whose layers compress tokens", model.name),
                mend:
                    "how its groups share blocks is in no source we have; give the log's numbers \
                       to `reef plan read`"
                        .into(),
            });
        }
        let mut layers = model.layers.clone();
        layers.extend(draft_layers(model, setup));
        let heaviest = heaviest_rank(&layers, setup);
        let mut specs = specs(model, &heaviest, setup, &mut notes);
        if specs.is_empty() {
            return Err(PlanError::Unsupported {
                engine: "vllm",
                what: format!("{}, of which no layer keeps anything", model.name),
                mend: "check num_key_value_heads and the layer types of its config".into(),
            });
        }
        let token_bytes =
            specs.iter().filter(|spec| spec.kind != Kind::State).map(|s| s.bytes).sum();
        let token_formula = token_formula(&specs);
        let pages = unify_pages(&mut specs, setup, &mut notes);
        let counted = count(&specs);
        let counts = || counted.iter().map(|(_, layers)| *layers);
        let (least, most) = (counts().min().unwrap_or(1), counts().max().unwrap_or(1));
        // One kind throughout makes one group; so do layers of one kind but different sizes.
        let one_kind = specs.iter().all(|spec| spec.kind == specs[0].kind);
        let (groups, group_size, block_bytes): (Vec<Group>, u64, u64) = if one_kind {
            let layers = specs.len() as u64;
            let bytes = specs.iter().map(Spec::page_bytes).sum();
            let group = Group { kind: specs[0].kind, layers, groups: 1, block: specs[0].block };
            (vec![group], layers, bytes)
        } else {
            // "A typical example is gpt-oss-20b + eagle, with 12 sw + 13 full."
            let size = if 2 * most < 3 * least { most } else { least };
            let group = |(spec, layers): &(Spec, u64)| Group {
                kind: spec.kind,
                layers: *layers,
                groups: layers.div_ceil(size),
                block: spec.block,
            };
            (counted.iter().map(group).collect(), size, pages * size)
        };
        let padded = groups.iter().map(|group| group.groups * group_size).sum::<u64>();
        Ok(Layout {
            charges: charges(model, &layers, setup, &groups, block_bytes),
            token_formula,
            block_formula: match one_kind {
                true => format!("pages of {group_size} layers"),
                false => format!("page of {pages} bytes * {group_size} layers of a group"),
            },
            padding: padded.saturating_sub(specs.len() as u64),
            groups,
            group_size,
            block_bytes,
            token_bytes,
            notes,
            batched_tokens,
            states: behavior::states_per_sequence(setup),
            context_ranks: setup.cp,
            counts_tokens: !behavior::has(Change::WindowGroups, setup),
        })
    }

    /// Blocks in `bytes` of memory.
    pub fn blocks(&self, bytes: f64) -> u64 {
        // More blocks than any device has, few enough that no product overflows.
        let limit = (1_u64 << 40) as f64;
        (bytes / self.block_bytes.max(1) as f64).floor().clamp(0.0, limit) as u64
    }

    /// Groups in all.
    pub fn group_count(&self) -> u64 {
        self.groups.iter().map(|group| group.groups).sum()
    }

    /// Smallest block in tokens.
    pub fn block_size(&self) -> u64 {
        let attention = self.groups.iter().filter(|group| group.kind != Kind::State);
        attention.map(|group| group.block).min().unwrap_or(1)
    }

    /// Blocks that one request of `length` tokens may hold at once
    /// (`max_memory_usage_bytes` of each spec).
    pub fn request_blocks(&self, length: u64) -> u64 {
        let of_group =
            |group: &Group| group.groups * self.blocks_of(group.kind, group.block, length);
        self.groups.iter().map(of_group).sum()
    }

    fn blocks_of(&self, kind: Kind, block: u64, length: u64) -> u64 {
        match kind {
            Kind::Full => length.div_ceil(block * self.context_ranks),
            Kind::Window(window) => {
                let held = (window - 1 + self.batched_tokens).min(length);
                held.div_ceil(block) + 1
            }
            Kind::Chunk(chunk) => (chunk + self.batched_tokens).min(length).div_ceil(block),
            Kind::State => self.states,
        }
    }

    /// Bytes that the start's check wants for one request of `length` tokens ("GiB KV cache is needed").
    pub fn needed_bytes(&self, length: u64) -> u64 {
        let bytes = |charge: &Charge| {
            charge.bytes.saturating_mul(self.blocks_of(charge.kind, charge.block, length))
        };
        self.charges.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Sequences of `length` tokens that `blocks` blocks hold.
    pub fn concurrency(&self, blocks: u64, length: u64) -> f64 {
        if self.counts_tokens {
            return blocks as f64 * self.block_size() as f64 / length.max(1) as f64;
        }
        blocks as f64 / self.request_blocks(length).max(1) as f64
    }

    /// Tokens of "GPU KV cache size" before it followed from the concurrency:
    /// `num_blocks // n_groups * min_block`.
    pub fn tokens_of_one_group(&self, blocks: u64) -> u64 {
        let blocks = blocks / self.group_count().max(1);
        blocks.saturating_mul(self.block_size()).saturating_mul(self.context_ranks)
    }

    /// Tokens of "GPU KV cache size" since: `int(concurrency * max_model_len)`.
    pub fn tokens_from_concurrency(&self, blocks: u64, length: u64) -> u64 {
        (self.concurrency(blocks, length) * length as f64) as u64
    }

    /// Longest request that the start's check lets into `bytes`, up to `limit` tokens; 0 if none.
    pub fn longest(&self, bytes: f64, limit: u64) -> u64 {
        let (mut fits, mut too_long) = (0, limit.saturating_add(1));
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            let enough = self.needed_bytes(middle) as f64 <= bytes;
            if enough { fits = middle } else { too_long = middle }
        }
        fits
    }
}

/// Caches of the draft: the model's own next-token layers, or a head like its layers. A head of a model
/// whose full layers have a shape of their own (Gemma 4) looks like neither of them.
pub fn draft_layers(model: &Model, setup: &Setup) -> Vec<Cache> {
    let Some(draft) = setup.draft else {
        return Vec::new();
    };
    let like = drafter::like_target(&model.layers);
    match (draft.kind, draft.layers) {
        (DraftKind::Lookup, _) => Vec::new(),
        (DraftKind::NextToken, None) => model.draft_layers.clone(),
        (DraftKind::NextToken, Some(layers)) => {
            like.map_or(Vec::new(), |layer| vec![layer; layers.min(64) as usize])
        }
        (DraftKind::Head, layers) => {
            let full = like.and_then(|layer| layer.heads());
            let window = model.layers.iter().find_map(|layer| match layer {
                Cache::Sliding { heads, .. } => Some(*heads),
                _ => None,
            });
            let head = match (full, window) {
                (Some(full), Some(heads)) if full != heads => Some(Cache::Full { heads }),
                _ => like,
            };
            head.map_or(Vec::new(), |layer| vec![layer; layers.unwrap_or(1).min(64) as usize])
        }
    }
}

/// What a start's check charges: each layer for itself, so that padding and shared pages are not seen, or the
/// groups as they are allocated.
fn charges(
    model: &Model,
    layers: &[Cache],
    setup: &Setup,
    groups: &[Group],
    block_bytes: u64,
) -> Vec<Charge> {
    if let Some(charged) = charged_layers(layers, setup) {
        let mut specs = specs(model, &charged, setup, &mut Vec::new());
        unify_pages(&mut specs, setup, &mut Vec::new());
        return specs.iter().map(Spec::charge).collect();
    }
    let charge = |g: &Group| Charge { kind: g.kind, block: g.block, bytes: g.groups * block_bytes };
    groups.iter().map(charge).collect()
}

/// The layers that a start's check charges one by one, where it does not charge by groups: before 0.14 those
/// of the heaviest rank; in 0.14 and 0.15 those of all pipeline ranks together (vllm#34076).
fn charged_layers(layers: &[Cache], setup: &Setup) -> Option<Vec<Cache>> {
    if !behavior::has(Change::NeedByGroups, setup) {
        return Some(heaviest_rank(layers, setup));
    }
    let all = setup.pp > 1 && !behavior::has(Change::NeedByRank, setup);
    all.then(|| layers.to_vec())
}

/// The layers of the pipeline rank that holds the most bytes per token: `pp` even parts.
fn heaviest_rank(layers: &[Cache], setup: &Setup) -> Vec<Cache> {
    let part = layers.len().div_ceil(setup.pp.max(1) as usize).max(1);
    let bytes = |part: &&[Cache]| -> u64 {
        part.iter().map(|layer| layer.token_bytes(setup.kv_keys, setup.tp)).sum()
    };
    layers.chunks(part).max_by_key(bytes).map_or_else(Vec::new, <[Cache]>::to_vec)
}

/// One spec per layer that owns a cache, windows charged as the version charges them, blocks as large as
/// a recurrent state needs.
fn specs(model: &Model, layers: &[Cache], setup: &Setup, notes: &mut Vec<String>) -> Vec<Spec> {
    let windows = setup.hybrid_manager && behavior::has(Change::WindowGroups, setup);
    let chunks = setup.hybrid_manager && behavior::has(Change::ChunkGroups, setup);
    let block = behavior::block_size(model, setup);
    let mut charged_full = false;
    let mut specs = Vec::with_capacity(layers.len());
    for layer in layers {
        let token_bytes =
            |heads: &Heads| heads.token_bytes(setup.kv_keys, setup.kv_values, setup.tp);
        let (kind, bytes) = match layer {
            Cache::Full { heads } => (Kind::Full, token_bytes(heads)),
            Cache::Sliding { heads, window } if windows => {
                (Kind::Window(*window), token_bytes(heads))
            }
            Cache::Chunked { heads, chunk } if chunks => (Kind::Chunk(*chunk), token_bytes(heads)),
            Cache::Sliding { heads, .. } | Cache::Chunked { heads, .. } => {
                charged_full = true;
                (Kind::Full, token_bytes(heads))
            }
            Cache::Latent(latent) => {
                let dtype = latent.stored_as(setup.kv_keys);
                (Kind::Full, layer.token_bytes(dtype, setup.tp).max(1))
            }
            Cache::Recurrent(state) => {
                let ssm = setup.state_bytes.unwrap_or(2);
                (Kind::State, state.bytes(setup.tp, setup.draft_tokens(), 2, ssm))
            }
            Cache::Shared { .. } | Cache::Nothing => continue,
        };
        specs.push(Spec { kind, bytes, heads: layer.heads(), block });
    }
    if charged_full {
        notes.push("window layers are charged as full attention in this version".into());
    }
    align_to_state(&mut specs, model);
    specs
}

/// Hybrid models: the attention block grows until its page holds a state,
/// `16 * ceil(state / (16 * attention bytes per token))` (64 for MLA kernels), and the state's page is
/// padded up to it.
fn align_to_state(specs: &mut [Spec], model: &Model) {
    let state = specs.iter().filter(|spec| spec.kind == Kind::State).map(|spec| spec.bytes).max();
    let attention =
        specs.iter().filter(|spec| spec.kind != Kind::State).map(|spec| spec.bytes).max();
    let (Some(state), Some(attention)) = (state, attention) else {
        return;
    };
    let latent = model.layers.iter().any(|layer| matches!(layer, Cache::Latent(_)));
    let multiple = if latent { 64 } else { 16 };
    let block = multiple * state.div_ceil(multiple * attention);
    for spec in specs.iter_mut() {
        if spec.kind == Kind::State {
            spec.block = block.max(spec.block);
            spec.bytes = spec.bytes.max(attention * spec.block);
        } else {
            spec.block = block.max(spec.block);
        }
    }
}

/// Gives the smaller pages larger blocks (`unify_kv_cache_spec_page_size`); returns the page of a layer.
fn unify_pages(specs: &mut [Spec], setup: &Setup, notes: &mut Vec<String>) -> u64 {
    let largest = specs.iter().map(Spec::page_bytes).max().unwrap_or(1);
    let mixed = specs.iter().any(|spec| spec.kind != specs[0].kind);
    if !mixed || specs.iter().all(|spec| spec.page_bytes() == largest) {
        return largest;
    }
    let divides = specs.iter().all(|spec| largest.is_multiple_of(spec.page_bytes()));
    if divides && behavior::has(Change::UnifiedPages, setup) {
        for spec in specs.iter_mut() {
            spec.block *= largest / spec.page_bytes();
        }
        return largest;
    }
    // Without a common page the manager of groups is off: everything is charged in full.
    notes.push("layers have pages of different sizes: all are charged as full attention".into());
    for spec in specs.iter_mut() {
        if matches!(spec.kind, Kind::Window(_) | Kind::Chunk(_)) {
            spec.kind = Kind::Full;
        }
    }
    largest
}

/// `32 layers * 4096 B`, by shape.
fn token_formula(specs: &[Spec]) -> String {
    let cached = count(specs).into_iter().filter(|(spec, _)| spec.kind != Kind::State);
    let parts = cached.map(|(spec, layers)| match spec.heads {
        Some(heads) => {
            let (kv, dims) = (heads.kv, heads.key_dim + heads.value_dim);
            format!("{layers} layers * {} B ({kv} KV heads of {dims} channels)", spec.bytes)
        }
        None => format!("{layers} layers * {} B", spec.bytes),
    });
    parts.collect::<Vec<_>>().join(" + ")
}

/// Layers by shape, in order of first appearance.
fn count(specs: &[Spec]) -> Vec<(Spec, u64)> {
    let mut counted: Vec<(Spec, u64)> = Vec::new();
    for spec in specs {
        match counted.iter_mut().find(|(known, _)| known == spec) {
            Some((_, layers)) => *layers += 1,
            None => counted.push((*spec, 1)),
        }
    }
    counted
}
