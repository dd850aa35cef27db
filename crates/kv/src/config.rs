//! What a pool is made for: the KV groups of a model, its budget, its protected tokens.

use crate::account::ByFormat;
use crate::ladder::{Fidelity, Ladder};
use crate::page::{PAGE_ALIGN, PageFormat, PageShape};
use crate::span;

/// Accepted tokens at the end of a sequence that stay f16 by preference and are not dropped.
pub const TAIL_TOKENS: usize = 128;

/// Layers that cache alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    /// Layers of the group; at least 1.
    pub layers: usize,
    /// Shape of a page of one layer.
    pub shape: PageShape,
    /// `Some(w)`: a query at position `p` attends positions `> p - w`. `None`: full attention.
    pub window: Option<usize>,
    /// Layers of the group (index in the group, each once) whose pages stay f16 whatever happens.
    pub pinned: Vec<usize>,
}

impl GroupConfig {
    /// Bytes of one block (all layers) in `format`.
    pub fn block_bytes(&self, format: PageFormat) -> usize {
        self.layers * self.shape.page_bytes(format)
    }
}

/// What a pool is made for.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolConfig {
    /// KV groups in the model's order; all have the same block size.
    pub groups: Vec<GroupConfig>,
    /// Bytes the pool may use, tables included.
    pub budget_bytes: usize,
    /// Commit the memory at start instead of at first touch.
    pub prefault: bool,
    /// What gives way, in what order.
    pub ladder: Ladder,
}

impl PoolConfig {
    /// The smallest format that a sealed block of `contract` may reach: what the enabled rungs, the
    /// contract and the model's keys allow.
    pub fn floor(&self, contract: Fidelity) -> PageFormat {
        self.ladder.floor(contract)
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.groups.first().map_or(32, |group| group.shape.block_size)
    }

    /// Layers of all groups.
    pub fn layers(&self) -> usize {
        self.groups.iter().map(|group| group.layers).sum()
    }

    /// Bytes of one token in `format`, all layers, scales included (SmolLM2: 23,040 and 12,960).
    pub fn bytes_per_token(&self, format: PageFormat) -> usize {
        let block_bytes: usize = self.groups.iter().map(|group| group.block_bytes(format)).sum();
        block_bytes / self.block_size()
    }

    /// [`bytes_per_token`](Self::bytes_per_token) with the tables that name the pages.
    pub fn bytes_per_token_with_tables(&self, format: PageFormat) -> f64 {
        let tables: usize = self
            .groups
            .iter()
            .map(|group| BLOCK_TABLE_BYTES + group.layers * PAGE_TABLE_BYTES)
            .sum();
        self.bytes_per_token(format) as f64 + tables as f64 / self.block_size() as f64
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.groups.is_empty() {
            return Err(ConfigError::NoGroups);
        }
        if self.groups.len() > u16::MAX as usize {
            return Err(ConfigError::Field { field: "groups", value: self.groups.len() });
        }
        for group in &self.groups {
            let PageShape { kv_heads, head_dim, block_size } = group.shape;
            let fields = [
                ("layers", group.layers, (1..=u16::MAX as usize).contains(&group.layers)),
                ("kv_heads", kv_heads, (1..=4096).contains(&kv_heads)),
                ("head_dim", head_dim, (16..=4096).contains(&head_dim) && head_dim % 16 == 0),
                ("block_size", block_size, matches!(block_size, 16 | 32 | 64 | 128)),
                ("block_size", block_size, block_size == self.block_size()),
                ("window", group.window.unwrap_or(1), group.window != Some(0)),
            ];
            if let Some(&(field, value, _)) = fields.iter().find(|(_, _, good)| !good) {
                return Err(ConfigError::Field { field, value });
            }
        }
        Ok(())
    }
}

