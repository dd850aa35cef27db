//! One key group against a few lines at once, over sixteen lanes; the bits of [`super::scalar`].
//!
//! A **line** is one (row, query head). Lines of a chunk share every load of K and V; their
//! accumulators stay in registers. A table of function pointers per tier lets [`super::task`] be
//! written once, outside any `target_feature`.

// Indexed loops over const bounds unroll into registers; several arrays share each index.
#![allow(clippy::needless_range_loop)]

use super::element::{Byte, E4M3, E5M2, Element, Half, Nibble, unit};
use super::mass::GroupSums;
use super::schedule::{CHUNK_LINES, part_floats};
use crate::simd::{LANES, Simd, avx2::Avx2, avx512::Avx512, exp};
use reef_kv::page::{KEY_GROUP_MAX, PageFormat, VALUE_GROUP};
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Lines to take next when `left` are left: few, evenly filled chunks.
pub(super) fn chunk_lines(left: usize) -> usize {
    match left {
        0..=4 | 6 => left,
        5 => 3,
        7 | 8 => 4,
        _ => CHUNK_LINES,
    }
}

/// The lines of a chunk: consecutive entries of the arrays that belong to a task.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    /// Scaled queries, `[lines][head_dim]`.
    pub query: *const f32,
    /// Weighted sums of values or codes, `[lines][head_dim]`.
    pub values: *mut f32,
    /// Sums of weights by token modulo sixteen, `[lines][16]`.
    pub lanes: *mut f32,
    /// Weighted sums of V minima, `[lines][value_groups][16]`.
    pub minima: *mut f32,
    /// Largest score so far, `[lines]`.
    pub max: *mut f32,
    /// Visible tokens of the group, `low..high`, `[lines]`; `low >= high` where there are none.
    pub visible: *const (usize, usize),
}

/// One key group of one KV head. `k_scale` to `v_min` are used by formats that have them.
#[derive(Clone, Copy)]
pub(super) struct Group {
    /// K values or codes, `[head_dim][tokens]`.
    pub k: *const u8,
    /// V values or codes, `[tokens][head_dim]`.
    pub v: *const u8,
    /// f16 K scales, `[head_dim]`, or one f32.
    pub k_scale: *const u8,
    /// f16 K minima, `[head_dim]`.
    pub k_min: *const u16,
    /// f32 V scales times the unit of V, `[value_groups][32]`, as [`Kernels::spread`] leaves them; or
    /// one f32, as it stands in the page.
    pub v_scale: *const f32,
    /// f32 V minima, the same.
    pub v_min: *const f32,
    /// K of a group that comes later, to be fetched into the cache meanwhile; `k` if none does.
    pub ahead_k: *const u8,
    /// V of that group; `v` if there is none.
    pub ahead_v: *const u8,
    /// Tokens: 16 or 32.
    pub tokens: usize,
    /// Channels.
    pub head_dim: usize,
}

/// Room of one thread for the intermediate results of a chunk.
#[derive(Clone, Copy)]
pub(super) struct Bench {
    /// Queries with K scales folded in, `[CHUNK_LINES][head_dim]`.
    pub folded: *mut f32,
    /// Scores, then weights, `[CHUNK_LINES][32]`.
    pub scores: *mut f32,
    /// Weights with V scales folded in, `[CHUNK_LINES][value_groups][32]`.
    pub weights: *mut f32,
}

type ChunkKernel = unsafe fn(&Group, &Lines, &Bench);

