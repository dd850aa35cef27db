//! What an eviction policy is shown of each step.

use reef_kernels::page::key_distinctness;
use reef_kernels::rows::for_each_row_pair;
use reef_kv::page::{PageFormat, PageRef};
use reef_kv::policy::{EvictionPolicy, Observation};
use reef_kv::{Rung, Sequence};
use reef_model::runner::{Compute, ModelRunner};

/// Most bytes of attention masses that one step keeps.
const MASS_BYTES: usize = 32 << 20;

/// What `policy` observes of `sequence`: nothing where no block of it may ever be dropped.
pub fn observation(policy: &dyn EvictionPolicy, sequence: &Sequence) -> Observation {
    let ladder = &sequence.pool().config().ladder;
    match ladder.permits(sequence.config().contract, Rung::Evict) {
        true => policy.observes(),
        false => Observation::Nothing,
    }
}

/// Most tokens of `sequence` to compute in one step, so that the masses to keep stay bounded however
/// long the context is. At least 1.
pub fn most_rows(policy: &dyn EvictionPolicy, sequence: &Sequence) -> usize {
    let Observation::AttentionMass { .. } = observation(policy, sequence) else {
        return usize::MAX;
    };
    let pages = |group: &reef_kv::page::GroupView| group.layers.iter().map(Vec::len).sum::<usize>();
    let groups = sequence.pool().config().groups.iter().zip(&sequence.view().groups);
    let observed = groups.filter(|(config, _)| config.window.is_none());
    let held: usize = observed.map(|(_, view)| pages(view)).sum();
    (MASS_BYTES / (held.max(1) * size_of::<f32>())).max(1)
}

/// Hands the masses of the last pass, in which `sequence` was number `place`, to the sequence. To be
/// called before its tokens are committed, while its view is what the pass has seen.
pub fn observe_masses(runner: &ModelRunner, place: usize, sequence: &mut Sequence, decay: f32) {
    let groups = sequence.pool().config().groups.iter();
    let full: Vec<(usize, usize)> = groups
        .map(|g| (g.layers, g.window))
        .enumerate()
        .filter_map(|(index, (layers, window))| window.is_none().then_some((index, layers)))
        .collect();
    for (group, layers) in full {
        for layer in 0..layers {
            sequence.observe_masses(group, layer, runner.masses(place, group, layer), decay);
        }
    }
}

/// Scores the keys of newly sealed blocks. Holds the buffers of that.
#[derive(Default)]
pub struct KeyObserver {
    /// `[layers][kv_heads * head_dim]`.
    anchors: Vec<f32>,
    /// `[layers][blocks]`.
    scores: Vec<f32>,
}

impl KeyObserver {
    /// Scores the blocks of `sequence` that were sealed since it had `before` tokens, in every layer of
    /// the full-attention groups. To be called after the commit that sealed them and before they are
    /// re-encoded: keys are looked at in f16. No step may be in flight.
    pub fn observe(&mut self, compute: &Compute, sequence: &mut Sequence, before: usize) {
        let block_size = sequence.pool().config().block_size();
        let first = before / block_size * block_size;
        let sealed_end = sequence.next_position() / block_size * block_size;
        let blocks = (first..sealed_end).step_by(block_size).len();
        if blocks == 0 {
            return;
        }
        for group in 0..sequence.pool().config().groups.len() {
            if sequence.pool().config().groups[group].window.is_none() {
                self.score_group(compute, sequence, group, (first, blocks));
                self.hand_over(sequence, group, (first, blocks));
            }
        }
    }

    /// Layers side by side, the blocks of each in order, because each is compared with those before.
    fn score_group(
        &mut self,
        compute: &Compute,
        sequence: &mut Sequence,
        group: usize,
        (first, blocks): (usize, usize),
    ) {
        let shape = sequence.pool().config().groups[group].shape;
        let layers = sequence.pool().config().groups[group].layers;
        let width = shape.kv_heads * shape.head_dim;
        self.anchors.clear();
        for layer in 0..layers {
            self.anchors.extend_from_slice(sequence.key_anchor(group, layer));
        }
        self.scores.clear();
        self.scores.resize(layers * blocks, 0.0);
        let view = &sequence.view().groups[group];
        let arena = sequence.pool().arena().bytes();
        let page_bytes = shape.page_bytes(PageFormat::F16);
        let bytes_of = |page: &PageRef| &arena[page.byte_offset()..][..page_bytes];
        let (anchors, scores) = ((&mut self.anchors[..], width), (&mut self.scores[..], blocks));
        for_each_row_pair(&compute.pool, layers, anchors, scores, &|layer, anchor, scores| {
            let pages = &view.layers[layer];
            let start = pages.partition_point(|page| (page.first as usize) < first);
            for (score, page) in scores.iter_mut().zip(&pages[start..]) {
                debug_assert_eq!(page.format, PageFormat::F16, "sealed just now");
                *score = key_distinctness(compute.tier, &shape, bytes_of(page), anchor);
            }
        });
    }

    fn hand_over(&self, sequence: &mut Sequence, group: usize, (first, blocks): (usize, usize)) {
        let block_size = sequence.pool().config().block_size();
        let layers = sequence.pool().config().groups[group].layers;
        let width = self.anchors.len() / layers;
        for layer in 0..layers {
            sequence
                .key_anchor(group, layer)
                .copy_from_slice(&self.anchors[layer * width..][..width]);
            for (block, score) in self.scores[layer * blocks..][..blocks].iter().enumerate() {
                sequence.observe_keys(group, layer, first + block * block_size, *score);
            }
        }
    }
}
