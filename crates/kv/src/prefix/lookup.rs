//! What a new sequence may begin with.

use super::{EntryId, PrefixCache, PrefixRoot};
use crate::block::BlockGuard;
use crate::ladder::Fidelity;
use crate::table::AttachedBlock;

/// A block whose first tokens agree with the next ones.
#[derive(Debug)]
pub struct PartialBlock {
    /// The block of each group, all f16; see [`Sequence::copy_rows`](crate::Sequence::copy_rows).
    pub blocks: Vec<Option<BlockGuard>>,
    /// Tokens that agree; at least 1, less than a block.
    pub rows: usize,
}

/// What a lookup has found and holds.
#[derive(Debug, Default)]
pub struct PrefixMatch {
    /// Tokens of full blocks.
    full_tokens: usize,
    /// Full blocks for [`Sequence::attach_prefix`](crate::Sequence::attach_prefix), by group and position:
    /// all from 0 on, in a window group those that the next token attends.
    pub attached: Vec<AttachedBlock>,
    /// The block behind, where its beginning agrees.
    pub partial: Option<PartialBlock>,
}

impl PrefixMatch {
    /// Tokens that need not be computed.
    pub fn tokens(&self) -> usize {
        self.full_tokens + self.partial.as_ref().map_or(0, |partial| partial.rows)
    }

    /// Those of full blocks.
    pub fn full_tokens(&self) -> usize {
        self.full_tokens
    }
}

impl PrefixCache {
    /// The longest beginning of `tokens` that is cached, computed with nothing that `contract` forbids, at
    /// most all but the last token (whose logits are wanted). Its blocks are held from now on; dropping the
    /// match lets them go. The hit ends where every full-attention block before, and in each window group
    /// every block that the next token attends, is there; behind it may be a block to copy the first rows
    /// of. Compares tokens: a collision of hashes is a miss.
    pub fn lookup(&mut self, root: &PrefixRoot, tokens: &[u32], contract: Fidelity) -> PrefixMatch {
        self.take_changes();
        self.stats.lookups += 1;
        self.stats.lookup_tokens += tokens.len() as u64;
        let usable = &tokens[..tokens.len().saturating_sub(1)];
        #[cfg(feature = "mutants")]
        let usable = match crate::mutant::is_active(crate::mutant::Mutant::LastToken) {
            true => tokens,
            false => usable,
        };
        let Some(root) = self.tree.root(root) else { return PrefixMatch::default() };
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        self.index.walk(&self.tree, root, usable, &mut path);
        path.truncate(self.end_of_hit(&path, contract));
        let found = self.hold(root, &path, usable, contract).unwrap_or_default();
        self.path = path;
        self.stats.hit_tokens += found.tokens() as u64;
        found
    }

    /// Blocks of the longest hit along `path`.
    fn end_of_hit(&self, path: &[EntryId], contract: Fidelity) -> usize {
        let groups = self.windows.len();
        let state = self.pool.shared.state();
        let is_usable = |node: usize| {
            let found = self.named[node].block.and_then(|block| state.cached(block));
            #[cfg(feature = "mutants")]
            if crate::mutant::is_active(crate::mutant::Mutant::IgnoreFidelity) {
                return found.is_some();
            }
            found.is_some_and(|found| found.fidelity <= contract)
        };
        let (mut end, mut good_end) = (0, 0);
        let mut unbroken = vec![0; groups];
        for &entry in path {
            end += 1;
            for (group, window) in self.windows.iter().enumerate() {
                let is_usable = is_usable(self.node(entry, group));
                if window.is_none() && !is_usable {
                    return good_end;
                }
                unbroken[group] = if is_usable { unbroken[group] + 1 } else { 0 };
            }
            let reaches = |group: usize| end - unbroken[group] <= self.first_block(group, end);
            if (0..groups).all(reaches) {
                good_end = end;
            }
        }
        good_end
    }

    /// The first block of a group that a token right behind block `end` attends.
    fn first_block(&self, group: usize, end: usize) -> usize {
        let position = end * self.block_size;
        self.windows[group]
            .map_or(0, |window| (position + 1).saturating_sub(window) / self.block_size)
    }

    /// Holds the blocks of a hit, and those of a block behind it that agrees in part. `None` where one has
    /// gone meanwhile.
    fn hold(
        &mut self,
        root: EntryId,
        path: &[EntryId],
        tokens: &[u32],
        contract: Fidelity,
    ) -> Option<PrefixMatch> {
        let mut found =
            PrefixMatch { full_tokens: path.len() * self.block_size, ..Default::default() };
        let groups = self.windows.len();
        let firsts = (0..groups).map(|group| self.first_block(group, path.len()));
        let firsts: Vec<usize> = firsts.collect();
        found.attached.reserve_exact(firsts.iter().map(|first| path.len() - first).sum());
        for (group, start) in firsts.into_iter().enumerate() {
            let nodes = path[start..].iter().map(|&entry| self.node(entry, group));
            let nodes: Vec<usize> = nodes.collect();
            let guards =
                self.pool.attach_all(nodes.iter().map_while(|&node| self.named[node].block));
            if guards.len() < nodes.len() {
                return None;
            }
            for ((index, node), guard) in (start..).zip(nodes).zip(guards) {
                self.named[node].used = true;
                let first = index * self.block_size;
                found.attached.push(AttachedBlock { first, group, guard });
            }
        }
        let parent = path.last().copied().unwrap_or(root);
        found.partial = self.hold_partial(parent, &tokens[found.full_tokens..], contract);
        Some(found)
    }

    fn hold_partial(
        &self,
        parent: EntryId,
        rest: &[u32],
        contract: Fidelity,
    ) -> Option<PartialBlock> {
        let rest = &rest[..rest.len().min(self.block_size - 1)];
        if rest.is_empty() {
            return None;
        }
        let groups = 0..self.windows.len();
        let copies = |node: usize| {
            let state = self.named[node].block.and_then(|block| self.pool.cached(block));
            state.is_some_and(|state| state.f16 && state.fidelity <= contract)
        };
        let mut accept = |entry| groups.clone().all(|group| copies(self.node(entry, group)));
        let (entry, rows) = self.index.partial(&self.tree, parent, rest, &mut accept)?;
        let attach = |group| self.pool.attach(self.named[self.node(entry, group)].block?);
        let blocks: Vec<Option<BlockGuard>> = groups.map(attach).collect();
        blocks.iter().all(Option::is_some).then_some(PartialBlock { blocks, rows })
    }
}
