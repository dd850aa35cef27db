//! Weights as the kernels read them: panels of sixteen output rows, the file's bits per weight.
//!
//! # Layout
//! A panel is one contiguous stream over k, so a thread that owns neighbouring panels reads memory in
//! order. Quantised panels are a run of groups (32 k; 16 k for Q6_K), in k-quants with a head per 256 k:
//!
//! | part | bytes | formats |
//! |---|---|---|
//! | head: f16 `d`, f16 `dmin`, sixteen rows each | 64 (Q6_K: 32, no dmin) | k-quants |
//! | u8 sub-scales, u8 sub-minima, sixteen rows each | 32 (Q6_K: 16, no minima) | k-quants |
//! | codes, low 4 bits (8 bits for Q8_0) | 16 rows × group × bits / 8 | all |
//! | codes, remaining 1 or 2 bits | 64 | 5- and 6-bit |
//! | f16 `d`, f16 `m`, sixteen rows each | 32 or 64 | the others |
//!
//! A *step* is four k: 64 codes in the order `[16 rows][4 k]`, what one `vpdpbusd` eats. Low nibbles of
//! 64-byte vector v hold step 2v, high nibbles step 2v + 1. The fifth bit of byte i in step s is bit s
//! of byte i of the last vector; the sixth and fifth bits (Q6_K) are its bits 2s and 2s + 1.
//!
//! F32, F16 and BF16 panels are `[k][16 rows]`. Rows beyond the matrix are zeros.

use super::format::{RawBlock, WeightFormat, float_value};
use super::scalar;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

/// Output rows of a panel.
pub const PANEL_ROWS: usize = 16;
/// Codes (and bytes, once unpacked) of a step: sixteen rows times four k.
pub(super) const STEP_CODES: usize = 64;
/// Above this an allocation asks for huge pages: fewer TLB misses while streaming.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Where the parts of a quantised panel lie; see the module's table. All in bytes unless said.
#[derive(Clone, Copy)]
pub(super) struct PanelLayout {
    /// k per group.
    pub group: usize,
    /// Groups that share a head (1 without heads).
    pub groups_per_head: usize,
    pub head_bytes: usize,
    /// Sub-scales and sub-minima at the start of a group.
    pub side_bytes: usize,
    /// Low bits of the codes.
    pub low_bytes: usize,
    /// High bits of the codes.
    pub high_bytes: usize,
    /// d and m at the end of a group.
    pub tail_bytes: usize,
    /// Bits of a code.
    pub bits: usize,
    /// What is subtracted from a code: 0 or 2^(bits - 1).
    pub zero: i32,
}

impl PanelLayout {
    /// The layout of a quantised format.
    pub const fn of(format: WeightFormat) -> PanelLayout {
        let (bits, zero, tail_bytes) = match format {
            WeightFormat::Q4_0 => (4, 8, 32),
            WeightFormat::Q4_1 => (4, 0, 64),
            WeightFormat::Q5_0 => (5, 16, 32),
            WeightFormat::Q5_1 => (5, 0, 64),
            WeightFormat::Q8_0 => (8, 128, 32),
            WeightFormat::Q4_K => (4, 0, 0),
            WeightFormat::Q5_K => (5, 0, 0),
            WeightFormat::Q6_K => (6, 32, 0),
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
                panic!("a float format has no groups")
            }
        };
        let k_quant = format.block_values() == 256;
        let six = matches!(format, WeightFormat::Q6_K);
        let group = if six { 16 } else { 32 };
        PanelLayout {
            group,
            groups_per_head: if k_quant { 256 / group } else { 1 },
            head_bytes: if !k_quant {
                0
            } else if six {
                32
            } else {
                64
            },
            side_bytes: if !k_quant {
                0
            } else if six {
                16
            } else {
                32
            },
            low_bytes: PANEL_ROWS * group * (if bits == 8 { 8 } else { 4 }) / 8,
            high_bytes: if bits == 5 || bits == 6 { STEP_CODES } else { 0 },
            tail_bytes,
            bits,
            zero,
        }
    }

    pub const fn group_bytes(&self) -> usize {
        self.side_bytes + self.low_bytes + self.high_bytes + self.tail_bytes
    }

    /// Offset in the panel of the head that group `group` belongs to.
    pub const fn head_offset(&self, group: usize) -> usize {
        let head_stride = self.head_bytes + self.groups_per_head * self.group_bytes();
        group / self.groups_per_head * head_stride
    }

    /// Offset in the panel of a group's first byte (its side numbers, else its codes).
    pub const fn group_offset(&self, group: usize) -> usize {
        let in_head = group % self.groups_per_head * self.group_bytes();
        self.head_offset(group) + self.head_bytes + in_head
    }

    /// Offset in the panel of a group's codes.
    pub const fn codes_offset(&self, group: usize) -> usize {
        self.group_offset(group) + self.side_bytes
    }

    /// Bytes of a panel over `cols` k.
    pub const fn panel_bytes(&self, cols: usize) -> usize {
        self.head_offset(cols / self.group)
    }
}

