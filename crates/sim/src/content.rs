//! What the fake model writes for a token in a layer, and what it reads back.
//!
//! The first [`MARK_BITS`] channels of K are zeros and ones: token, position, layer and a link to all
//! tokens before. A channel with two values survives every page format, so that whose bytes a page holds
//! can be told even from 4-bit codes. The other channels and V are multiples of 2^-10 below one half,
//! exact in f16, that depend on all that the token attended in the layers below: like a real model's, a
//! token's KV is different as soon as anything before it was.

use crate::random::mix;

/// Tokens of the vocabulary.
pub const VOCABULARY: usize = 64;
/// Most positions of a sequence.
pub const MAXIMUM_POSITIONS: usize = 1 << POSITION_BITS;
/// Channels of K that hold the mark.
pub const MARK_BITS: usize = TOKEN_BITS + POSITION_BITS + LAYER_BITS + LINK_BITS;

const TOKEN_BITS: usize = 6;
const POSITION_BITS: usize = 12;
const LAYER_BITS: usize = 4;
const LINK_BITS: usize = 10;

/// What can be read of a token in a page of any format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The token.
    pub token: u32,
    /// Its original position.
    pub position: u32,
    /// Index of the layer in the order of computation.
    pub layer: u32,
    /// Hash of the tenant and of all tokens up to this one, see [`next_link`].
    pub link: u32,
}

/// The link of a token behind one whose link is `before`; never [`UNKNOWN_LINK`].
pub fn next_link(before: u32, token: u32) -> u32 {
    1 + (mix(u64::from(before) << 32 | u64::from(token)) % ((1 << LINK_BITS) - 1)) as u32
}

/// The link of a token whose predecessor was dropped.
pub const UNKNOWN_LINK: u32 = 0;

impl Mark {
    /// The bits, lowest first in channel 0.
    pub fn to_bits(self) -> u32 {
        let upper = self.link << LAYER_BITS | self.layer;
        (upper << POSITION_BITS | self.position) << TOKEN_BITS | self.token
    }

    /// The mark whose bits are `bits`.
    pub fn from_bits(bits: u32) -> Mark {
        let take = |from: usize, count: usize| bits >> from & ((1 << count) - 1);
        Mark {
            token: take(0, TOKEN_BITS),
            position: take(TOKEN_BITS, POSITION_BITS),
            layer: take(TOKEN_BITS + POSITION_BITS, LAYER_BITS),
            link: take(TOKEN_BITS + POSITION_BITS + LAYER_BITS, LINK_BITS),
        }
    }
}

/// Writes a token's K and V (`[kv_heads * head_dim]`, at least [`MARK_BITS`]): `state` is what the layers
/// below made of it.
pub fn write(mark: Mark, state: u64, keys: &mut [f32], values: &mut [f32]) {
    let bits = mark.to_bits();
    for (channel, key) in keys[..MARK_BITS].iter_mut().enumerate() {
        *key = (bits >> channel & 1) as f32;
    }
    fill(mix(state ^ 1), &mut keys[MARK_BITS..]);
    fill(mix(state ^ 2), values);
}

/// Six numbers from each 64 bits.
fn fill(seed: u64, numbers: &mut [f32]) {
    for (index, chunk) in numbers.chunks_mut(6).enumerate() {
        let mut bits = mix(seed.wrapping_add(index as u64));
        for number in chunk {
            *number = (bits & 1023) as f32 / 1024.0 - 0.5;
            bits >>= 10;
        }
    }
}

/// The mark in a token's keys as they were read back, `[MARK_BITS]` or more; `None` where one of them is
/// neither near 0 nor near 1 (no token's bytes, or poison).
pub fn read_mark(keys: &[f32]) -> Option<Mark> {
    let (mut bits, mut clear) = (0, true);
    for (channel, &key) in keys[..MARK_BITS].iter().enumerate() {
        let one = key > 0.5;
        clear &= (key - f32::from(u8::from(one))).abs() <= 0.01;
        bits |= u32::from(one) << channel;
    }
    clear.then(|| Mark::from_bits(bits))
}

/// Hash of all numbers of a token in a layer as they were read back.
pub fn digest(keys: &[f32], values: &[f32]) -> u64 {
    let mut lanes = [1u64, 2, 3, 4];
    for part in [keys, values] {
        for chunk in part.chunks_exact(8) {
            for (lane, pair) in lanes.iter_mut().zip(chunk.chunks_exact(2)) {
                let bits = u64::from(pair[0].to_bits()) << 32 | u64::from(pair[1].to_bits());
                *lane = (*lane ^ bits).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            }
        }
    }
    lanes.into_iter().fold(0, |hash, lane| mix(hash ^ lane))
}

/// Logits behind `token` in `state`: noise of [-2, 2), and 2.5 more for the token that follows it in a
/// cycle of eight, so that text repeats itself about as often as it does not.
pub fn write_logits(token: u32, state: u64, logits: &mut [f32]) {
    for (index, logit) in logits.iter_mut().enumerate() {
        let bits = mix(state.wrapping_add(mix(index as u64)));
        *logit = (bits >> 40) as f32 / (1 << 22) as f32 - 2.0;
    }
    logits[(token & !7 | (token + 1) & 7) as usize] += 2.5;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_its_bits() {
        let mark = Mark { token: 63, position: 4095, layer: 9, link: 777 };
        assert_eq!(Mark::from_bits(mark.to_bits()), mark);
        let mut keys = [0.0; MARK_BITS];
        write(mark, 5, &mut keys, &mut [0.0; 16]);
        assert_eq!(read_mark(&keys), Some(mark));
        keys[3] = f32::NAN;
        assert_eq!(read_mark(&keys), None);
        keys[3] = 0.4;
        assert_eq!(read_mark(&keys), None);
    }
}
