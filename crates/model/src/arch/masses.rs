//! Attention masses of a pass, kept for who asks afterwards.

use std::ops::Range;

/// Masses of every observed (sequence, layer) of one pass. The memory is kept and reused: it grows to
/// the largest pass that was observed and costs nothing where none is.
#[derive(Default)]
pub struct Masses {
    values: Vec<f32>,
    /// Per (sequence, layer of any group): where its masses are; empty where it was not observed.
    ranges: Vec<Range<usize>>,
    /// Index of each group's first layer among the layers of all groups, and after them their number.
    first_layers: Vec<usize>,
}

impl Masses {
    /// Forgets the last pass; the next has `sequences` and groups of so many layers.
    pub fn begin(&mut self, sequences: usize, group_layers: impl Iterator<Item = usize>) {
        self.first_layers.clear();
        self.first_layers.push(0);
        for layers in group_layers {
            let end = self.layers() + layers;
            self.first_layers.push(end);
        }
        self.values.clear();
        self.ranges.clear();
        self.ranges.resize(sequences * self.layers(), 0..0);
    }

    fn layers(&self) -> usize {
        self.first_layers.last().copied().unwrap_or(0)
    }

    /// Where the masses of a layer are; `None` for what the pass has not.
    fn place(&self, sequence: usize, group: usize, layer: usize) -> Option<usize> {
        let (first, end) = (*self.first_layers.get(group)?, *self.first_layers.get(group + 1)?);
        let place = sequence * self.layers() + first + layer;
        (first + layer < end && place < self.ranges.len()).then_some(place)
    }

    /// Keeps `masses` of layer `layer` of group `group` for sequence `sequence` of the batch.
    pub fn keep(&mut self, sequence: usize, group: usize, layer: usize, masses: &[f32]) {
        if let Some(place) = self.place(sequence, group, layer) {
            let start = self.values.len();
            self.values.extend_from_slice(masses);
            self.ranges[place] = start..self.values.len();
        }
    }

    /// What was kept; empty where nothing was.
    pub fn of(&self, sequence: usize, group: usize, layer: usize) -> &[f32] {
        let place = self.place(sequence, group, layer);
        place.map_or(&[], |place| &self.values[self.ranges[place].clone()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_layer_of_each_sequence_has_its_own() {
        let mut masses = Masses::default();
        masses.begin(2, [2, 3].into_iter());
        masses.keep(1, 1, 2, &[5.0, 6.0]);
        masses.keep(0, 0, 1, &[1.0]);
        assert_eq!(masses.of(1, 1, 2), [5.0, 6.0]);
        assert_eq!(masses.of(0, 0, 1), [1.0]);
        assert_eq!(masses.of(0, 1, 2), [0.0; 0]);
        assert_eq!(masses.of(0, 0, 2), [0.0; 0], "not the next group's");
        assert_eq!(masses.of(2, 0, 0), [0.0; 0]);
        masses.begin(1, [2, 3].into_iter());
        assert_eq!(masses.of(0, 0, 1), [0.0; 0], "forgotten");
    }
}
