//! The bytes of one block in one layer: formats, their layout and sizes.
//!
//! A **page** holds `block_size` tokens of one layer, all KV heads. Per KV head it holds K, then V,
//! then (lossy formats) their scales; each part starts on a 64-byte boundary of the page.
//!
//! K is *channel-major* inside a key group of `G = min(block_size, 32)` tokens:
//! `k[group][channel][token in group]`. The scores of a whole group then accumulate lane-wise with no
//! horizontal sums, and per-channel scales fold into the query once per group. V is *token-major*:
//! `v[token][channel]`. The open block has the same layout as a sealed one, so sealing moves no byte
//! (decision 0002).

/// Channels that share one scale and minimum in a lossy V row (KIVI, arXiv 2402.02750).
pub const VALUE_GROUP: usize = 32;
/// Tokens of the largest key group: the unit of per-channel K scales and of online softmax.
pub const KEY_GROUP_MAX: usize = 32;
/// Alignment of pages in the arena and of parts in a page, in bytes; also the unit of `PageRef::offset`.
pub const PAGE_ALIGN: usize = 64;

/// How the numbers of a page are stored. Ordered by fidelity: a smaller value is more precise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageFormat {
    /// IEEE half precision, 16 bits a value.
    F16,
    /// Asymmetric 8-bit codes, `value = min + scale * code`; 9 bits a value with scales. K per channel
    /// over a key group, V per token over `VALUE_GROUP` channels.
    Int8,
}

impl PageFormat {
    /// Every format that exists, most precise first.
    pub const ALL: [PageFormat; 2] = [PageFormat::F16, PageFormat::Int8];

    /// The name used on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PageFormat::F16 => "f16",
            PageFormat::Int8 => "int8",
        }
    }
}

/// Shape of the pages of one KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Channels of a head; a multiple of 16.
    pub head_dim: usize,
    /// Tokens of a block: 16, 32, 64 or 128.
    pub block_size: usize,
}

/// Byte offsets of the parts of one KV head, from the start of the page. Scale parts are empty
/// (equal offsets) in `F16`. Scales and minima are f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// K values or codes, `[groups][head_dim][G]`.
    pub k: usize,
    /// V values or codes, `[block_size][head_dim]`.
    pub v: usize,
    /// K scales, `[groups][head_dim]`.
    pub k_scale: usize,
    /// K minima, `[groups][head_dim]`.
    pub k_min: usize,
    /// V scales, `[block_size][value_groups]`.
    pub v_scale: usize,
    /// V minima, `[block_size][value_groups]`.
    pub v_min: usize,
    /// First byte after this head.
    pub end: usize,
}

fn align_up(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE_ALIGN)
}

impl PageShape {
    /// Tokens of a key group.
    pub fn key_group(&self) -> usize {
        self.block_size.min(KEY_GROUP_MAX)
    }

    /// Key groups of a block.
    pub fn key_groups(&self) -> usize {
        self.block_size / self.key_group()
    }

    /// Value groups of a head; the last may be shorter than `VALUE_GROUP`.
    pub fn value_groups(&self) -> usize {
        self.head_dim.div_ceil(VALUE_GROUP)
    }

    /// Where the parts of KV head `head` lie in a page of `format`.
    pub fn head(&self, format: PageFormat, head: usize) -> HeadLayout {
        self.head_from(format, head * self.head_from(format, 0).end)
    }

    fn head_from(&self, format: PageFormat, start: usize) -> HeadLayout {
        let values = self.block_size * self.head_dim;
        let (code_bytes, lossy) = match format {
            PageFormat::F16 => (2 * values, 0),
            PageFormat::Int8 => (values, 1),
        };
        let k_scales = lossy * 2 * self.key_groups() * self.head_dim;
        let v_scales = lossy * 2 * self.block_size * self.value_groups();
        let k = start;
        let v = k + align_up(code_bytes);
        let k_scale = v + align_up(code_bytes);
        let k_min = k_scale + align_up(k_scales);
        let v_scale = k_min + align_up(k_scales);
        let v_min = v_scale + align_up(v_scales);
        HeadLayout { k, v, k_scale, k_min, v_scale, v_min, end: v_min + align_up(v_scales) }
    }

    /// Bytes of a page in `format`, scales included.
    pub fn page_bytes(&self, format: PageFormat) -> usize {
        self.kv_heads * self.head(format, 0).end
    }
}

/// What a kernel needs to know of one page: where it is, what is in it, how the query must be rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRef {
    /// Offset in the arena, in units of `PAGE_ALIGN` bytes.
    pub offset: u32,
    /// Original position of the block's first token; token `i` of the block is at `first + i`.
    pub first: u32,
    /// Format of this page.
    pub format: PageFormat,
    /// Index of the query rotation to use (`SequenceView::shifts`); 0 unless positions are relative.
    pub run: u8,
}

impl PageRef {
    /// Byte offset in the arena.
    pub fn byte_offset(&self) -> usize {
        self.offset as usize * PAGE_ALIGN
    }
}

/// A sequence's pages in one KV group, as kernels read them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupView {
    /// `layers[i]` = pages of the group's `i`-th layer in token order (dropped blocks absent).
    pub layers: Vec<Vec<PageRef>>,
    /// Query rotation per run: the query of original position `p` is rotated to `p - shifts[run]`.
    /// `[0]` while positions are original; with relative positions run r's shift is the number of
    /// tokens dropped after it, so the last run's is 0 (kv-memory point 14).
    pub shifts: Vec<u32>,
}

/// A sequence's pages in every KV group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceView {
    /// One view per KV group of the model, in the model's order.
    pub groups: Vec<GroupView>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMOLLM2: PageShape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };

    #[test]
    fn sizes_are_sixteen_and_nine_bits_a_value() {
        let values = 2 * 3 * 64 * 32;
        assert_eq!(SMOLLM2.page_bytes(PageFormat::F16), values * 2);
        assert_eq!(SMOLLM2.page_bytes(PageFormat::Int8), values * 9 / 8);
    }

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        for block_size in [16, 32, 64, 128] {
            for head_dim in [16, 48, 64, 80, 128, 256] {
                let shape = PageShape { kv_heads: 2, head_dim, block_size };
                for format in PageFormat::ALL {
                    let a = shape.head(format, 0);
                    let b = shape.head(format, 1);
                    let parts = [a.k, a.v, a.k_scale, a.k_min, a.v_scale, a.v_min, a.end];
                    assert!(parts.windows(2).all(|w| w[0] <= w[1]));
                    assert!(parts.iter().all(|p| p % PAGE_ALIGN == 0));
                    assert_eq!(b.k, a.end);
                    assert_eq!(b.v - b.k, a.v - a.k);
                }
            }
        }
    }
}