/// The kernels of one tier.
///
/// # Safety
/// Every one needs the tier's features, and pointers valid for the sizes named at their fields.
pub(super) struct Kernels {
    /// `[PageFormat][lines]`: a chunk of 1, 2, 3, 4 or 6 lines against a group of a format.
    pub chunk: [[ChunkKernel; CHUNK_LINES + 1]; PageFormat::ALL.len()],
    /// `(query, factor, count, out)`: `out[i] = query[i] * factor`.
    pub scale: unsafe fn(*const f32, f32, usize, *mut f32),
    /// `(halves, tokens, value_groups, factor, out)`: f16 `[tokens][value_groups]` times `factor` to
    /// f32 `[value_groups][32]`.
    pub spread: unsafe fn(*const u16, usize, usize, f32, *mut f32),
    /// `(line, head_dim, part)`: ends a split of one line and writes its part record.
    pub close: unsafe fn(&Lines, usize, *mut f32),
    /// `(total, part, head_dim)`: appends a part record to the one in `total`.
    pub merge: unsafe fn(*mut f32, *const f32, usize),
    /// `(total, head_dim, out)`: divides by the sum.
    pub finish: unsafe fn(*const f32, usize, *mut f32),
    /// `(weights, tokens, max, lines, sums)`: the weights of a key group, `[lines][32]` as a chunk
    /// leaves them in `Bench::scores`, are summed up line by line, with the maxima `[lines]` beside.
    pub observe: unsafe fn(*const f32, usize, *const f32, usize, GroupSums),
    /// `(total, head_dim, sums, groups)`: the sums of one line's key groups become probabilities.
    pub settle: unsafe fn(*const f32, usize, GroupSums, usize),
}

/// How many accumulators the register file of a tier holds.
trait Registers: Simd {
    /// Whether a chunk of `lines` lines can hold `lines * vectors` accumulators beside its operands.
    fn holds(lines: usize, vectors: usize) -> bool;
}

impl Registers for Avx2 {
    // Sixteen registers, two a vector; one line must still hide the latency of FMA.
    #[inline(always)]
    fn holds(lines: usize, vectors: usize) -> bool {
        lines * vectors <= 4
    }
}

impl Registers for Avx512 {
    #[inline(always)]
    fn holds(lines: usize, vectors: usize) -> bool {
        lines * vectors <= 24
    }
}

/// Bytes the memory system moves at once.
pub(super) const CACHE_LINE: usize = 64;

/// Asks for the cache line of `p`, which need not be valid.
#[inline(always)]
pub(super) fn prefetch<T>(p: *const T) {
    // SAFETY: a prefetch of any address is allowed; SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn chunk<S: Registers, K: Element, V: Element, const LINES: usize>(
    group: &Group,
    lines: &Lines,
    bench: &Bench,
) {
    // SAFETY: the caller's contract; every function below has the same.
    unsafe {
        let mut bias = [0f32; LINES];
        let mut query = lines.query;
        if K::GROUPED {
            bias = fold::<S, K, LINES>(group, query, bench.folded);
        } else if K::SCALED {
            let factor = unit(K::FORMAT) * *group.k_scale.cast::<f32>();
            scale::<S>(query, factor, LINES * group.head_dim, bench.folded);
        }
        if K::SCALED {
            query = bench.folded;
        }
        let vectors = group.tokens / LANES;
        if vectors == 2 && S::holds(LINES, 4) {
            scores::<S, K, LINES, 2, 2>(group, query, &bias, 0, bench.scores);
        } else {
            for vector in 0..vectors {
                // Three lines of two streams just fit AVX2 where there is one vector of keys.
                if S::holds(LINES, 2) || LINES == 3 {
                    scores::<S, K, LINES, 1, 2>(group, query, &bias, vector, bench.scores);
                } else {
                    scores::<S, K, LINES, 1, 1>(group, query, &bias, vector, bench.scores);
                }
            }
        }
        let visible = weigh::<S, LINES>(group, lines, bench.scores);
        // Tokens that all lines see; what only some see is done line by line, so that no line reads
        // the value of a token it must not see.
        let (mut low, mut high) = (0, group.tokens);
        for line in 0..LINES {
            low = low.max(visible[line].0);
            high = high.min(visible[line].1);
            if V::SCALED && visible[line].0 < visible[line].1 {
                spread_weights::<S, V>(group, lines, bench, line, visible[line]);
            }
        }
        high = high.max(low);
        let weights = if V::SCALED { bench.weights } else { bench.scores };
        for line in 0..LINES {
            let (first, last) = visible[line];
            one_line::<S, V>(group, lines, line, (first, last.min(low)), weights);
        }
        accumulate::<S, V, LINES>(group, lines.values, weights, low, high);
        for line in 0..LINES {
            let (first, last) = visible[line];
            one_line::<S, V>(group, lines, line, (first.max(high), last), weights);
        }
    }
}

