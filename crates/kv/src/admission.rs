//! Static questions with numbers for answers: what fits, how much is needed. For admission, for
//! messages and for the start-up checks; nothing here looks at what the pool holds now.

use crate::config::{Geometry, GroupConfig, PoolConfig, TAIL_TOKENS};
use crate::ladder::{Fidelity, Rung};
use crate::page::PageFormat;
use crate::pool::BlockPool;

/// Most blocks a window group holds at once while a sequence goes from `next_position` to
/// `next_position + tokens`, growing by `step_tokens` at a time and freeing at each commit what left
/// the window.
pub(crate) fn peak_window_blocks(
    window: usize,
    block_size: usize,
    next_position: usize,
    tokens: usize,
    step_tokens: usize,
) -> usize {
    // More than any arena holds, few enough that no sum overflows.
    let tokens = tokens.min(u32::MAX as usize);
    let step = step_tokens.clamp(1, tokens.max(1));
    // Past one window, `block_size` steps have begun at every place in a block that they ever begin at.
    let pattern = window + block_size * (step + 2);
    let end = next_position + tokens.min(pattern);
    let mut position = next_position;
    let mut peak = 0;
    while position < end {
        let step_end = (position + step).min(end);
        let first_block = (position + 1).saturating_sub(window) / block_size;
        peak = peak.max((step_end - 1) / block_size + 1 - first_block);
        position = step_end;
    }
    peak
}

/// The same for any sequence of `tokens` tokens from position 0 on, wherever its steps begin: a step
/// from `p` on needs positions `p - window + 1 ..= p + step_tokens - 1`.
fn most_window_blocks(
    window: usize,
    block_size: usize,
    tokens: usize,
    step_tokens: usize,
) -> usize {
    let positions = window.saturating_add(step_tokens - 1).min(tokens).max(1);
    ((positions - 1).div_ceil(block_size) + 1).min(tokens.div_ceil(block_size))
}

/// Blocks of one group: `floor` blocks in the smallest permitted format, `open` in f16.
#[derive(Clone, Copy)]
struct GroupNeed {
    floor: usize,
    open: usize,
}

fn group_need(group: &GroupConfig, tokens: usize, step_tokens: usize) -> GroupNeed {
    let block_size = group.shape.block_size;
    let step_tokens = step_tokens.clamp(1, tokens.max(1));
    let blocks = match group.window {
        None => tokens.div_ceil(block_size),
        Some(window) => most_window_blocks(window, block_size, tokens, step_tokens),
    };
    // A step that begins in the middle of a block has one more block open than an aligned one.
    let open = ((step_tokens - 1).div_ceil(block_size) + 1).min(blocks);
    GroupNeed { floor: blocks - open, open }
}

/// Spans for the pages of `needs`, each page size rounded up to whole spans, and the reserve. Pinned
/// layers are f16.
fn spans_for(
    config: &PoolConfig,
    geometry: &Geometry,
    needs: &[GroupNeed],
    floor: PageFormat,
) -> usize {
    let mut pages = vec![0; geometry.class_bytes.len()];
    add_pages(config, geometry, needs, floor, &mut pages);
    spans_of(geometry, &pages)
}

/// Adds the pages of `needs` to `pages` per size class.
fn add_pages(
    config: &PoolConfig,
    geometry: &Geometry,
    needs: &[GroupNeed],
    floor: PageFormat,
    pages: &mut [usize],
) {
    for ((group, classes), need) in config.groups.iter().zip(&geometry.class_of).zip(needs) {
        let pinned = group.pinned.len();
        pages[classes[floor]] += need.floor * (group.layers - pinned);
        pages[classes[PageFormat::F16]] += need.open * group.layers + need.floor * pinned;
    }
}

/// Spans for `pages` per size class, and the reserve.
fn spans_of(geometry: &Geometry, pages: &[usize]) -> usize {
    let spans = |(class, pages): (usize, &usize)| pages.div_ceil(geometry.slots(class));
    pages.iter().enumerate().map(spans).sum::<usize>() + geometry.reserve_spans
}

