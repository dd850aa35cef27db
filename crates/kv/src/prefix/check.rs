//! What must hold of a prefix cache at any time.

use super::{EntryId, PrefixCache};

impl PrefixCache {
    /// What of the cache's invariants does not hold, in one line; `None`: all hold. Takes time in
    /// proportion to the entries: for tests, simulation, and a server that has nothing to do. Assumes that
    /// no other cache names blocks of the pool.
    pub fn inconsistency(&mut self) -> Option<String> {
        self.take_changes();
        let entries = self.tree.entries();
        entries
            .iter()
            .find_map(|&entry| self.wrong_entry(entry))
            .or_else(|| self.wrong_path(&entries))
            .or_else(|| self.wrong_counts(&entries))
    }

    /// Names are cached blocks, idle ones queue where they belong, tails give way before heads.
    fn wrong_entry(&self, entry: EntryId) -> Option<String> {
        let depth = self.tree.depth(entry);
        for group in 0..self.windows.len() {
            let node = self.node(entry, group);
            let turn = self.idle.turn(node);
            let Some(block) = self.named[node].block else {
                if self.is_full(node) || turn.is_some() {
                    return Some(format!("block {depth} has no block in group {group}"));
                }
                continue;
            };
            let Some(state) = self.pool.cached(block) else {
                return Some(format!("block {depth} of group {group} is named, and not cached"));
            };
            if state.held == turn.is_some() || self.node_named(block) != Some(node) {
                return Some(format!("block {depth} of group {group}: {state:?}, queue {turn:?}"));
            }
            let belongs = turn.filter(|_| self.is_full(node)).map(|_| self.turn(node));
            if belongs.is_some_and(|belongs| turn != Some(belongs)) {
                return Some(format!("block {depth}: queue {turn:?}, belongs in {belongs:?}"));
            }
            let parent = self.tree.parent(entry).filter(|&parent| self.tree.is_entry(parent));
            let above = parent.map(|parent| self.node(parent, group));
            let both_wait =
                above.filter(|&above| turn.is_some() && self.idle.turn(above).is_some());
            if both_wait
                .is_some_and(|above| self.is_full(node) && !self.idle.is_behind(above, node))
            {
                return Some(format!("block {} gives way before block {depth}", depth - 1));
            }
        }
        None
    }

    /// The index finds every leaf along the tree's path.
    fn wrong_path(&self, entries: &[EntryId]) -> Option<String> {
        let leaves = entries.iter().filter(|&&entry| self.tree.children(entry).next().is_none());
        for &leaf in leaves {
            let up = std::iter::successors(Some(leaf), |&entry| self.tree.parent(entry));
            let mut expected: Vec<EntryId> = up.collect();
            expected.reverse();
            let root = expected.remove(0);
            let (mut tokens, mut path) = (Vec::new(), Vec::new());
            expected.iter().for_each(|&entry| self.index.tokens(&self.tree, entry, &mut tokens));
            self.index.walk(&self.tree, root, &tokens, &mut path);
            if path != expected {
                return Some(format!(
                    "of {} blocks the index finds {}",
                    expected.len(),
                    path.len()
                ));
            }
        }
        None
    }

    /// Nothing is cached that has no name, nothing pinned that is not there.
    fn wrong_counts(&self, entries: &[EntryId]) -> Option<String> {
        let groups = self.windows.len();
        let nodes = entries.iter().flat_map(|&entry| (0..groups).map(move |g| self.node(entry, g)));
        let named = nodes.filter(|&node| self.named[node].block.is_some()).count();
        let cached = self.pool.shared.state().blocks.iter().filter(|block| block.cached).count();
        let mark = |entry: &EntryId| self.marks[entry.index()];
        let pinned = entries.iter().filter(|entry| mark(entry).pinned_until_us.is_some()).count();
        if named != cached || pinned != self.pins.len() {
            let pins = self.pins.len();
            return Some(format!("{named} named, {cached} cached; {pinned} pinned, {pins} pins"));
        }
        None
    }
}
