//! The specification of every kernel, in plain loops; also the path for CPUs without SIMD tiers.

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
