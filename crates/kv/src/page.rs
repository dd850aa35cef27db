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

/// How the numbers of K, or of V, are stored in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PartFormat {
    /// IEEE half precision.
    F16,
    /// Asymmetric 8-bit codes, `value = min + scale * code`.
    U8,
    /// Asymmetric 4-bit codes on the 8-bit grid, `value = min + 17 * scale * code`, with the scale and
    /// minimum of the 8-bit codes (so that 8 bits to 4 needs no float; decision 0007). Sixteen values
    /// (in the order of the 8-bit codes) are a vector; vectors `2i` and `2i + 1` share sixteen bytes,
    /// the first in the low nibbles, the second in the high ones.
    U4,
    /// 8-bit floats of OCP "FP8" E4M3FN (no infinity, largest 448), `value = scale * code`.
    E4M3,
    /// 8-bit floats of OCP "FP8" E5M2 (largest finite 57,344), `value = scale * code`.
    E5M2,
}

/// What goes with the codes of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// Nothing.
    None,
    /// f16 scale and minimum: of K per channel and key group, of V per token and value group.
    Grouped,
    /// One f32 scale for the whole part of a head.
    Whole,
}

impl PartFormat {
    /// Bits of a value, scales apart.
    pub const fn bits(self) -> usize {
        match self {
            PartFormat::F16 => 16,
            PartFormat::U8 | PartFormat::E4M3 | PartFormat::E5M2 => 8,
            PartFormat::U4 => 4,
        }
    }

    /// What goes with the codes.
    pub const fn scaling(self) -> Scaling {
        match self {
            PartFormat::F16 => Scaling::None,
            PartFormat::U8 | PartFormat::U4 => Scaling::Grouped,
            PartFormat::E4M3 | PartFormat::E5M2 => Scaling::Whole,
        }
    }
}

/// How the numbers of a page are stored. Ordered by fidelity: a smaller value is more precise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageFormat {
    /// IEEE half precision, 16 bits a value.
    F16,
    /// 8-bit codes for K and V; 9 bits a value with scales.
    Int8,
    /// FP8 E4M3FN with one scale for K and one for V of a head; 8 bits a value.
    Fp8E4M3,
    /// FP8 E5M2, the same.
    Fp8E5M2,
    /// 8-bit codes for K, 4-bit codes for V; 7 bits a value with scales.
    K8V4,
    /// 4-bit codes for K and V; 5 bits a value with scales.
    Int4,
}

impl PageFormat {
    /// Every format that exists, most precise first.
    pub const ALL: [PageFormat; 6] = [
        PageFormat::F16,
        PageFormat::Int8,
        PageFormat::Fp8E4M3,
        PageFormat::Fp8E5M2,
        PageFormat::K8V4,
        PageFormat::Int4,
    ];

