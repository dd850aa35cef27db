//! The naive twin: every block is an object that holders point to, every sequence knows the tokens it has
//! written, every page is checked row by row.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use reef_kv::page::{PageFormat, PageRef};
use reef_kv::*;

use crate::BLOCK;
use crate::world::{page_bytes, write_page};

/// What the twin knows of a block; whoever holds it points to the same one.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// `None`: dropped in that layer.
    pub layers: Vec<Option<PageFormat>>,
    /// A kernel panicked in it: which of its pages it did is looked up.
    pub disturbed: bool,
    /// The worst that its computation attended, since it was sealed.
    pub context: Fidelity,
    pub cached: bool,
    /// It has been forked.
    pub was_shared: bool,
}

pub type Shared = Rc<RefCell<Block>>;

impl Block {
    pub fn open(layers: usize) -> Shared {
        let layers = vec![Some(PageFormat::F16); layers];
        let context = Fidelity::Exact;
        let (disturbed, cached, was_shared) = (false, false, false);
        Rc::new(RefCell::new(Block { layers, disturbed, context, cached, was_shared }))
    }

    pub fn copied(&self) -> Shared {
        Rc::new(RefCell::new(Block { cached: false, was_shared: false, ..self.clone() }))
    }

    pub fn is_whole(&self) -> bool {
        self.layers.iter().all(Option::is_some)
    }

    pub fn is_f16(&self) -> bool {
        self.layers.iter().all(|format| *format == Some(PageFormat::F16))
    }

    /// The worst of formats and context.
    pub fn fidelity(&self) -> Fidelity {
        self.formats().fold(self.context, Fidelity::max)
    }

    /// The worst format, as a contract.
    pub fn formats(&self) -> impl Iterator<Item = Fidelity> + '_ {
        let strictest = |format: &PageFormat| {
            let permits = |contract: &Fidelity| contract.permits_format(*format);
            Fidelity::ALL.into_iter().find(permits).unwrap()
        };
        self.layers.iter().flatten().map(strictest)
    }
}

/// What the twin knows of a sequence.
#[derive(Clone, Debug)]
pub struct Twin {
    pub blocks: BTreeMap<(usize, usize), Shared>,
    /// Every token written so far, accepted or not: each is like no other.
    pub values: Vec<u64>,
    pub next: usize,
    pub dropped_in: BTreeMap<(usize, usize), usize>,
    pub attended: Fidelity,
}

impl Default for Twin {
    fn default() -> Twin {
        Twin {
            blocks: BTreeMap::new(),
            values: Vec::new(),
            next: 0,
            dropped_in: BTreeMap::new(),
            attended: Fidelity::Exact,
        }
    }
}

impl Twin {
    /// Without what was not accepted.
    pub fn trim(&mut self) {
        let next = self.next;
        self.values.truncate(next);
        self.blocks.retain(|(_, first), _| *first < next);
    }

    /// The same with blocks of its own.
    pub fn apart(&self) -> Twin {
        let apart = |(at, block): (&_, &Shared)| (*at, block.borrow().copied());
        Twin { blocks: self.blocks.iter().map(apart).collect(), ..self.clone() }
    }

    /// Blocks that `tokens` more tokens write in and that are there already.
    pub fn written(&self, tokens: usize) -> impl Iterator<Item = (&(usize, usize), &Shared)> {
        let (next, end) = (self.next, self.next + tokens);
        let open = move |first: usize| first + BLOCK > next && first < end && tokens > 0;
        self.blocks.iter().filter(move |((_, first), _)| open(*first))
    }
}

/// The byte that fills the rows of this token in a layer.
pub fn stamp(value: u64, group: usize, layer: usize) -> u8 {
    let mixed = value * 131 + group as u64 * 31 + layer as u64 * 17;
    (mixed % 251) as u8
}

/// Whether the f16 page that begins with this row holds a NaN.
pub fn has_nan(first_row: u8) -> bool {
    first_row.is_multiple_of(31)
}

/// The part of a page of `page_bytes` bytes that is `row`'s.
pub fn row(page_bytes: usize, row: usize) -> std::ops::Range<usize> {
    let row_bytes = page_bytes / BLOCK;
    row * row_bytes..(row + 1) * row_bytes
}

/// An encode kernel that keeps every row's stamp.
pub fn keep_rows(job: &mut EncodeJob<'_>) {
    assert_eq!(job.source.len(), job.shape.page_bytes(job.source_format));
    assert_eq!(job.target.len(), job.shape.page_bytes(job.target_format));
    let target_bytes = job.target.len();
    for index in 0..BLOCK {
        let byte = job.source[row(job.source.len(), index).start];
        job.target[row(target_bytes, index)].fill(byte);
    }
}

/// Calls `visit(group, layer, page)` for every page that a sequence shows.
pub fn for_each_page(sequence: &Sequence, mut visit: impl FnMut(usize, usize, &PageRef)) {
    for (group, view) in sequence.view().groups.iter().enumerate() {
        for (layer, pages) in view.layers.iter().enumerate() {
            pages.iter().for_each(|page| visit(group, layer, page));
        }
    }
}

/// The formats of every block that a sequence shows.
pub fn shown(sequence: &Sequence) -> BTreeMap<(usize, usize), Vec<Option<PageFormat>>> {
    let mut blocks: BTreeMap<(usize, usize), Vec<Option<PageFormat>>> = BTreeMap::new();
    let layers = |group: usize| sequence.pool().config().groups[group].layers;
    for_each_page(sequence, |group, layer, page| {
        let absent = || vec![None; layers(group)];
        let block = blocks.entry((group, page.first as usize)).or_insert_with(absent);
        block[layer] = Some(page.format);
    });
    blocks
}

/// Writes tokens `from..` of `values`, as a model would write K and V.
pub fn write_rows(sequence: &Sequence, values: &[u64], from: usize) {
    let pool = sequence.pool();
    for_each_page(sequence, |group, layer, page| {
        let first = page.first as usize;
        let written = from.max(first)..values.len().min(first + BLOCK);
        if written.is_empty() {
            return;
        }
        let mut bytes = page_bytes(pool, group, page).to_vec();
        for position in written {
            let range = row(bytes.len(), position - first);
            bytes[range].fill(stamp(values[position], group, layer));
        }
        write_page(pool, page, &bytes);
    });
}

/// Fails where a row that the sequence shows does not hold its token.
pub fn check_rows(sequence: &Sequence, values: &[u64]) {
    for_each_page(sequence, |group, layer, page| {
        let bytes = page_bytes(sequence.pool(), group, page);
        let first = page.first as usize;
        for (index, value) in values.iter().skip(first).take(BLOCK).enumerate() {
            let expected = stamp(*value, group, layer);
            let good = bytes[row(bytes.len(), index)].iter().all(|&byte| byte == expected);
            assert!(good, "group {group} layer {layer} position {}: foreign bytes", first + index);
        }
    });
}
