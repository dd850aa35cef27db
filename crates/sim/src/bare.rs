//! Worlds without an engine: sequences of texts that share beginnings grow, fork, draft, give way, leave and
//! come back in random order over one pool and one prefix cache. Every page that is read must be the
//! reader's own, and what is exact must be what it is without pages.

use reef_kernels::dispatch::Tier;
use reef_kernels::page::reencode;
use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::Sinks;
use reef_kv::prefix::{BlockHash, IndexKind, PrefixCache, PrefixIdentity, PrefixRoot};
use reef_kv::{
    BlockPool, Demand, EncodeJob, Fidelity, GroupConfig, Ladder, PoolConfig, Sequence,
    SequenceConfig, Shortage, apply_relief, check_invariants, plan_relief,
};

use crate::pages::{Misread, PageModel, Rows};
use crate::random::{Random, mix};
use crate::reference::unpaged;

/// What bare worlds have been through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BareCounts {
    /// Blocks found in the cache and attached.
    pub attached_blocks: usize,
    /// Sequences that went on with a copy of a block's first rows.
    pub copied: usize,
    /// Sequences that left and came back.
    pub swapped: usize,
    /// Computations that had to be, and were, what they are without pages.
    pub exact: usize,
    /// Of these, in sequences that began with cached blocks.
    pub exact_attached: usize,
    /// Forks.
    pub forked: usize,
    /// Idle blocks evicted.
    pub evicted_bytes: usize,
}

struct Member {
    sequence: Sequence,
    tenant: usize,
    /// Accepted.
    tokens: Vec<u32>,
    published: usize,
    attached: bool,
}

struct Bare {
    pool: BlockPool,
    cache: PrefixCache,
    salts: Vec<PrefixRoot>,
    model: PageModel,
    random: Random,
    members: Vec<Member>,
    /// What prompts are the beginnings of.
    texts: Vec<Vec<u32>>,
    misreads: Vec<Misread>,
    next_request: u64,
    step: u64,
    counts: BareCounts,
}

/// Runs `operations` operations of the world of `seed`.
///
/// # Errors
/// The first thing that must not be. Panics of the pool are passed on.
pub fn run(seed: u64, operations: usize) -> Result<BareCounts, String> {
    let mut bare = Bare::new(seed)?;
    for _ in 0..operations {
        bare.operate()?;
        bare.check()?;
    }
    bare.members.clear();
    bare.check()?;
    let Bare { pool, cache, counts, .. } = bare;
    drop(cache);
    match pool.accounts().used_bytes() {
        0 => Ok(counts),
        used => Err(format!("{used} bytes used at the end")),
    }
}

/// Two bits of a true hash.
fn weak(before: &BlockHash, tokens: &[u32]) -> BlockHash {
    let start = u64::from(before.0[0]);
    let hash = tokens.iter().fold(start, |hash, &token| mix(hash ^ u64::from(token)));
    BlockHash([(hash & 3) as u8; 32])
}

