//! What gives way last: what the waiting queue's head matches, and what clients asked to retain.

use super::{EntryId, PrefixCache, PrefixRoot};
use crate::page::PageFormat;

/// Pinned entries take at most this fraction of the pool's budget, counted at f16: the rest stays for those
/// who run.
pub const PINNED_FRACTION: usize = 4;

impl PrefixCache {
    /// The blocks that `tokens` (of the head of the waiting queue) match give way last, until the next call;
    /// no tokens: nobody's.
    pub fn protect(&mut self, root: &PrefixRoot, tokens: &[u32]) {
        let path = self.match_whole(root, tokens);
        let protected = |entry: &EntryId| self.marks[entry.index()].protected;
        if path == self.protected && path.iter().all(protected) {
            return;
        }
        self.take_changes();
        // What has changed may have taken entries out.
        let path = self.match_whole(root, tokens);
        let mut changed = std::mem::replace(&mut self.protected, path);
        for entry in &changed {
            self.marks[entry.index()].protected = false;
        }
        for entry in &self.protected {
            self.marks[entry.index()].protected = true;
        }
        changed.extend_from_slice(&self.protected);
        self.requeue(&changed);
    }

    /// Retains what is cached of `tokens` until `until_us` (of the clock that [`expire`](Self::expire) is
    /// told): it gives way only when nothing else is left but what the waiting head matches. Pins take at
    /// most 1 / [`PINNED_FRACTION`] of the budget. Returns how many tokens are pinned, from the first.
    pub fn pin(&mut self, root: &PrefixRoot, tokens: &[u32], until_us: u64) -> usize {
        self.take_changes();
        let mut path = self.match_whole(root, tokens);
        let config = self.pool.config();
        let entry_bytes = config.bytes_per_token(PageFormat::F16) * self.block_size;
        let most = config.budget_bytes / PINNED_FRACTION / entry_bytes;
        let mut pinned = 0;
        for &entry in &path {
            let mark = &mut self.marks[entry.index()];
            let until_us = match mark.pinned_until_us {
                Some(earlier_us) => {
                    self.pins.remove(&(earlier_us, entry));
                    until_us.max(earlier_us)
                }
                None if self.pins.len() >= most => break,
                None => until_us,
            };
            mark.pinned_until_us = Some(until_us);
            self.pins.insert((until_us, entry));
            pinned += 1;
        }
        path.truncate(pinned);
        self.requeue(&path);
        pinned * self.block_size
    }

    /// Ends the pins whose time has come.
    pub fn expire(&mut self, now_us: u64) {
        let mut ended = Vec::new();
        while let Some(&(until_us, entry)) = self.pins.first().filter(|pin| pin.0 <= now_us) {
            self.pins.remove(&(until_us, entry));
            self.marks[entry.index()].pinned_until_us = None;
            ended.push(entry);
        }
        self.requeue(&ended);
    }

    fn match_whole(&self, root: &PrefixRoot, tokens: &[u32]) -> Vec<EntryId> {
        let mut path = Vec::new();
        if let Some(root) = self.tree.root(root) {
            self.index.walk(&self.tree, root, tokens, &mut path);
        }
        path
    }
}