/// Tokens `low..high` of one line of a chunk.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn one_line<S: Registers, V: Element>(
    group: &Group,
    lines: &Lines,
    line: usize,
    (low, high): (usize, usize),
    weights: *const f32,
) {
    if low >= high {
        return;
    }
    let stride = weight_stride::<V>(group.head_dim);
    // SAFETY: the caller's contract.
    unsafe {
        let values = lines.values.add(line * group.head_dim);
        accumulate::<S, V, 1>(group, values, weights.add(line * stride), low, high);
    }
}

/// Floats between the weights of two lines.
#[inline(always)]
fn weight_stride<V: Element>(head_dim: usize) -> usize {
    if V::GROUPED { head_dim.div_ceil(VALUE_GROUP) * KEY_GROUP_MAX } else { KEY_GROUP_MAX }
}

/// `folded[line][d] = query[line][d] * (unit * k_scale[d])`; gives `sum_d query[line][d] * k_min[d]`.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn fold<S: Simd, K: Element, const LINES: usize>(
    group: &Group,
    query: *const f32,
    folded: *mut f32,
) -> [f32; LINES] {
    // SAFETY: the caller's contract.
    unsafe {
        let mut sums = [S::splat(0.0); LINES];
        for channel in (0..group.head_dim).step_by(LANES) {
            let scale = S::load_f16(group.k_scale.cast::<u16>().add(channel));
            let scale = S::mul(S::splat(unit(K::FORMAT)), scale);
            let min = S::load_f16(group.k_min.add(channel));
            for (line, sum) in sums.iter_mut().enumerate() {
                let at = line * group.head_dim + channel;
                let q = S::load(query.add(at));
                *sum = S::fma(q, min, *sum);
                S::store(folded.add(at), S::mul(q, scale));
            }
        }
        let mut bias = [0f32; LINES];
        for line in 0..LINES {
            bias[line] = S::reduce_add(sums[line]);
        }
        bias
    }
}

/// Scores of tokens `16 * vector .. 16 * (vector + VECTORS)`, visible or not: the sum over the even
/// channels, which starts from the bias, plus that over the odd ones. `STREAMS = 2` takes both at
/// once, for the latency of FMA; 1 takes one after the other, for want of registers.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn scores<
    S: Simd,
    K: Element,
    const LINES: usize,
    const VECTORS: usize,
    const STREAMS: usize,
>(
    group: &Group,
    query: *const f32,
    bias: &[f32; LINES],
    vector: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let zero = [[S::splat(0.0); VECTORS]; LINES];
        let mut sums = [zero; STREAMS];
        for line in 0..LINES {
            sums[0][line] = [S::splat(bias[line]); VECTORS];
        }
        dot::<S, K, LINES, VECTORS, STREAMS>(group, query, vector, 0, &mut sums);
        let mut odd = sums[STREAMS - 1];
        if STREAMS == 1 {
            let mut rest = [zero; STREAMS];
            dot::<S, K, LINES, VECTORS, STREAMS>(group, query, vector, 1, &mut rest);
            odd = rest[0];
        }
        for line in 0..LINES {
            for i in 0..VECTORS {
                let score = S::add(sums[0][line][i], odd[line][i]);
                S::store(out.add(line * KEY_GROUP_MAX + (vector + i) * LANES), score);
            }
        }
    }
}

/// Adds every second channel from `first` on to stream 0, the others, if asked for, to stream 1.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn dot<
    S: Simd,
    K: Element,
    const LINES: usize,
    const VECTORS: usize,
    const STREAMS: usize,
>(
    group: &Group,
    query: *const f32,
    vector: usize,
    first: usize,
    sums: &mut [[[S::F; VECTORS]; LINES]; STREAMS],
) {
    // SAFETY: the caller's contract.
    unsafe {
        // Two vectors of keys make a whole group of 32 tokens.
        let of_channel = if VECTORS == 2 { 2 } else { group.tokens / LANES };
        let of_pair = 2 * of_channel * K::BYTES;
        for pair in (first..group.head_dim).step_by(2) {
            if vector == 0 && first == 0 {
                for line in (0..of_pair).step_by(CACHE_LINE) {
                    prefetch(group.ahead_k.wrapping_add(pair / 2 * of_pair + line));
                }
            }
            for stream in 0..STREAMS {
                let channel = pair + stream;
                let key = K::load_many::<S, VECTORS>(group.k, channel * of_channel + vector);
                for line in 0..LINES {
                    let q = S::splat(*query.add(line * group.head_dim + channel));
                    for i in 0..VECTORS {
                        sums[stream][line][i] = S::fma(q, key[i], sums[stream][line][i]);
                    }
                }
            }
        }
    }
}

