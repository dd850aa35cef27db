//! The fake model: one pass of a sequence's tokens over its real pages.

use std::fmt;

use reef_kernels::dispatch::Tier;
use reef_kernels::page::decode_page;
use reef_kernels::page::store::{NewTokens, store_tokens};
use reef_kernels::pool::BarrierPool;
use reef_kv::GroupConfig;
use reef_kv::arena::Arena;
use reef_kv::page::{PageRef, PageShape, SequenceView};

use crate::content::{self, Mark, UNKNOWN_LINK, next_link, read_mark};
use crate::random::mix;

/// Tokens to compute, at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// Original position of the first.
    pub first_position: u32,
    /// The sequence's pages.
    pub view: &'a SequenceView,
    /// Link before position 0: whose text it is.
    pub root: u32,
}

/// Bytes that are not what the sequence has to find where its view points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misread {
    /// KV group.
    pub group: usize,
    /// Layer of the group.
    pub layer: usize,
    /// Position read.
    pub position: u32,
    /// What is wrong with it.
    pub what: &'static str,
    /// What was read, where it can be told.
    pub mark: Option<Mark>,
}

impl fmt::Display for Misread {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Misread { group, layer, position, what, mark } = self;
        write!(formatter, "group {group} layer {layer} position {position}: {what} ({mark:?})")
    }
}

/// The fake model with its buffers.
pub struct PageModel {
    groups: Vec<GroupConfig>,
    /// (group, layer) in the order of computation.
    order: Vec<(usize, usize)>,
    tier: Tier,
    threads: BarrierPool,
    keys: Vec<f32>,
    values: Vec<f32>,
    page: PageNumbers,
    /// Positions read in a layer, ascending, each with the sum of all digests up to it.
    sums: Vec<(u32, u64)>,
    links: Vec<u32>,
}

/// A page as numbers, token-major.
#[derive(Default)]
struct PageNumbers {
    /// `[kv_heads][block_size][head_dim]`, as they are decoded.
    head_keys: Vec<f32>,
    head_values: Vec<f32>,
    /// `[block_size][kv_heads * head_dim]`.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl PageNumbers {
    fn read(&mut self, shape: &PageShape, arena: &Arena, page: &PageRef) {
        let numbers = shape.kv_heads * shape.block_size * shape.head_dim;
        let lists = [&mut self.head_keys, &mut self.head_values, &mut self.keys, &mut self.values];
        lists.into_iter().for_each(|list| list.resize(numbers, 0.0));
        let bytes = &arena.bytes()[page.byte_offset()..][..shape.page_bytes(page.format)];
        decode_page(shape, page.format, bytes, &mut self.head_keys, &mut self.head_values);
        if shape.kv_heads == 1 {
            std::mem::swap(&mut self.keys, &mut self.head_keys);
            std::mem::swap(&mut self.values, &mut self.head_values);
            return;
        }
        let (dim, width) = (shape.head_dim, shape.head_dim * shape.kv_heads);
        for (index, from) in self.head_keys.chunks_exact(dim).enumerate() {
            let (head, token) = (index / shape.block_size, index % shape.block_size);
            self.keys[token * width + head * dim..][..dim].copy_from_slice(from);
        }
        for (index, from) in self.head_values.chunks_exact(dim).enumerate() {
            let (head, token) = (index / shape.block_size, index % shape.block_size);
            self.values[token * width + head * dim..][..dim].copy_from_slice(from);
        }
    }
}

impl PageModel {
    /// A model of these KV groups, each of whose tokens has at least
    /// [`MARK_BITS`](content::MARK_BITS) channels.
    pub fn new(groups: &[GroupConfig]) -> PageModel {
        let mut order: Vec<(usize, usize)> = Vec::new();
        for (group, config) in groups.iter().enumerate() {
            order.extend((0..config.layers).map(|layer| (group, layer)));
        }
        // Kinds of layers take turns, as in models that have several.
        order.sort_by_key(|&(group, layer)| (layer, group));
        PageModel {
            groups: groups.to_vec(),
            order,
            tier: Tier::detect(),
            threads: BarrierPool::new(1),
            keys: Vec::new(),
            values: Vec::new(),
            page: PageNumbers::default(),
            sums: Vec::new(),
            links: Vec::new(),
        }
    }

    /// Layers of all groups.
    pub fn layers(&self) -> usize {
        self.order.len()
    }

    /// Computes `rows` in the first `layers` layers: writes their KV, reads back all that they attend.
    /// Returns a state per row, from which its logits follow. What should not be there goes to `found`.
    pub fn compute(
        &mut self,
        arena: &Arena,
        rows: &Rows<'_>,
        layers: usize,
        found: &mut Vec<Misread>,
    ) -> Vec<u64> {
        self.link_rows(arena, rows);
        let position = |index: usize| u64::from(rows.first_position) + index as u64;
        let start = |(index, &token): (usize, &u32)| mix(u64::from(token) << 32 | position(index));
        let mut states: Vec<u64> = rows.tokens.iter().enumerate().map(start).collect();
        for number in 0..layers.min(self.order.len()) {
            self.write_layer(arena, rows, number, &states);
            self.read_layer(arena, rows, number, found);
            self.attend(rows, number, &mut states);
        }
        states
    }

