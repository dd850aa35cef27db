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
    /// Bytes of one block (all layers) in `format`, as if no layer were pinned.
    pub fn block_bytes(&self, format: PageFormat) -> usize {
        self.layers * self.shape.page_bytes(format)
    }

    /// Bytes of tables that name one block and its pages, those of spans apart.
    fn block_table_bytes(&self) -> usize {
        BLOCK_TABLE_BYTES + self.layers * PAGE_TABLE_BYTES
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

    /// [`bytes_per_token`](Self::bytes_per_token) with the tables that name the pages, those of full
    /// spans of this format included, in a pool that is not small.
    pub fn bytes_per_token_with_tables(&self, format: PageFormat) -> f64 {
        let budget_bytes = self.budget_bytes.max(1 << 30);
        let geometry = Geometry::new(&PoolConfig { budget_bytes, ..self.clone() });
        let tables = |(group, classes): (&GroupConfig, &ByFormat<usize>)| {
            let spans = group.layers as f64 / geometry.slots(classes[format]) as f64;
            group.block_table_bytes() as f64 + spans * geometry.span_table_bytes() as f64
        };
        let tables: f64 = self.groups.iter().zip(&geometry.class_of).map(tables).sum();
        self.bytes_per_token(format) as f64 + tables / self.block_size() as f64
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
            let outside = group.pinned.iter().enumerate().find(|&(index, &layer)| {
                layer >= group.layers || group.pinned[..index].contains(&layer)
            });
            if let Some((_, &value)) = outside {
                return Err(ConfigError::Field { field: "pinned layer", value });
            }
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
         of 16, block_size 16, 32, 64 or 128 and the same in every group, window >= 1, pinned layers \
         below layers and each once)"
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
    /// Empty spans that ordinary growth leaves alone, so that a re-encode can start.
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

/// Empty spans kept for re-encoding. One is enough: a plan encodes only what its forecast, page by page,
/// finds room for, and ends with the span given back (decision 0007).
const RESERVE_SPANS: usize = 1;
/// Bytes of tables per block beside its pages: record, free-list entry, entry of a sequence's table with
/// its guard (lists grow by an eighth), and what the allocator adds.
pub(crate) const BLOCK_TABLE_BYTES: usize = 128;
/// Bytes of tables per page: entry in the block's record, in a view (which grows by an eighth), and a
/// policy's score.
pub(crate) const PAGE_TABLE_BYTES: usize = 26;

/// Formats whose pages spans are cut for; others take what remains.
const SPAN_FORMATS: [PageFormat; 4] =
    [PageFormat::F16, PageFormat::Int8, PageFormat::K8V4, PageFormat::Int4];

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
        let cut_for: Vec<usize> = class_of
            .iter()
            .flat_map(|classes| SPAN_FORMATS.map(|format| class_bytes[classes[format]]))
            .collect();
        let span_bytes = span::choose_span_bytes(&cut_for, config.budget_bytes);
        let mut geometry = Geometry {
            span_bytes,
            spans: 0,
            reserve_spans: RESERVE_SPANS,
            table_bytes_per_span: 0,
            table_bytes: 0,
            class_bytes,
            class_of,
        };
        geometry.table_bytes_per_span = geometry.most_table_bytes_per_span(config);
        geometry.spans = config.budget_bytes / (span_bytes + geometry.table_bytes_per_span);
        geometry.table_bytes = geometry.spans * geometry.table_bytes_per_span;
        geometry
    }

    /// Bytes of tables of one span, its pages apart.
    fn span_table_bytes(&self) -> usize {
        let slots = self.class_bytes.iter().map(|bytes| self.span_bytes / bytes).max();
        span::span_table_bytes(slots.unwrap_or(0), self.class_bytes.len())
    }

    /// Tables are largest when the arena is full of the pages with the most table per byte.
    fn most_table_bytes_per_span(&self, config: &PoolConfig) -> usize {
        let mut most = 0;
        for (group, classes) in config.groups.iter().zip(&self.class_of) {
            for (_, &class) in classes.iter() {
                let tables = self.slots(class) * group.block_table_bytes();
                most = most.max(tables.div_ceil(group.layers));
            }
        }
        most + self.span_table_bytes()
    }

    /// Pages of class `class` in a span.
    pub(crate) fn slots(&self, class: usize) -> usize {
        self.span_bytes / self.class_bytes[class]
    }

    /// Most bytes an arena may have: page offsets are 32 bits in units of `PAGE_ALIGN`.
    pub(crate) const MAXIMUM_BYTES: usize = (u32::MAX as usize) * PAGE_ALIGN;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{BlockRecord, Page};
    use crate::page::PageRef;
    use crate::table::Entry;

    /// The largest a list that grows by an eighth gets, per item of `bytes`.
    fn in_a_list(bytes: usize) -> f64 {
        bytes as f64 * 1.125
    }

    #[test]
    fn table_bytes_are_those_of_the_tables() {
        let score = size_of::<f32>();
        let page = size_of::<Option<Page>>() as f64 + in_a_list(size_of::<PageRef>() + score);
        assert!((page..page + 2.0).contains(&(PAGE_TABLE_BYTES as f64)), "{page}");
        // 16 bytes are what allocators add to the record's list of pages.
        let lists = size_of::<BlockRecord>() + size_of::<Entry>() + size_of::<u32>();
        let block = in_a_list(lists) + 16.0;
        assert!((block..block + 24.0).contains(&(BLOCK_TABLE_BYTES as f64)), "{block}");
    }
}