/// The online softmax step: scores become weights in place. Gives what each line sees, `(0, 0)` where
/// no weight is above 0. Lines take each step together, so that their latencies overlap.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn weigh<S: Simd, const LINES: usize>(
    group: &Group,
    lines: &Lines,
    scores: *mut f32,
) -> [(usize, usize); LINES] {
    let wide = group.tokens > LANES;
    // SAFETY: the caller's contract.
    unsafe {
        let nothing = S::splat(f32::NEG_INFINITY);
        let (mut visible, mut max) = ([(0, 0); LINES], [0f32; LINES]);
        let mut halves = [[nothing; 2]; LINES];
        for line in 0..LINES {
            let (low, high) = *lines.visible.add(line);
            visible[line] = if low < high { (low, high) } else { (0, 0) };
            halves[line][0] = S::load(scores.add(line * KEY_GROUP_MAX));
            if wide {
                halves[line][1] = S::load(scores.add(line * KEY_GROUP_MAX + LANES));
            }
            if visible[line] != (0, group.tokens) {
                let bits = ((1u64 << visible[line].1) - (1u64 << visible[line].0)) as u32;
                halves[line][0] = S::select(bits as u16, halves[line][0], nothing);
                halves[line][1] = S::select((bits >> LANES) as u16, halves[line][1], nothing);
            }
            max[line] = S::reduce_max(S::max(halves[line][0], halves[line][1]));
        }
        for line in 0..LINES {
            let old = *lines.max.add(line);
            if max[line] > old {
                *lines.max.add(line) = max[line];
                rescale::<S>(group.head_dim, lines, line, exp::<S>(S::splat(old - max[line])));
            } else if old == f32::NEG_INFINITY {
                // Nothing seen yet, or scores that overflowed: weights of 0, not NaN.
                max[line] = 0.0;
                visible[line] = (0, 0);
            } else {
                max[line] = old;
            }
        }
        for line in 0..LINES {
            let lanes = lines.lanes.add(line * LANES);
            let out = scores.add(line * KEY_GROUP_MAX);
            let first = exp::<S>(S::sub(halves[line][0], S::splat(max[line])));
            S::store(out, first);
            let mut sum = S::add(S::load(lanes), first);
            if wide {
                let second = exp::<S>(S::sub(halves[line][1], S::splat(max[line])));
                S::store(out.add(LANES), second);
                sum = S::add(sum, second);
            }
            S::store(lanes, sum);
        }
        visible
    }
}

/// Brings everything a line has summed to a new maximum.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn rescale<S: Simd>(head_dim: usize, lines: &Lines, line: usize, factor: S::F) {
    // SAFETY: the caller's contract.
    unsafe {
        let times = |p: *mut f32| S::store(p, S::mul(S::load(p), factor));
        times(lines.lanes.add(line * LANES));
        for channel in (0..head_dim).step_by(LANES) {
            times(lines.values.add(line * head_dim + channel));
        }
        let groups = head_dim.div_ceil(VALUE_GROUP);
        for value_group in line * groups..(line + 1) * groups {
            times(lines.minima.add(value_group * LANES));
        }
    }
}

/// Weights of one line with the V scales folded in, and the weighted minima of the tokens it sees.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn spread_weights<S: Simd, V: Element>(
    group: &Group,
    lines: &Lines,
    bench: &Bench,
    line: usize,
    visible: (usize, usize),
) {
    let groups = if V::GROUPED { group.head_dim.div_ceil(VALUE_GROUP) } else { 1 };
    // SAFETY: the caller's contract.
    unsafe {
        let zero = S::splat(0.0);
        for value_group in 0..groups {
            let minima = lines.minima.add((line * groups + value_group) * LANES);
            let mut sum = if V::GROUPED { S::load(minima) } else { zero };
            for token in (0..group.tokens).step_by(LANES) {
                let at = value_group * KEY_GROUP_MAX + token;
                let weight = S::load(bench.scores.add(line * KEY_GROUP_MAX + token));
                let mut scale = S::splat(unit(V::FORMAT) * *group.v_scale);
                if V::GROUPED {
                    let mut minimum = S::load(group.v_min.add(at));
                    if visible != (0, group.tokens) {
                        // A weight of 0 does not silence NaN.
                        let bits = ((1u64 << visible.1) - (1u64 << visible.0)) >> token;
                        minimum = S::select(bits as u16, minimum, zero);
                    }
                    sum = S::fma(weight, minimum, sum);
                    scale = S::load(group.v_scale.add(at));
                }
                let out = bench.weights.add(line * groups * KEY_GROUP_MAX + at);
                S::store(out, S::mul(weight, scale));
            }
            if V::GROUPED {
                S::store(minima, sum);
            }
        }
    }
}