fn encode(jobs: &mut [EncodeJob<'_>]) {
    for EncodeJob { shape, source_format, source, target_format, target, refused } in jobs {
        let done = reencode(Tier::detect(), shape, *source_format, *target_format, source, target);
        *refused = done.is_err();
    }
}

impl Bare {
    fn new(seed: u64) -> Result<Bare, String> {
        let mut random = Random::new(seed, "bare");
        let shape = PageShape { kv_heads: 1, head_dim: 32, block_size: 16 };
        let full = GroupConfig { layers: 1, shape, window: None, pinned: vec![] };
        let window = random.percent(60).then(|| random.size(5, 100));
        let groups = vec![full.clone(), GroupConfig { layers: 2, window, ..full }];
        let ladder = Ladder::default();
        let mut config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
        config.budget_bytes = random.size(400, 1500) * config.bytes_per_token(PageFormat::F16);
        let pool = BlockPool::new(config).map_err(|error| error.to_string())?;
        let mut identity = PrefixIdentity::new(b"fake", "", 16);
        if random.percent(50) {
            identity = identity.with_hasher(weak);
        }
        let salts = [&b"one"[..], b"two"].map(|salt| identity.salted(salt)).to_vec();
        let kind = random.pick(&[IndexKind::Chain, IndexKind::Radix]);
        let text = |random: &mut Random| (0..200).map(|_| random.size(0, 63) as u32).collect();
        Ok(Bare {
            cache: PrefixCache::new(&pool, identity, kind),
            salts,
            model: PageModel::new(&pool.config().groups),
            pool,
            texts: (0..3).map(|_| text(&mut random)).collect(),
            random,
            members: vec![],
            misreads: vec![],
            next_request: 0,
            step: 0,
            counts: BareCounts::default(),
        })
    }

    fn operate(&mut self) -> Result<(), String> {
        let count = self.members.len();
        let index = self.random.size(0, count.max(1) - 1);
        match self.random.between(0, 11) {
            0 if count < 6 => self.begin()?,
            1 if count > 0 => drop(self.members.swap_remove(index)),
            2 if (1..6).contains(&count) => self.fork(index),
            3 if count > 0 => self.compute_again(index)?,
            4 if count > 0 => self.swap(index)?,
            5 => self.evict(),
            6 if self.random.percent(30) => self.retain(),
            _ if count > 0 => self.advance(index)?,
            _ => {}
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), String> {
        let sequences: Vec<&Sequence> = self.members.iter().map(|m| &m.sequence).collect();
        if let Some(violation) = check_invariants(&self.pool, &sequences).into_iter().next() {
            return Err(violation.to_string());
        }
        if let Some(misread) = self.misreads.first() {
            return Err(misread.to_string());
        }
        self.cache.inconsistency().map_or(Ok(()), Err)
    }

    /// A sequence that begins as one of the texts does.
    fn begin(&mut self) -> Result<(), String> {
        let contract = self.random.pick(&Fidelity::ALL);
        let config = SequenceConfig {
            request: self.next_request,
            contract,
            priority: 0,
            trained_context: 4000,
            max_tokens: Some(500),
        };
        self.next_request += 1;
        let sequence = Sequence::new(&self.pool, config);
        let tenant = self.random.size(0, self.salts.len() - 1);
        let text = self.random.size(0, self.texts.len() - 1);
        let length = self.random.size(1, self.texts[text].len());
        let mut prompt = self.texts[text][..length].to_vec();
        let own = self.random.size(0, 20);
        prompt.extend((0..own).map(|_| self.random.size(0, 63) as u32));
        let (tokens, published, attached) = (vec![], 0, false);
        self.members.push(Member { sequence, tenant, tokens, published, attached });
        let index = self.members.len() - 1;
        self.attach(index, &prompt)?;
        let rest = &prompt[self.members[index].tokens.len()..];
        self.extend(index, rest, rest.len())
    }

    /// Begins a sequence that holds nothing with what the cache has of `prompt`.
    fn attach(&mut self, index: usize, prompt: &[u32]) -> Result<(), String> {
        let Member { sequence, tenant, .. } = &self.members[index];
        let contract = sequence.config().contract;
        let found = self.cache.lookup(&self.salts[*tenant], prompt, contract);
        if found.tokens() >= prompt.len() {
            return Err(format!("{} of {} tokens found", found.tokens(), prompt.len()));
        }
        let (full, partial) = (found.full_tokens(), found.partial);
        let member = &mut self.members[index];
        self.counts.attached_blocks += found.attached.len();
        member.attached = full > 0;
        member.sequence.attach_prefix(found.attached);
        if let Some(partial) = partial {
            let copied = member.sequence.copy_rows(&partial.blocks, partial.rows);
            self.counts.copied += usize::from(copied.is_ok());
        }
        member.tokens = prompt[..member.sequence.next_position()].to_vec();
        member.published = 0;
        if member.tokens.len() < full || member.sequence.fidelity() > contract {
            return Err(format!("attached {} tokens of {full}", member.tokens.len()));
        }
        Ok(())
    }

    fn fork(&mut self, index: usize) {
        let Member { sequence, tenant, tokens, published, attached } = &self.members[index];
        let member = Member {
            sequence: sequence.fork(self.next_request),
            tenant: *tenant,
            tokens: tokens.clone(),
            published: *published,
            attached: *attached,
        };
        self.next_request += 1;
        self.members.push(member);
        self.counts.forked += 1;
    }

    /// Makes room for `tokens` more of a member, of cached blocks first. Whether there is.
    fn make_room(&mut self, index: usize, tokens: usize) -> Result<bool, String> {
        if self.random.percent(70) {
            let mut demands: Vec<Demand<'_>> = Vec::new();
            for (place, Member { sequence, .. }) in self.members.iter().enumerate() {
                let tokens = if place == index { tokens } else { 0 };
                let step_tokens = tokens.max(1);
                demands.push(Demand { sequence, tokens, step_tokens, stretch_tokens: tokens });
            }
            let pool = &self.pool;
            let mut enough = || reef_kv::relief_needed_bytes(pool, &demands) == 0;
            self.counts.evicted_bytes += self.cache.evict(&mut enough);
        }
        let mut demands: Vec<Demand<'_>> = Vec::new();
        for (place, Member { sequence, .. }) in self.members.iter().enumerate() {
            let tokens = if place == index { tokens } else { 0 };
            let step_tokens = tokens.max(1);
            demands.push(Demand { sequence, tokens, step_tokens, stretch_tokens: tokens });
        }
        let plan = plan_relief(&self.pool, &demands, &Sinks { tail_tokens: 32 });
        let mut sequences: Vec<&mut Sequence> =
            self.members.iter_mut().map(|member| &mut member.sequence).collect();
        apply_relief(&self.pool, &mut sequences, &plan, self.step, &mut encode)
            .map_err(|error| error.to_string())?;
        self.step += 1;
        Ok(plan.shortage.is_none())
    }

    /// Some tokens more, of which the last ones may be rejected.
    fn advance(&mut self, index: usize) -> Result<(), String> {
        let wanted = self.random.pick(&[1, 1, 3, 20, 50]);
        let count = self.members[index].sequence.remaining(wanted);
        let vocabulary = self.random.pick(&[1, 63]);
        let tokens: Vec<u32> = (0..count).map(|_| self.random.size(0, vocabulary) as u32).collect();
        let rejects = count > 0 && self.random.percent(30);
        let accepted = if rejects { self.random.size(1, count) } else { count };
        self.extend(index, &tokens, accepted)
    }

    /// Computes `tokens` where there is room, and accepts the first `accepted` of them.
    fn extend(&mut self, index: usize, tokens: &[u32], accepted: usize) -> Result<(), String> {
        if tokens.is_empty() || !self.make_room(index, tokens.len())? {
            return Ok(());
        }
        let Ok(states) = self.compute(index, tokens) else { return Ok(()) };
        let member = &mut self.members[index];
        let before = member.tokens.len();
        member.sequence.commit(accepted);
        member.sequence.trim();
        member.tokens.extend(&tokens[..accepted]);
        let root = &self.salts[member.tenant];
        self.cache.publish(root, &mut member.sequence, &member.tokens, &mut member.published);
        if member.sequence.fidelity() == Fidelity::Exact {
            let groups = &self.pool.config().groups;
            let expected = unpaged(groups, link(member.tenant), &member.tokens);
            if states[..accepted] != expected[before..] {
                return Err(format!("exact rows from {before} on differ"));
            }
            self.counts.exact += 1;
            self.counts.exact_attached += usize::from(member.attached);
        }
        Ok(())
    }

    /// Grows by `tokens` and computes them.
    fn compute(&mut self, index: usize, tokens: &[u32]) -> Result<Vec<u64>, Shortage> {
        let member = &mut self.members[index];
        member.sequence.grow(tokens.len())?;
        let rows = Rows {
            tokens,
            first_position: member.tokens.len() as u32,
            view: member.sequence.view(),
            root: link(member.tenant),
        };
        let fence = self.pool.begin_step();
        let layers = self.model.layers();
        let states = self.model.compute(self.pool.arena(), &rows, layers, &mut self.misreads);
        fence.pass();
        Ok(states)
    }

    fn compute_again(&mut self, index: usize) -> Result<(), String> {
        let member = &mut self.members[index];
        let tokens = std::mem::take(&mut member.tokens);
        member.sequence.clear();
        member.published = 0;
        if tokens.is_empty() {
            return Ok(());
        }
        self.attach(index, &tokens)?;
        let rest = &tokens[self.members[index].tokens.len()..];
        self.extend(index, rest, rest.len())
    }

    /// Out and in again, with others moving into the pages in between.
    fn swap(&mut self, index: usize) -> Result<(), String> {
        let (image, pinned) = self.members[index].sequence.pin();
        let mut bytes = vec![0; pinned.bytes()];
        pinned.copy_to(0, &mut bytes);
        drop(pinned);
        let before = self.members[index].sequence.usage();
        let mut member = self.members.swap_remove(index);
        member.sequence.clear();
        for _ in 0..self.random.size(0, 3) {
            if !self.members.is_empty() {
                let other = self.random.size(0, self.members.len() - 1);
                self.advance(other)?;
            }
        }
        let Ok(mut pages) = member.sequence.restore(&image) else { return Ok(()) };
        let (cut, len) = (bytes.len() / 3, bytes.len());
        let copied = pages.copy_from(cut, &bytes[cut..]) + pages.copy_from(0, &bytes[..cut]);
        if copied != len {
            return Err(format!("{copied} of {len} bytes came back"));
        }
        member.sequence.adopt(image, pages);
        let after = member.sequence.usage();
        if after.tokens_by_format != before.tokens_by_format {
            return Err(format!("left as {before:?}, came back as {after:?}"));
        }
        self.members.push(member);
        self.counts.swapped += 1;
        Ok(())
    }

    fn evict(&mut self) {
        let mut left = self.random.size(0, 6);
        let mut enough = || {
            left = left.saturating_sub(1);
            left == 0
        };
        self.counts.evicted_bytes += self.cache.evict(&mut enough);
    }

    fn retain(&mut self) {
        let text = self.random.pick(&self.texts);
        let root = self.random.pick(&self.salts);
        match self.random.between(0, 3) {
            0 => self.cache.protect(&root, &text),
            1 => self.cache.protect(&root, &[]),
            2 => drop(self.cache.pin(&root, &text, self.step + 20)),
            _ => self.cache.expire(self.step),
        }
    }
}

/// Link before a tenant's first tokens.
fn link(tenant: usize) -> u32 {
    tenant as u32 + 5
}