/// What one of several sequences takes of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Tokens held, at least 1.
    pub tokens: usize,
    /// Format of its sealed blocks.
    pub floor: PageFormat,
    /// Tokens of each step: their blocks are open, f16.
    pub step_tokens: usize,
}

/// Steps in which a larger budget is looked for: the finest in which spans grow.
const BUDGET_STEP_BYTES: usize = 4 << 10;

/// Smallest budget in bytes with which a sequence of this contract can run at all: one open f16 block,
/// and (at the contract's floor) the sinks' block and the recent tail of [`TAIL_TOKENS`], what windows
/// hold, the re-encoding reserve and the tables.
///
/// A larger budget may be cut in larger spans and hold less. Where that of `config` is above the smallest
/// and yet does not hold the minimum for that reason, it is the next larger one that does.
pub fn minimum_budget_bytes(config: &PoolConfig, contract: Fidelity) -> usize {
    let block_size = config.block_size();
    let tokens = (2 + TAIL_TOKENS.div_ceil(block_size)) * block_size;
    let need = |group: &GroupConfig| {
        let tokens = group.window.map_or(tokens, |window| window + 2 * block_size);
        group_need(group, tokens, 1)
    };
    let needs: Vec<GroupNeed> = config.groups.iter().map(need).collect();
    smallest_budget(config, &needs, config.floor(contract))
}

/// The smallest budget in bytes whose own spans hold `needs`; where `config` asks for more and its spans,
/// which are larger, do not hold them, the next larger one that does.
fn smallest_budget(config: &PoolConfig, needs: &[GroupNeed], floor: PageFormat) -> usize {
    let minimum_at = |budget_bytes: usize| {
        let geometry = Geometry::new(&PoolConfig { budget_bytes, ..config.clone() });
        let spans = spans_for(config, &geometry, needs, floor);
        spans * (geometry.span_bytes + geometry.table_bytes_per_span)
    };
    // The budget decides how spans are cut, and that decides the minimum: look for a budget that
    // satisfies its own geometry, then for a smaller one that does.
    let mut budget_bytes = minimum_at(0);
    for _ in 0..16 {
        let minimum = minimum_at(budget_bytes);
        if minimum > budget_bytes || (minimum < budget_bytes && minimum_at(minimum) <= minimum) {
            budget_bytes = minimum;
        } else {
            break;
        }
    }
    let asked = config.budget_bytes;
    if asked <= budget_bytes || minimum_at(asked) <= asked {
        return budget_bytes;
    }
    let larger = (1..4096).map(|step| asked + step * BUDGET_STEP_BYTES);
    larger.into_iter().find(|&larger| minimum_at(larger) <= larger).unwrap_or(usize::MAX)
}

impl BlockPool {
    fn spans_for_tokens(&self, tokens: usize, floor: PageFormat, step_tokens: usize) -> usize {
        let config = self.config();
        let need = |group: &GroupConfig| group_need(group, tokens, step_tokens);
        let needs: Vec<GroupNeed> = config.groups.iter().map(need).collect();
        spans_for(config, &self.shared.geometry, &needs, floor)
    }

    /// Budget bytes one sequence of `tokens` tokens takes when every sealed block is in `floor`, sinks
    /// and tail included (they stay f16 only by preference), and the blocks of the last `step_tokens`
    /// (1 for decode, the chunk for prefill, wherever it begins) are open f16: pages rounded up to
    /// spans, tables, reserve.
    pub fn bytes_for_tokens(&self, tokens: usize, floor: PageFormat, step_tokens: usize) -> usize {
        let geometry = &self.shared.geometry;
        let spans = self.spans_for_tokens(tokens, floor, step_tokens);
        spans * (geometry.span_bytes + geometry.table_bytes_per_span)
    }