/// Adds the weighted values of tokens `low..high` to `LINES` lines.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn accumulate<S: Registers, V: Element, const LINES: usize>(
    group: &Group,
    values: *mut f32,
    weights: *const f32,
    low: usize,
    high: usize,
) {
    let vectors = group.head_dim / LANES;
    let mut first = 0;
    // SAFETY: the caller's contract.
    unsafe {
        while S::holds(LINES, 4) && first + 4 <= vectors {
            accumulate_vectors::<S, V, LINES, 4>(group, values, weights, first, (low, high));
            first += 4;
        }
        while S::holds(LINES, 2) && first + 2 <= vectors {
            accumulate_vectors::<S, V, LINES, 2>(group, values, weights, first, (low, high));
            first += 2;
        }
        while first < vectors {
            accumulate_vectors::<S, V, LINES, 1>(group, values, weights, first, (low, high));
            first += 1;
        }
    }
}

/// The same for channels `16 * first .. 16 * (first + VECTORS)`.
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn accumulate_vectors<S: Simd, V: Element, const LINES: usize, const VECTORS: usize>(
    group: &Group,
    values: *mut f32,
    weights: *const f32,
    first: usize,
    (low, high): (usize, usize),
) {
    let dim = group.head_dim;
    let stride = weight_stride::<V>(dim);
    // Vectors of one value group share a weight.
    let of_vector = |i: usize| if V::GROUPED { (first + i) / 2 * KEY_GROUP_MAX } else { 0 };
    // SAFETY: the caller's contract.
    unsafe {
        let zero = S::splat(0.0);
        let mut sums = [[zero; VECTORS]; LINES];
        for line in 0..LINES {
            for i in 0..VECTORS {
                sums[line][i] = S::load(values.add(line * dim + (first + i) * LANES));
            }
        }
        let of_token = dim / LANES;
        // The pass that begins a cache line fetches it.
        let fetch = (first * V::BYTES).is_multiple_of(CACHE_LINE);
        for token in low..high {
            let at = token * of_token + first;
            if fetch {
                for line in (0..VECTORS * V::BYTES).step_by(CACHE_LINE) {
                    prefetch(group.ahead_v.wrapping_add(at * V::BYTES + line));
                }
            }
            let value = V::load_many::<S, VECTORS>(group.v, at);
            for line in 0..LINES {
                for i in 0..VECTORS {
                    let weight = S::splat(*weights.add(line * stride + of_vector(i) + token));
                    sums[line][i] = S::fma(weight, value[i], sums[line][i]);
                }
            }
        }
        for line in 0..LINES {
            for i in 0..VECTORS {
                S::store(values.add(line * dim + (first + i) * LANES), sums[line][i]);
            }
        }
    }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn scale<S: Simd>(query: *const f32, factor: f32, count: usize, out: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        for i in (0..count).step_by(LANES) {
            S::store(out.add(i), S::mul(S::load(query.add(i)), S::splat(factor)));
        }
    }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn spread<S: Simd>(
    halves: *const u16,
    tokens: usize,
    groups: usize,
    factor: f32,
    out: *mut f32,
) {
    // SAFETY: the caller's contract. Known numbers of groups let the compiler use shuffles.
    unsafe {
        let factor = S::splat(factor);
        match groups {
            1 => spread_columns::<S, 1>(halves, tokens, factor, out),
            2 => {
                for token in (0..tokens).step_by(LANES) {
                    let (first, second) = S::load_f16_pairs(halves.add(2 * token));
                    S::store(out.add(token), S::mul(factor, first));
                    S::store(out.add(KEY_GROUP_MAX + token), S::mul(factor, second));
                }
            }
            4 => spread_columns::<S, 4>(halves, tokens, factor, out),
            8 => spread_columns::<S, 8>(halves, tokens, factor, out),
            _ => {
                for group in 0..groups {
                    let out = out.add(group * KEY_GROUP_MAX);
                    let mut column = [0u16; KEY_GROUP_MAX];
                    for (token, half) in column.iter_mut().enumerate().take(tokens) {
                        *half = halves.add(token * groups + group).read_unaligned();
                    }
                    for half in [0, LANES] {
                        let column = S::load_f16(column.as_ptr().add(half));
                        S::store(out.add(half), S::mul(factor, column));
                    }
                }
            }
        }
    }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn spread_columns<S: Simd, const GROUPS: usize>(
    halves: *const u16,
    tokens: usize,
    factor: S::F,
    out: *mut f32,
) {
    // SAFETY: the caller's contract.
    unsafe {
        for token in (0..tokens).step_by(LANES) {
            let rows = halves.add(token * GROUPS).cast::<[[u16; GROUPS]; LANES]>().read_unaligned();
            let mut columns = [[0u16; LANES]; GROUPS];
            for lane in 0..LANES {
                for group in 0..GROUPS {
                    columns[group][lane] = rows[lane][group];
                }
            }
            for group in 0..GROUPS {
                let column = S::load_f16(columns[group].as_ptr());
                S::store(out.add(group * KEY_GROUP_MAX + token), S::mul(factor, column));
            }
        }
    }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn close<S: Simd>(line: &Lines, head_dim: usize, part: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        for value_group in 0..head_dim.div_ceil(VALUE_GROUP) {
            let first = value_group * VALUE_GROUP;
            let minimum = S::splat(S::reduce_add(S::load(line.minima.add(value_group * LANES))));
            for channel in (first..head_dim.min(first + VALUE_GROUP)).step_by(LANES) {
                S::store(part.add(channel), S::add(S::load(line.values.add(channel)), minimum));
            }
        }
        *part.add(head_dim) = *line.max;
        *part.add(head_dim + 1) = S::reduce_add(S::load(line.lanes));
    }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn merge<S: Simd>(total: *mut f32, part: *const f32, head_dim: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        let (mine, theirs) = (*total.add(head_dim), *part.add(head_dim));
        if theirs == f32::NEG_INFINITY {
            return;
        }
        let max = mine.max(theirs);
        // e^0 is 1 exactly: only the smaller of the two maxima takes an exponential.
        let factor = exp::<S>(S::splat(mine.min(theirs) - max));
        let one = S::splat(1.0);
        let (mine, theirs) = if mine < theirs { (factor, one) } else { (one, factor) };
        // The sum sits behind the maximum: its vector goes through the same step, and then the
        // maximum gets its place back.
        for i in (0..part_floats(head_dim)).step_by(LANES) {
            let scaled = S::mul(S::load(total.add(i)), mine);
            S::store(total.add(i), S::fma(S::load(part.add(i)), theirs, scaled));
        }
        *total.add(head_dim) = max;
    }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn finish<S: Simd>(total: *const f32, head_dim: usize, out: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        scale::<S>(total, inverse_sum(total, head_dim), head_dim, out);
    }
}

/// One over the sum of the weights of a part record; 0 if there are none.
///
/// # Safety
/// `total` is a part record.
#[inline(always)]
unsafe fn inverse_sum(total: *const f32, head_dim: usize) -> f32 {
    // SAFETY: the caller's contract.
    let sum = unsafe { *total.add(head_dim + 1) };
    if sum > 0.0 { 1.0 / sum } else { 0.0 }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn observe<S: Simd>(
    weights: *const f32,
    tokens: usize,
    max: *const f32,
    lines: usize,
    sums: GroupSums,
) {
    // SAFETY: the caller's contract.
    unsafe {
        for line in 0..lines {
            let weights = weights.add(line * KEY_GROUP_MAX);
            let mut sum = S::load(weights);
            if tokens > LANES {
                sum = S::add(sum, S::load(weights.add(LANES)));
            }
            let out = sums.at(line, 0).base;
            *out = S::reduce_add(sum);
            *out.add(sums.stride) = *max.add(line);
        }
    }
}

/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn settle<S: Simd>(total: *const f32, head_dim: usize, sums: GroupSums, groups: usize) {
    // SAFETY: the caller's contract; a line's arrays are whole vectors long.
    unsafe {
        let (max, inverse) = (*total.add(head_dim), inverse_sum(total, head_dim));
        for group in (0..groups).step_by(LANES) {
            let place = sums.base.add(group);
            let (sum, zero) = (S::load(place), S::splat(0.0));
            let factor = exp::<S>(S::sub(S::load(place.add(sums.stride)), S::splat(max)));
            let mass = S::mul(S::mul(sum, factor), S::splat(inverse));
            // Groups that nobody saw have no maximum.
            S::store(place, S::select(S::lt_mask(zero, sum), mass, zero));
        }
    }
}

macro_rules! tier {
    ($table:ident, $module:ident, $simd:ty, $features:literal) => {
        mod $module {
            use super::*;

            #[target_feature(enable = $features)]
            unsafe fn chunk<K: Element, V: Element, const LINES: usize>(
                group: &Group,
                lines: &Lines,
                bench: &Bench,
            ) {
                // SAFETY: the features are enabled here; the rest is the caller's contract.
                unsafe { super::chunk::<$simd, K, V, LINES>(group, lines, bench) }
            }
            // No chunk has 0 or 5 lines (`chunk_lines`); their places hold a smaller kernel.
            const fn chunks<K: Element, V: Element>() -> [ChunkKernel; CHUNK_LINES + 1] {
                [
                    chunk::<K, V, 1>,
                    chunk::<K, V, 1>,
                    chunk::<K, V, 2>,
                    chunk::<K, V, 3>,
                    chunk::<K, V, 4>,
                    chunk::<K, V, 4>,
                    chunk::<K, V, 6>,
                ]
            }
            #[target_feature(enable = $features)]
            unsafe fn scale(query: *const f32, factor: f32, count: usize, out: *mut f32) {
                // SAFETY: the same.
                unsafe { super::scale::<$simd>(query, factor, count, out) }
            }
            #[target_feature(enable = $features)]
            unsafe fn spread(
                halves: *const u16,
                tokens: usize,
                groups: usize,
                factor: f32,
                out: *mut f32,
            ) {
                // SAFETY: the same.
                unsafe { super::spread::<$simd>(halves, tokens, groups, factor, out) }
            }
            #[target_feature(enable = $features)]
            unsafe fn close(line: &Lines, head_dim: usize, part: *mut f32) {
                // SAFETY: the same.
                unsafe { super::close::<$simd>(line, head_dim, part) }
            }
            #[target_feature(enable = $features)]
            unsafe fn merge(total: *mut f32, part: *const f32, head_dim: usize) {
                // SAFETY: the same.
                unsafe { super::merge::<$simd>(total, part, head_dim) }
            }
            #[target_feature(enable = $features)]
            unsafe fn finish(total: *const f32, head_dim: usize, out: *mut f32) {
                // SAFETY: the same.
                unsafe { super::finish::<$simd>(total, head_dim, out) }
            }
            #[target_feature(enable = $features)]
            unsafe fn observe(
                weights: *const f32,
                tokens: usize,
                max: *const f32,
                lines: usize,
                sums: GroupSums,
            ) {
                // SAFETY: the same.
                unsafe { super::observe::<$simd>(weights, tokens, max, lines, sums) }
            }
            #[target_feature(enable = $features)]
            unsafe fn settle(total: *const f32, head_dim: usize, sums: GroupSums, groups: usize) {
                // SAFETY: the same.
                unsafe { super::settle::<$simd>(total, head_dim, sums, groups) }
            }

            pub(in super::super) static $table: Kernels = Kernels {
                // In the order of `PageFormat::ALL`.
                chunk: [
                    chunks::<Half, Half>(),
                    chunks::<Byte, Byte>(),
                    chunks::<E4M3, E4M3>(),
                    chunks::<E5M2, E5M2>(),
                    chunks::<Byte, Nibble>(),
                    chunks::<Nibble, Nibble>(),
                ],
                scale,
                spread,
                close,
                merge,
                finish,
                observe,
                settle,
            };
        }
        pub(super) use $module::$table;
    };
}

tier!(AVX2, avx2, Avx2, "avx2,fma,f16c");
tier!(AVX512, avx512, Avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");