    /// The name used on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PageFormat::F16 => "f16",
            PageFormat::Int8 => "int8",
            PageFormat::Fp8E4M3 => "fp8-e4m3",
            PageFormat::Fp8E5M2 => "fp8-e5m2",
            PageFormat::K8V4 => "k8v4",
            PageFormat::Int4 => "int4",
        }
    }

    /// How K is stored.
    pub const fn keys(self) -> PartFormat {
        match self {
            PageFormat::F16 => PartFormat::F16,
            PageFormat::Int8 | PageFormat::K8V4 => PartFormat::U8,
            PageFormat::Fp8E4M3 => PartFormat::E4M3,
            PageFormat::Fp8E5M2 => PartFormat::E5M2,
            PageFormat::Int4 => PartFormat::U4,
        }
    }

    /// How V is stored.
    pub const fn values(self) -> PartFormat {
        match self {
            PageFormat::K8V4 => PartFormat::U4,
            other => other.keys(),
        }
    }

    /// Whether a page may be re-encoded from this format to `target`: one that is strictly less
    /// precise and smaller. f16 goes to all; int8 and fp8 go to K8V4 and int4; K8V4 goes to int4.
    pub fn can_become(self, target: PageFormat) -> bool {
        self < target && (self == PageFormat::F16 || target >= PageFormat::K8V4)
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

/// Byte offsets of the parts of one KV head, from the start of the page. Parts that a format does not
/// have are empty (the offset of the next part).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// K values or codes, `[groups][head_dim][G]`.
    pub k: usize,
    /// V values or codes, `[block_size][head_dim]`.
    pub v: usize,
    /// K scales: f16 `[groups][head_dim]` ([`Scaling::Grouped`]) or one f32 ([`Scaling::Whole`]).
    pub k_scale: usize,
    /// K minima, f16 `[groups][head_dim]`.
    pub k_min: usize,
    /// V scales: f16 `[block_size][value_groups]` or one f32, right after K's.
    pub v_scale: usize,
    /// V minima, f16 `[block_size][value_groups]`.
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
        let code_bytes = |part: PartFormat| align_up(values * part.bits() / 8);
        let (keys, of_values) = (format.keys(), format.values());
        let k = start;
        let v = k + code_bytes(keys);
        let k_scale = v + code_bytes(of_values);
        if keys.scaling() != Scaling::Grouped {
            // Two f32 scales side by side, or nothing.
            let whole = usize::from(keys.scaling() == Scaling::Whole);
            let end = k_scale + whole * PAGE_ALIGN;
            let v_scale = k_scale + whole * size_of::<f32>();
            return HeadLayout { k, v, k_scale, k_min: end, v_scale, v_min: end, end };
        }
        let k_bytes = align_up(2 * self.key_groups() * self.head_dim);
        let v_bytes = align_up(2 * self.block_size * self.value_groups());
        let k_min = k_scale + k_bytes;
        let v_scale = k_min + k_bytes;
        let v_min = v_scale + v_bytes;
        HeadLayout { k, v, k_scale, k_min, v_scale, v_min, end: v_min + v_bytes }
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
    /// Index in [`GroupView::runs`] of its layer: which query rotation to use. 0 unless positions are
    /// relative.
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
    /// `layers[i]` = pages of the group's `i`-th layer in token order (dropped blocks absent; layers may
    /// hold different blocks).
    pub layers: Vec<Vec<PageRef>>,
    /// `runs[i][r]` = index in `shifts` of run `r` of the group's `i`-th layer; at least one run a layer,
    /// at most 256. `0..shifts.len()` where all layers hold the same blocks.
    pub runs: Vec<Vec<u32>>,
    /// Distinct query rotations of all layers, largest first: for a page of layer `i` the query of
    /// original position `p` is rotated to `p - shifts[runs[i][page.run]]`. `[0]` while positions are
    /// original; with relative positions a run's shift is the number of tokens dropped after it in its
    /// layer, so the last one is 0 (kv-memory point 14).
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
    fn sizes_follow_from_bits_and_scales() {
        let values = 2 * 3 * 64 * 32;
        let bits = |format| SMOLLM2.page_bytes(format) * 8 / values;
        assert_eq!(PageFormat::ALL.map(bits), [16, 9, 8, 8, 7, 5]);
        // One cache line of scales a head.
        assert_eq!(SMOLLM2.page_bytes(PageFormat::Fp8E4M3), values + 3 * 64);
    }

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        for block_size in [16, 32, 64, 128] {
            for head_dim in [16, 48, 64, 80, 128, 256] {
                let shape = PageShape { kv_heads: 2, head_dim, block_size };
                for format in PageFormat::ALL {
                    let a = shape.head(format, 0);
                    let b = shape.head(format, 1);
                    assert!(a.k < a.v && a.v < a.k_scale.max(a.end));
                    assert!(a.k_scale <= a.v_scale && a.k_min <= a.end && a.v_min <= a.end);
                    let aligned = [a.k, a.v, a.k_scale, a.k_min, a.v_min, a.end];
                    assert!(aligned.iter().all(|part| part % PAGE_ALIGN == 0));
                    assert_eq!(b.k, a.end);
                    assert_eq!(b.v - b.k, a.v - a.k);
                }
            }
        }
    }

    #[test]
    fn precision_only_falls() {
        for from in PageFormat::ALL {
            for to in PageFormat::ALL {
                let smaller = SMOLLM2.page_bytes(to) < SMOLLM2.page_bytes(from);
                assert!(!from.can_become(to) || (smaller && from < to));
            }
            assert_eq!(from.can_become(PageFormat::Int4), from != PageFormat::Int4);
        }
    }
}