    /// A budget in bytes with which a pool like this one holds that sequence: other budgets are cut in spans
    /// of other sizes, so that [`bytes_for_tokens`](Self::bytes_for_tokens) need not do.
    pub fn budget_for_tokens(&self, tokens: usize, floor: PageFormat, step_tokens: usize) -> usize {
        let config = self.config();
        let need = |group: &GroupConfig| group_need(group, tokens, step_tokens);
        let needs: Vec<GroupNeed> = config.groups.iter().map(need).collect();
        smallest_budget(config, &needs, floor)
    }

    /// Whether one sequence of `tokens` tokens, alone in the pool, fits with its sealed blocks in
    /// `floor`, going on by `step_tokens` at a time.
    pub fn fits(&self, tokens: usize, floor: PageFormat, step_tokens: usize) -> bool {
        self.spans_for_tokens(tokens, floor, step_tokens) <= self.shared.geometry.spans
    }

    /// Bytes of the pages of one sequence, partly filled blocks whole, spans and tables apart.
    pub fn page_bytes(&self, need: Need) -> usize {
        self.shared.page_bytes_sum(&self.pages_for(need))
    }

    /// Pages per size class of one sequence.
    pub(crate) fn pages_for(&self, need: Need) -> Vec<usize> {
        let (config, geometry) = (self.config(), &self.shared.geometry);
        let Need { tokens, floor, step_tokens } = need;
        let of_group = |group: &GroupConfig| group_need(group, tokens, step_tokens);
        let of_groups: Vec<GroupNeed> = config.groups.iter().map(of_group).collect();
        let mut pages = vec![0; geometry.class_bytes.len()];
        add_pages(config, geometry, &of_groups, floor, &mut pages);
        pages
    }

    /// Whether sequences fit side by side, each with its sealed blocks in its floor; what they share is
    /// counted as often as it is needed.
    pub fn fits_together(&self, needs: impl IntoIterator<Item = Need>) -> bool {
        let (config, geometry) = (self.config(), &self.shared.geometry);
        let mut pages = vec![0; geometry.class_bytes.len()];
        for Need { tokens, floor, step_tokens } in needs {
            let need = |group: &GroupConfig| group_need(group, tokens, step_tokens);
            let of_groups: Vec<GroupNeed> = config.groups.iter().map(need).collect();
            add_pages(config, geometry, &of_groups, floor, &mut pages);
        }
        spans_of(geometry, &pages) <= geometry.spans
    }

    /// Whether a request of `tokens` tokens in all (prompt + `max_tokens`) fits at f16 alone: relief
    /// then never touches it, as long as it is alone.
    pub fn fits_at_f16(&self, tokens: usize, step_tokens: usize) -> bool {
        self.fits(tokens, PageFormat::F16, step_tokens)
    }

    /// Most tokens of one sequence, alone in the pool, with every sealed block in `floor`; `None` where
    /// there is no limit (every group has a window).
    pub fn capacity_tokens(&self, floor: PageFormat) -> Option<usize> {
        let windows_only = self.config().groups.iter().all(|group| group.window.is_some());
        if windows_only {
            return None;
        }
        let block_size = self.config().block_size();
        // No token is smaller than one byte of the budget: a bound that never fits.
        let (mut fits, mut too_many) = (0, self.config().budget_bytes / block_size + 1);
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            if self.fits(middle * block_size, floor, 1) { fits = middle } else { too_many = middle }
        }
        Some(fits * block_size)
    }

    /// Most tokens a request of `contract` may hold, alone; `None` where blocks may be dropped or every
    /// group has a window: then only the trained context and the caller's patience limit it.
    pub fn token_limit(&self, contract: Fidelity) -> Option<usize> {
        let unlimited = self.config().ladder.permits(contract, Rung::Evict);
        if unlimited { None } else { self.capacity_tokens(self.config().floor(contract)) }
    }
}