    /// The links of `rows`, from that of the token before them, in whichever layer has it.
    fn link_rows(&mut self, arena: &Arena, rows: &Rows<'_>) {
        let mut link = match rows.first_position.checked_sub(1) {
            None => rows.root,
            Some(before) => self.link_at(arena, rows.view, before),
        };
        self.links.clear();
        for &token in rows.tokens {
            link = if link == UNKNOWN_LINK { link } else { next_link(link, token) };
            self.links.push(link);
        }
    }

    fn link_at(&mut self, arena: &Arena, view: &SequenceView, position: u32) -> u32 {
        for &(group, layer) in &self.order {
            let shape = &self.groups[group].shape;
            let pages = &view.groups[group].layers[layer];
            let index = pages.partition_point(|page| page.first <= position);
            let Some(page) = index.checked_sub(1).map(|index| &pages[index]) else { continue };
            let slot = (position - page.first) as usize;
            if slot < shape.block_size {
                self.page.read(shape, arena, page);
                let width = shape.kv_heads * shape.head_dim;
                let mark = read_mark(&self.page.keys[slot * width..][..width]);
                return mark.map_or(UNKNOWN_LINK, |mark| mark.link);
            }
        }
        UNKNOWN_LINK
    }

    fn write_layer(&mut self, arena: &Arena, rows: &Rows<'_>, number: usize, states: &[u64]) {
        let (group, layer) = self.order[number];
        let shape = self.groups[group].shape;
        let width = shape.kv_heads * shape.head_dim;
        self.keys.resize(rows.tokens.len() * width, 0.0);
        self.values.resize(rows.tokens.len() * width, 0.0);
        for (index, (&token, &state)) in rows.tokens.iter().zip(states).enumerate() {
            let mark = Mark {
                token,
                position: rows.first_position + index as u32,
                layer: number as u32,
                link: self.links[index],
            };
            let keys = &mut self.keys[index * width..][..width];
            content::write(mark, state, keys, &mut self.values[index * width..][..width]);
        }
        let tokens = NewTokens {
            first_position: rows.first_position,
            rows: rows.tokens.len(),
            stride: width,
            keys: &self.keys,
            values: &self.values,
        };
        let pages = &rows.view.groups[group].layers[layer];
        store_tokens(self.tier, &self.threads, &shape, arena, pages, &tokens);
    }

    /// Reads all pages that some row attends, checks whose bytes they hold, and sums up their digests.
    fn read_layer(
        &mut self,
        arena: &Arena,
        rows: &Rows<'_>,
        number: usize,
        found: &mut Vec<Misread>,
    ) {
        let (group, layer) = self.order[number];
        let GroupConfig { shape, window, .. } = self.groups[group];
        let view = &rows.view.groups[group];
        let end = rows.first_position + rows.tokens.len() as u32;
        let attended = window.map_or(0, |w| (rows.first_position + 1).saturating_sub(w as u32));
        let width = shape.kv_heads * shape.head_dim;
        self.sums.clear();
        let (mut sum, mut before) = (0u64, None);
        for page in &view.layers[layer] {
            if page.first >= end || page.first + shape.block_size as u32 <= attended {
                continue;
            }
            self.page.read(&shape, arena, page);
            let shift = view.shifts[view.runs[layer][page.run as usize] as usize];
            for slot in 0..shape.block_size.min((end - page.first) as usize) {
                let position = page.first + slot as u32;
                if position < attended {
                    continue;
                }
                let keys = &self.page.keys[slot * width..][..width];
                let values = &self.page.values[slot * width..][..width];
                let mark = read_mark(keys);
                let expected = (position, number as u32, rows.root);
                if let Some(what) = fault(mark, before, expected) {
                    found.push(Misread { group, layer, position, what, mark });
                }
                before = mark;
                sum = sum.wrapping_add(mix(content::digest(keys, values) ^ u64::from(shift)));
                self.sums.push((position, sum));
            }
        }
    }

    /// Each row takes up what it attends.
    fn attend(&mut self, rows: &Rows<'_>, number: usize, states: &mut [u64]) {
        let window = self.groups[self.order[number].0].window;
        let up_to = |end: u32| {
            let index = self.sums.partition_point(|&(position, _)| position < end);
            index.checked_sub(1).map_or(0, |index| self.sums[index].1)
        };
        for (index, state) in states.iter_mut().enumerate() {
            let position = rows.first_position + index as u32;
            let attended = window.map_or(0, |w| (position + 1).saturating_sub(w as u32));
            let sum = up_to(position + 1).wrapping_sub(up_to(attended));
            *state = mix(*state ^ sum.wrapping_add(number as u64));
        }
    }
}

/// What is wrong with a token that was read at `position` of layer `layer`, behind `before`.
fn fault(
    mark: Option<Mark>,
    before: Option<Mark>,
    (position, layer, root): (u32, u32, u32),
) -> Option<&'static str> {
    let Some(mark) = mark else { return Some("no token's bytes") };
    if mark.position != position {
        return Some("another position's bytes");
    }
    if mark.layer != layer {
        return Some("another layer's bytes");
    }
    let follows = match before {
        _ if mark.link == UNKNOWN_LINK => true,
        None => position > 0 || mark.link == next_link(root, mark.token),
        Some(before) if before.position + 1 != position => true,
        Some(before) if before.link == UNKNOWN_LINK => false,
        Some(before) => mark.link == next_link(before.link, mark.token),
    };
    if follows { None } else { Some("bytes of another text") }
}