/// Why a tensor could not be packed. Says the number found and what it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the shape given
pub enum PackError {
    /// A row is not a whole number of blocks.
    Columns { format: WeightFormat, cols: usize },
    /// The bytes given are not rows × row bytes.
    Length { format: WeightFormat, rows: usize, cols: usize, expected: usize, found: usize },
    /// The packed size does not fit the address space.
    TooLarge { rows: usize, cols: usize },
}

impl fmt::Display for PackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PackError::Columns { format, cols } => write!(
                f,
                "row length {cols} of a {format} tensor is not a positive multiple of {}; \
                 convert the tensor to F16 or Q8_0",
                format.block_values()
            ),
            PackError::Length { format, rows, cols, expected, found } => write!(
                f,
                "a {rows}x{cols} {format} tensor takes {expected} bytes but {found} were given; \
                 the file is damaged, fetch it again"
            ),
            PackError::TooLarge { rows, cols } => {
                write!(f, "a {rows}x{cols} tensor does not fit in memory; the file is damaged")
            }
        }
    }
}

impl std::error::Error for PackError {}

/// A weight matrix `[rows, cols]` (output features × input features) in panels; see the module.
pub struct PackedMatrix {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    panel_bytes: usize,
    data: AlignedBytes,
}

/// Bytes read between two releases: a small part of what a process may have beside its weights.
const RELEASE_BYTES: usize = 4 << 20;

impl PackedMatrix {
    /// Repacks a row-major GGUF tensor of `rows` rows of `cols` values.
    ///
    /// # Errors
    /// `cols` must be a positive multiple of the format's block and `raw` exactly the tensor.
    pub fn pack(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        raw: &[u8],
    ) -> Result<PackedMatrix, PackError> {
        PackedMatrix::pack_and_release(format, rows, cols, raw, &mut |_| {})
    }

    /// [`pack`](Self::pack), telling `release` from time to time which bytes of `raw` will not be read
    /// again, so that a large tensor need not be in memory twice.
    ///
    /// # Errors
    /// As [`pack`](Self::pack).
    pub fn pack_and_release(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        raw: &[u8],
        release: &mut dyn FnMut(Range<usize>),
    ) -> Result<PackedMatrix, PackError> {
        if cols == 0 || !cols.is_multiple_of(format.block_values()) {
            return Err(PackError::Columns { format, cols });
        }
        let row_bytes = (cols / format.block_values()).checked_mul(format.block_bytes());
        let too_large = PackError::TooLarge { rows, cols };
        let expected = row_bytes.and_then(|bytes| bytes.checked_mul(rows)).ok_or(too_large)?;
        if raw.len() != expected {
            let found = raw.len();
            return Err(PackError::Length { format, rows, cols, expected, found });
        }
        let panel_bytes = if format.is_quantized() {
            PanelLayout::of(format).panel_bytes(cols)
        } else {
            format.block_bytes() * cols * PANEL_ROWS
        };
        let bytes = rows.div_ceil(PANEL_ROWS).checked_mul(panel_bytes);
        let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as usize / 2);
        let bytes = bytes.ok_or(PackError::TooLarge { rows, cols })?;
        let mut data = AlignedBytes::zeroed(bytes);
        let row_bytes = format.row_bytes(cols);
        let mut released = 0;
        for (row, raw_row) in raw.chunks_exact(row_bytes).enumerate() {
            let panel = &mut data.bytes_mut()[row / PANEL_ROWS * panel_bytes..][..panel_bytes];
            pack_row(format, panel, row % PANEL_ROWS, raw_row);
            let read = (row + 1) * row_bytes;
            if read - released >= RELEASE_BYTES {
                release(released..read);
                released = read;
            }
        }
        release(released..raw.len());
        Ok(PackedMatrix { format, rows, cols, panel_bytes, data })
    }

    /// How the weights are stored.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> usize {
        self.data.bytes().len()
    }

    /// Writes row `row` as f32 (an embedding lookup): `d * (q - zero) + m`, rounded once, which is what
    /// the `gguf` package computes.
    ///
    /// # Panics
    /// If `row` is not below [`rows`](Self::rows) or `out` is not [`cols`](Self::cols) long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of a matrix of {} rows", self.rows);
        assert_eq!(out.len(), self.cols, "one value per column");
        let panel = self.panel(row / PANEL_ROWS);
        let in_panel = row % PANEL_ROWS;
        if !self.format.is_quantized() {
            let width = self.format.block_bytes();
            for (k, value) in out.iter_mut().enumerate() {
                let at = (k * PANEL_ROWS + in_panel) * width;
                *value = float_value(self.format, &panel[at..at + width]);
            }
            return;
        }
        let layout = PanelLayout::of(self.format);
        for (group, values) in out.chunks_exact_mut(layout.group).enumerate() {
            let (scale, minimum) = scalar::scale_and_minimum(self.format, panel, group, in_panel);
            for (k, value) in values.iter_mut().enumerate() {
                let code = scalar::code(&layout, panel, group, in_panel, k);
                *value = scale.mul_add((code - layout.zero) as f32, minimum);
            }
        }
    }

    /// Panels of sixteen rows, the last one padded.
    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// The bytes of one panel.
    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        &self.data.bytes()[panel * self.panel_bytes..][..self.panel_bytes]
    }
}

