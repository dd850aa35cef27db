//! Down the ladder in the middle of a text: what f16 blocks that become smaller late cost, against
//! having been small from the start.

use reef_kv::BlockPool;
use reef_kv::page::{PAGE_ALIGN, PageFormat, SequenceView};
use reef_model::runner::ModelRunner;

use super::lanes::Lanes;
use crate::score::{RowScorer, ScoreSink};
use crate::session::{EngineError, Rules, Session};

/// Which way a sequence goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Every sealed block is in the format from the start.
    Start(PageFormat),
    /// f16 up to the switch; then every sealed block goes to the format at once, later ones when they
    /// are sealed.
    Switch(PageFormat),
    /// As `Switch` to the last rung, but every block goes through all rungs on its way at the switch.
    Walk,
    /// The first rung at the switch, the others later at equal distances.
    Staged,
}

/// Down the ladder in every window of a text.
#[derive(Clone, Debug)]
pub struct Descent<'a> {
    /// Tokens of a window.
    pub context: usize,
    /// Tokens of a window computed at f16 first; rounded up to whole blocks.
    pub switch: usize,
    /// Formats on the way down; each can become the next.
    pub rungs: &'a [PageFormat],
    /// Tokens of a block; as the runner was loaded with.
    pub block_size: usize,
    /// Layers (index in the model) whose pages stay f16.
    pub pinned_layers: &'a [usize],
}

/// Pages of sealed blocks that two ways down must have brought to the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Pages compared.
    pub pages: usize,
    /// Pages that differ.
    pub different: usize,
}

impl Descent<'_> {
    /// The ways down that are compared, in the order of their numbers.
    pub fn paths(&self) -> Vec<Path> {
        let starts = self.rungs.iter().map(|format| Path::Start(*format));
        let switches = self.rungs.iter().map(|format| Path::Switch(*format));
        starts.chain(switches).chain([Path::Walk, Path::Staged]).collect()
    }

    /// Tokens of a window at which rung `index` begins where they are staged.
    pub fn stage(&self, index: usize) -> usize {
        let switch = self.switch.next_multiple_of(self.block_size);
        let rest = self.context.saturating_sub(switch);
        switch + (rest * index / self.rungs.len()).next_multiple_of(self.block_size)
    }

    /// Formats that sealed blocks are brought to, in this order, once `done` tokens are computed.
    fn formats(&self, path: Path, done: usize) -> Vec<PageFormat> {
        let switched = done >= self.stage(0);
        match path {
            Path::Start(format) => vec![format],
            Path::Switch(format) if switched => vec![format],
            Path::Walk if switched => self.rungs.to_vec(),
            Path::Staged => {
                let begun = (0..self.rungs.len()).filter(|index| done >= self.stage(*index));
                begun.map(|index| self.rungs[index]).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Scores `ids` window by window on every path beside f16 KV; `sink` gets the path's number.
    /// Returns how the pages of [`Path::Walk`] compare with those of [`Path::Switch`] to the last rung.
    ///
    /// # Errors
    /// A token outside the vocabulary, a pinned layer that the model does not have, logits that are not
    /// finite.
    pub fn score(
        &self,
        runner: &mut ModelRunner,
        ids: &[u32],
        sink: &mut ScoreSink<'_>,
    ) -> Result<Identity, EngineError> {
        runner.check_tokens(ids)?;
        let paths = self.paths();
        let plain: Vec<Rules> = (0..=paths.len()).map(|_| Rules::default()).collect();
        let Descent { block_size, pinned_layers, .. } = *self;
        let lanes = Lanes { block_size, treatments: &plain, pinned_layers };
        let mut scorer = RowScorer::new(paths.len(), true);
        let mut identity = Identity::default();
        for (window, tokens) in ids.chunks(self.context).enumerate() {
            let pool = lanes.pool(runner, tokens.len(), 0)?;
            let mut sessions = lanes.sessions(runner, &pool, tokens.len());
            for (block, chunk) in tokens.chunks(block_size).enumerate() {
                let repeated = chunk.repeat(sessions.len());
                Session::advance_all(runner, &mut sessions, &repeated)?;
                let first = block * block_size;
                let targets = &tokens[first + 1..tokens.len().min(first + chunk.len() + 1)];
                let first_target = window * self.context + first + 1;
                scorer.score(runner, chunk.len(), targets, first_target, sink)?;
                for (path, session) in paths.iter().zip(&mut sessions[1..]) {
                    for format in self.formats(*path, first + chunk.len()) {
                        session.re_encode(runner.compute(), format, 0, 0)?;
                    }
                }
            }
            let view = |path| {
                let place = paths.iter().position(|other| *other == path);
                place.map(|place| sessions[1 + place].sequence().view())
            };
            let last = self.rungs.last().map(|format| Path::Switch(*format));
            if let Some((walked, at_once)) = view(Path::Walk).zip(last.and_then(view)) {
                identity.compare(&pool, walked, at_once);
            }
        }
        Ok(identity)
    }
}

impl Identity {
    fn compare(&mut self, pool: &BlockPool, a: &SequenceView, b: &SequenceView) {
        let shapes = pool.config().groups.iter().map(|group| group.shape);
        for ((a, b), shape) in a.groups.iter().zip(&b.groups).zip(shapes) {
            let layers = a.layers.iter().zip(&b.layers);
            for (a, b) in layers.flat_map(|(a, b)| a.iter().zip(b)) {
                if a.format == PageFormat::F16 && b.format == PageFormat::F16 {
                    continue; // not sealed, or pinned
                }
                let bytes = |page: &reef_kv::page::PageRef| {
                    &pool.arena().bytes()[page.offset as usize * PAGE_ALIGN..]
                        [..shape.page_bytes(page.format)]
                };
                self.pages += 1;
                self.different += usize::from(a.format != b.format || bytes(a) != bytes(b));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PageFormat::{Int4, Int8, K8V4};

    fn descent() -> Descent<'static> {
        Descent {
            context: 256,
            switch: 100,
            rungs: &[Int8, K8V4, Int4],
            block_size: 32,
            pinned_layers: &[],
        }
    }

    #[test]
    fn stages_begin_at_whole_blocks() {
        let stages: Vec<usize> = (0..3).map(|index| descent().stage(index)).collect();
        assert_eq!(stages, [128, 192, 224]);
    }

    #[test]
    fn each_path_goes_down_when_it_should() {
        let formats = |path, done| descent().formats(path, done);
        assert_eq!(formats(Path::Start(Int4), 32), [Int4]);
        assert!(formats(Path::Switch(Int4), 127).is_empty());
        assert_eq!(formats(Path::Switch(Int4), 128), [Int4]);
        assert_eq!(formats(Path::Walk, 128), [Int8, K8V4, Int4]);
        assert_eq!(formats(Path::Staged, 191), [Int8]);
        assert_eq!(formats(Path::Staged, 224), [Int8, K8V4, Int4]);
        assert_eq!(descent().paths().len(), 8);
    }
}
