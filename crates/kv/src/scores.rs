//! What policies are told of pages: one number a page, per layer, kept only where something is observed.
//!
//! A score belongs to the block's tokens in that layer, not to the bytes: it survives re-encoding and
//! compaction, and goes when the page is dropped.

use std::ops::Range;

use crate::policy::Observation;
use crate::table::reserve_tight;

/// Scores of every page of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Scores {
    /// `[group][layer]`.
    layers: Vec<Vec<LayerScores>>,
}

/// Scores of one layer.
#[derive(Clone, Debug, Default)]
struct LayerScores {
    /// Something was observed: `pages` then goes with the layer's view, page by page.
    tracked: bool,
    /// Decayed attention mass, or distinctness of keys. 0 until it is observed.
    pages: Vec<f32>,
    /// Query rows seen, since the first was observed.
    rows: usize,
    /// Running sum of unit keys, `[kv_heads * head_dim]`; empty until it is asked for.
    anchor: Vec<f32>,
}

impl LayerScores {
    fn track(&mut self, pages: usize) {
        if !self.tracked {
            self.tracked = true;
            self.pages.resize(pages, 0.0);
        }
    }
}

impl Scores {
    /// None yet; `layers` = layers of each group.
    pub(crate) fn new(layers: impl Iterator<Item = usize>) -> Scores {
        Scores { layers: layers.map(|count| vec![LayerScores::default(); count]).collect() }
    }

    /// Pages were put behind the others of a layer: it has `pages` now.
    pub(crate) fn extend(&mut self, group: usize, layer: usize, pages: usize) {
        let layer = &mut self.layers[group][layer];
        if layer.tracked {
            let more = pages - layer.pages.len();
            reserve_tight(&mut layer.pages, more);
            layer.pages.resize(pages, 0.0);
        }
    }

    /// The pages of these indices are gone.
    pub(crate) fn remove(&mut self, group: usize, layer: usize, pages: Range<usize>) {
        let layer = &mut self.layers[group][layer];
        if layer.tracked {
            layer.pages.drain(pages);
        }
    }

    /// Folds the attention masses of query rows, `[rows][pages]` in row order, into the scores of a layer
    /// of `pages` pages: `score = decay * score + mass` row by row, so that the bits do not depend on how
    /// rows were grouped into steps. A page that did not exist when a row was computed has score 0 still.
    pub(crate) fn observe_masses(
        &mut self,
        (group, layer): (usize, usize),
        pages: usize,
        masses: &[f32],
        decay: f32,
    ) {
        debug_assert!(pages > 0 && masses.len().is_multiple_of(pages), "masses of other pages");
        let layer = &mut self.layers[group][layer];
        layer.track(pages);
        let rows = masses.chunks_exact(pages.max(1));
        layer.rows += rows.len();
        if decay == 0.0 {
            // The last row alone counts; what came before, NaN included, is forgotten.
            rows.last().into_iter().for_each(|row| layer.pages.copy_from_slice(row));
            return;
        }
        for row in rows {
            for (score, mass) in layer.pages.iter_mut().zip(row) {
                *score = decay * *score + mass;
            }
        }
    }

    /// Sets the score of page `index` of a layer of `pages` pages.
    pub(crate) fn observe_keys(
        &mut self,
        (group, layer): (usize, usize),
        pages: usize,
        index: usize,
        score: f32,
    ) {
        let layer = &mut self.layers[group][layer];
        layer.track(pages);
        layer.pages[index] = score;
    }

    /// The running sum of unit keys of a layer, zeros at first.
    pub(crate) fn key_anchor(&mut self, group: usize, layer: usize, len: usize) -> &mut [f32] {
        let anchor = &mut self.layers[group][layer].anchor;
        anchor.resize(len, 0.0);
        anchor
    }

    /// Score of page `index`, whose first token is `age` tokens before the next one, as a policy sees it:
    /// attention mass per query that saw the page, with the queries weighted as the masses are. 0 where
    /// nothing was observed.
    pub(crate) fn score(
        &self,
        (group, layer): (usize, usize),
        index: usize,
        age: usize,
        observation: Observation,
    ) -> f32 {
        let layer = &self.layers[group][layer];
        let (true, Some(&score)) = (layer.tracked, layer.pages.get(index)) else { return 0.0 };
        match observation {
            Observation::Nothing => 0.0,
            Observation::Keys => score,
            Observation::AttentionMass { decay } => {
                let exposure = exposure(age.min(layer.rows), decay);
                if exposure > 0.0 { (f64::from(score) / exposure) as f32 } else { 0.0 }
            }
        }
    }
}

/// Decayed count of `queries` queries: `1 + decay + decay^2 + ...`.
fn exposure(queries: usize, decay: f32) -> f64 {
    let decay = f64::from(decay);
    if decay == 1.0 {
        return queries as f64;
    }
    (1.0 - decay.powf(queries as f64)) / (1.0 - decay)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: (usize, usize) = (0, 0);

    #[test]
    fn exposure_is_the_sum_of_the_weights() {
        for decay in [0.0, 0.5, 0.99, 1.0] {
            let mut sum = 0.0;
            for queries in 0..50 {
                assert!((exposure(queries, decay) - sum).abs() < 1e-9, "{queries} at {decay}");
                sum = sum * f64::from(decay) + 1.0;
            }
        }
    }

    #[test]
    fn a_page_that_gets_the_same_share_of_each_query_scores_that_share_whatever_its_age() {
        for decay in [0.5, 0.998, 1.0] {
            let mut scores = Scores::new([1].into_iter());
            scores.observe_masses(AT, 1, &[0.25; 40], decay);
            scores.extend(0, 0, 2);
            scores.observe_masses(AT, 2, &[0.25; 2 * 17], decay);
            let seen = Observation::AttentionMass { decay };
            for (index, age) in [(0, 57), (1, 17)] {
                let score = scores.score(AT, index, age, seen);
                assert!((score - 0.25).abs() < 1e-5, "{score} at {decay}");
            }
            // Observed late: the queries before are not counted.
            assert!((scores.score(AT, 0, 9999, seen) - 0.25).abs() < 1e-5);
        }
    }

    #[test]
    fn the_last_query_alone_counts_at_decay_zero_and_heals_nan() {
        let mut scores = Scores::new([1].into_iter());
        scores.observe_masses(AT, 2, &[f32::NAN, 1.0], 0.0);
        scores.observe_masses(AT, 2, &[9.0, 9.0, 0.5, 0.125], 0.0);
        let seen = Observation::AttentionMass { decay: 0.0 };
        assert_eq!([0, 1].map(|index| scores.score(AT, index, 64, seen)), [0.5, 0.125]);
    }

    #[test]
    fn nothing_is_stored_where_nothing_is_observed() {
        let mut scores = Scores::new([2, 1].into_iter());
        (0..2).for_each(|layer| scores.extend(0, layer, 1));
        assert_eq!(scores.layers[0][0].pages.capacity(), 0);
        assert_eq!(scores.score(AT, 0, 10, Observation::Keys), 0.0);
        scores.observe_keys((0, 1), 1, 0, 0.5);
        assert_eq!(scores.score((0, 1), 0, 10, Observation::Keys), 0.5);
        assert_eq!(scores.score(AT, 0, 10, Observation::Keys), 0.0);
        scores.remove(0, 0, 0..1);
        scores.remove(0, 1, 0..1);
        assert!(scores.layers[0][1].pages.is_empty());
    }
}
