//! The specification of every kernel, in plain loops; also the path for CPUs without SIMD tiers.

use crate::logits::{CHUNK, GROUP};
use crate::ops::RopeStyle;
use crate::simd::{EXP_MIN, EXP_POLY, LANES, LN2_HIGH, LN2_LOW};

/// `e^x`; see [`crate::simd::exp`].
pub fn exp(x: f32) -> f32 {
    if x < EXP_MIN {
        return 0.0;
    }
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let poly = EXP_POLY[1..].iter().fold(EXP_POLY[0], |p, c| p.mul_add(r, *c));
    poly * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// Sum of sixteen lanes in the order of [`crate::simd::Simd::reduce_add`].
pub fn reduce_add(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// See [`crate::logits::argmax`].
pub fn argmax(x: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (value, index) in x.iter().zip(0..) {
        if *value > best.0 {
            best = (*value, index);
        }
    }
    best.1
}

/// See [`crate::logits::lane_maxima`].
pub fn lane_maxima(x: &[f32], out: &mut [f32]) {
    out.fill(f32::NEG_INFINITY);
    for (values, out) in x.chunks(GROUP).zip(out.chunks_mut(LANES)) {
        for values in values.chunks(LANES) {
            for (value, most) in values.iter().zip(&mut *out) {
                if *value > *most {
                    *most = *value;
                }
            }
        }
    }
}

/// See [`crate::logits::at_least`].
pub fn at_least(x: &[f32], threshold: f32, out: &mut [u32]) -> usize {
    let below = threshold.next_down();
    let mut count = 0;
    for (value, index) in x.iter().zip(0..) {
        if *value > below {
            out[count] = index;
            count += 1;
        }
    }
    count
}

/// See [`crate::logits::exp_weights`].
pub fn exp_weights(x: &[f32], largest: f32, divisor: f32, out: &mut [f32], sums: &mut [f32]) {
    for ((x, out), sum) in x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)).zip(sums) {
        let mut lanes = [0.0_f32; LANES];
        for (x, out) in x.chunks(LANES).zip(out.chunks_mut(LANES)) {
            for ((x, out), lane) in x.iter().zip(out).zip(&mut lanes) {
                let finite = if *x > f32::MIN { *x } else { f32::MIN };
                *out = exp((finite - largest) / divisor);
                *lane += *out;
            }
        }
        *sum = reduce_add(lanes);
    }
}

/// See [`crate::logits::mask`]. Inlined into the tiers: lanes do not meet.
#[inline(always)]
pub fn mask(x: &mut [f32], allowed: &[u32]) {
    for (x, word) in x.chunks_mut(32).zip(allowed) {
        for (x, bit) in x.iter_mut().zip(0..32) {
            *x = if word >> bit & 1 == 1 { *x } else { f32::NEG_INFINITY };
        }
    }
}

/// See [`crate::ops::rms_norm`].
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    scale_by(x, weight, inverse_rms(x, epsilon), out);
}

/// See [`crate::ops::rms_norm_in_place`].
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], epsilon: f32) {
    let inverse = inverse_rms(x, epsilon);
    scale_in_place_by(x, weight, inverse);
}

/// `1 / sqrt(mean(x²) + epsilon)`; squares are added in sixteen lanes.
pub fn inverse_rms(x: &[f32], epsilon: f32) -> f32 {
    let mut sums = [0.0_f32; LANES];
    for x in x.chunks(LANES) {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum = x.mul_add(*x, *sum);
        }
    }
    1.0 / (reduce_add(sums) / x.len() as f32 + epsilon).sqrt()
}

/// `out = x * factor * weight`. Inlined into the tiers: lanes do not meet.
#[inline(always)]
pub fn scale_by(x: &[f32], weight: &[f32], factor: f32, out: &mut [f32]) {
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * weight;
    }
}

/// `x = x * factor * weight`. Inlined into the tiers: lanes do not meet.
#[inline(always)]
pub fn scale_in_place_by(x: &mut [f32], weight: &[f32], factor: f32) {
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * factor * weight;
    }
}

/// See [`crate::ops::rope`]. Inlined into the tiers: pairs do not meet.
#[inline(always)]
pub fn rope(style: RopeStyle, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    match style {
        RopeStyle::Interleaved => {
            for ((pair, cos), sin) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
                (pair[0], pair[1]) = rotate(pair[0], pair[1], *cos, *sin);
            }
        }
        RopeStyle::Half => {
            let (low, high) = head.split_at_mut(cos.len());
            for (((x, y), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*x, *y) = rotate(*x, *y, *cos, *sin);
            }
        }
    }
}

/// Plain products and sums, not fused: the same on a CPU without fused multiply-add, and fast there.
#[inline(always)]
fn rotate(x: f32, y: f32, cos: f32, sin: f32) -> (f32, f32) {
    (x * cos - y * sin, x * sin + y * cos)
}

/// See [`crate::ops::hadamard`]. Inlined into the tiers: every output is one sum or difference of two
/// values a stage, so there is only one order of additions.
#[inline(always)]
pub fn hadamard(heads: &mut [f32], head_dim: usize) {
    let order = 1 << head_dim.trailing_zeros();
    let factor = 1.0 / (order as f32).sqrt();
    for block in heads.chunks_exact_mut(order) {
        // Widths known when compiled become shuffles.
        if order >= 16 {
            block.chunks_exact_mut(16).for_each(butterflies_of_16);
        }
        let mut half = if order >= 16 { 16 } else { 1 };
        while half < order {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        block.iter_mut().for_each(|x| *x *= factor);
    }
}

#[inline(always)]
fn butterflies_of_16(block: &mut [f32]) {
    let Some(block) = block.first_chunk_mut::<16>() else { return };
    let mut x = *block;
    for half in [1, 2, 4, 8] {
        let before = x;
        for i in 0..16 {
            let other = before[i ^ half];
            x[i] = if i & half == 0 { before[i] + other } else { other - before[i] };
        }
    }
    *block = x;
}

/// See [`crate::ops::add`]. Inlined into the tiers: lanes do not meet.
#[inline(always)]
pub fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// `e^x` is asked for at most this: beyond, a sigmoid is below 1e-38 and `e^x` would overflow.
pub const SIGMOID_LIMIT: f32 = 88.0;
/// `2 √(2 / π)`.
pub const GELU_SLOPE: f32 = 1.595_769;
/// The cubic term of the tanh approximation of GELU.
pub const GELU_CUBIC: f32 = 0.044_715;

/// See [`crate::ops::silu_mul`].
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated(gate, up, out, |g| g);
}

/// See [`crate::ops::gelu_tanh_mul`].
pub fn gelu_tanh_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated(gate, up, out, gelu_argument);
}

/// `2 √(2/π) (g + 0.044715 g³)`.
pub fn gelu_argument(g: f32) -> f32 {
    g * GELU_SLOPE * (g * g).mul_add(GELU_CUBIC, 1.0)
}

/// `out = gate * sigmoid(argument(gate)) * up`.
pub fn gated(gate: &[f32], up: &[f32], out: &mut [f32], argument: impl Fn(f32) -> f32) {
    for ((out, g), up) in out.iter_mut().zip(gate).zip(up) {
        let negative = 0.0 - argument(*g);
        // As a vector minimum: a NaN gives the limit, and stays in the numerator.
        let negative = if negative < SIGMOID_LIMIT { negative } else { SIGMOID_LIMIT };
        *out = g / (1.0 + exp(negative)) * up;
    }
}
