//! The fake model without pages: what every computation over pages must come to.

use reef_kv::GroupConfig;

use crate::content::{self, Mark, next_link};
use crate::random::mix;

/// The states of `tokens`, whose text begins with link `root`: what f16 holds exactly is taken as it was
/// made.
pub fn unpaged(groups: &[GroupConfig], root: u32, tokens: &[u32]) -> Vec<u64> {
    let mut order: Vec<(usize, usize)> = Vec::new();
    for (group, config) in groups.iter().enumerate() {
        order.extend((0..config.layers).map(|layer| (layer, group)));
    }
    order.sort_unstable();
    let mut states: Vec<u64> = (0..)
        .zip(tokens)
        .map(|(position, &token)| mix(u64::from(token) << 32 | position))
        .collect();
    for (number, &(_, group)) in order.iter().enumerate() {
        let shape = groups[group].shape;
        let width = shape.kv_heads * shape.head_dim;
        let mut link = root;
        // Sums of the digests of all positions before.
        let (mut sum, mut sums) = (0u64, vec![0]);
        for (position, (&token, &state)) in tokens.iter().zip(&states).enumerate() {
            link = next_link(link, token);
            let mark = Mark { token, position: position as u32, layer: number as u32, link };
            let (mut keys, mut values) = (vec![0.0; width], vec![0.0; width]);
            content::write(mark, state, &mut keys, &mut values);
            sum = sum.wrapping_add(mix(content::digest(&keys, &values)));
            sums.push(sum);
        }
        for (position, state) in states.iter_mut().enumerate() {
            let first = groups[group].window.map_or(0, |w| (position + 1).saturating_sub(w));
            let sum = sums[position + 1].wrapping_sub(sums[first]);
            *state = mix(*state ^ sum.wrapping_add(number as u64));
        }
    }
    states
}