/// Puts one row of the file into its lane of a zeroed panel.
fn pack_row(format: WeightFormat, panel: &mut [u8], row: usize, raw: &[u8]) {
    if !format.is_quantized() {
        let width = format.block_bytes();
        for (k, value) in raw.chunks_exact(width).enumerate() {
            panel[(k * PANEL_ROWS + row) * width..][..width].copy_from_slice(value);
        }
        return;
    }
    let layout = PanelLayout::of(format);
    let groups_per_block = format.block_values() / layout.group;
    for (index, raw) in raw.chunks_exact(format.block_bytes()).enumerate() {
        let block = RawBlock::read(format, raw);
        let first = index * groups_per_block;
        for group in 0..groups_per_block {
            let codes = &block.codes[group * layout.group..][..layout.group];
            pack_codes(&layout, &mut panel[layout.codes_offset(first + group)..], row, codes);
        }
        if layout.head_bytes == 0 {
            let tail = layout.codes_offset(first) + layout.low_bytes + layout.high_bytes;
            put_half(panel, tail + 2 * row, block.d);
            if layout.tail_bytes == 64 {
                put_half(panel, tail + 32 + 2 * row, block.m);
            }
            continue;
        }
        let head = layout.head_offset(first);
        put_half(panel, head + 2 * row, block.d);
        if layout.head_bytes == 64 {
            put_half(panel, head + 32 + 2 * row, block.m);
        }
        for group in 0..groups_per_block {
            let side = layout.group_offset(first + group);
            panel[side + row] = block.scales[group];
            if layout.side_bytes == 32 {
                panel[side + 16 + row] = block.minima[group];
            }
        }
    }
}

/// Spreads one row's codes of a group over the bit planes. `planes` starts at the group's codes.
fn pack_codes(layout: &PanelLayout, planes: &mut [u8], row: usize, codes: &[u8]) {
    for (step, four) in codes.chunks_exact(4).enumerate() {
        let four = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
        if layout.bits == 8 {
            or_word(planes, STEP_CODES * step + 4 * row, four);
            continue;
        }
        let low = (four & 0x0f0f_0f0f) << (4 * (step % 2));
        or_word(planes, STEP_CODES * (step / 2) + 4 * row, low);
        let high = four >> 4 & 0x0f0f_0f0f;
        match layout.bits {
            5 => or_word(planes, layout.low_bytes + 4 * row, high << step),
            6 => or_word(planes, layout.low_bytes + 4 * row, high << (2 * step)),
            _ => {}
        }
    }
}

fn or_word(bytes: &mut [u8], at: usize, word: u32) {
    for (byte, more) in bytes[at..at + 4].iter_mut().zip(word.to_le_bytes()) {
        *byte |= more;
    }
}

fn put_half(bytes: &mut [u8], at: usize, half: u16) {
    bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
}

/// Zeroed bytes on a cache-line boundary, on huge pages where large and the system lends them.
struct AlignedBytes {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns plain bytes; shared access is read-only.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zero bytes, `len` at most half of the address space.
    fn zeroed(len: usize) -> AlignedBytes {
        let align = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 64 };
        let layout = Layout::from_size_align(len, align).unwrap_or(Layout::new::<u8>());
        assert_eq!(layout.size(), len, "the caller bounded the length");
        if len == 0 {
            return AlignedBytes { start: NonNull::dangling(), layout };
        }
        // SAFETY: the size is not zero. Not `alloc_zeroed`, which would touch the pages before the advice.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE_BYTES {
            advise_huge_pages(start, len);
        }
        // SAFETY: `len` bytes are ours.
        unsafe { start.as_ptr().write_bytes(0, len) };
        AlignedBytes { start, layout }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: we own `layout.size()` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and we are borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated in `zeroed` with this layout.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

/// Asks for huge pages over whole huge pages of a region; a refusal costs only speed.
#[cfg(target_os = "linux")]
fn advise_huge_pages(start: NonNull<u8>, len: usize) {
    const MADV_HUGEPAGE: i32 = 14;
    unsafe extern "C" {
        fn madvise(address: *mut u8, length: usize, advice: i32) -> i32;
    }
    let whole = len / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    // SAFETY: the range is inside our allocation, aligned, and the advice does not change contents.
    unsafe { madvise(start.as_ptr(), whole, MADV_HUGEPAGE) };
}