/// A configuration no pool can be made of.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// No KV group.
    #[error("a KV pool needs at least one KV group: the model names none")]
    NoGroups,
    /// A value out of range.
    #[error(
        "KV group: {field} = {value} is not supported (layers and kv_heads >= 1, head_dim a multiple \
         of 16, block_size 16, 32, 64 or 128 and the same in every group, window >= 1)"
    )]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: usize,
    },
    /// The budget is below what one sequence needs at the loosest contract.
    #[error(
        "KV budget of {budget_bytes} bytes is too small: this model needs at least {minimum_bytes} \
         bytes; raise --kv-memory"
    )]
    BudgetTooSmall {
        /// Bytes asked for.
        budget_bytes: usize,
        /// Bytes needed.
        minimum_bytes: usize,
    },
    /// The budget is more than page offsets can address.
    #[error(
        "KV budget of {budget_bytes} bytes is too large: at most {maximum_bytes}; lower --kv-memory"
    )]
    BudgetTooLarge {
        /// Bytes asked for.
        budget_bytes: usize,
        /// Bytes that offsets can address.
        maximum_bytes: usize,
    },
    /// The system refused the mapping.
    #[error("cannot map {bytes} bytes for the KV arena: {source}; lower --kv-memory")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
}

/// How the budget is cut, worked out from the configuration alone.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    /// Bytes of a span.
    pub span_bytes: usize,
    /// Spans of the arena.
    pub spans: usize,
    /// Empty spans that ordinary growth leaves alone: one per lossy page size, so that a re-encode to
    /// each can start whatever the others hold.
    pub reserve_spans: usize,
    /// Bytes of tables per span at their largest.
    pub table_bytes_per_span: usize,
    /// Bytes of tables at their largest.
    pub table_bytes: usize,
    /// Distinct page sizes, in bytes.
    pub class_bytes: Vec<usize>,
    /// Index into `class_bytes` per group and format.
    pub class_of: Vec<ByFormat<usize>>,
}

/// Bytes of tables per block beside its pages: record, guard, free-list entry.
const BLOCK_TABLE_BYTES: usize = 128;
/// Bytes of tables per page: entry in the record (8), two in a growing view (24), owner (12).
const PAGE_TABLE_BYTES: usize = 44;
/// Bytes of tables per span beside the page owners.
const SPAN_TABLE_BYTES: usize = 96;

impl Geometry {
    pub(crate) fn new(config: &PoolConfig) -> Geometry {
        let mut class_bytes: Vec<usize> = Vec::new();
        let mut class_index = |bytes: usize| {
            class_bytes.iter().position(|&known| known == bytes).unwrap_or_else(|| {
                class_bytes.push(bytes);
                class_bytes.len() - 1
            })
        };
        let class_of: Vec<ByFormat<usize>> = config
            .groups
            .iter()
            .map(|group| ByFormat::from_fn(|format| class_index(group.shape.page_bytes(format))))
            .collect();
        let mut lossy: Vec<usize> =
            class_of.iter().map(|classes| classes[PageFormat::Int8]).collect();
        lossy.sort_unstable();
        lossy.dedup();
        let span_bytes = span::choose_span_bytes(&class_bytes, config.budget_bytes);
        // Tables are largest when the arena is full of the blocks with the most table per page byte.
        let table_bytes_of = |group: &GroupConfig| {
            let tables = BLOCK_TABLE_BYTES + group.layers * PAGE_TABLE_BYTES;
            tables as f64 / group.block_bytes(PageFormat::Int8) as f64
        };
        let ratio = config.groups.iter().map(table_bytes_of).fold(0.0, f64::max);
        let table_bytes_per_span = (span_bytes as f64 * ratio).ceil() as usize + SPAN_TABLE_BYTES;
        let spans = config.budget_bytes / (span_bytes + table_bytes_per_span);
        Geometry {
            span_bytes,
            spans,
            reserve_spans: lossy.len(),
            table_bytes_per_span,
            table_bytes: spans * table_bytes_per_span,
            class_bytes,
            class_of,
        }
    }

    /// Pages of class `class` in a span.
    pub(crate) fn slots(&self, class: usize) -> usize {
        self.span_bytes / self.class_bytes[class]
    }

    /// Most bytes an arena may have: page offsets are 32 bits in units of `PAGE_ALIGN`.
    pub(crate) const MAXIMUM_BYTES: usize = (u32::MAX as usize) * PAGE_ALIGN;
}
