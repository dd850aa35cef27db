//! The engine's record of a request and of its branches.

use std::sync::Arc;

use reef_kv::prefix::PrefixRoot;
use reef_kv::transfer::SequenceImage;
use reef_kv::{KvUsage, Sequence};

use crate::beam::BeamSearch;
use crate::event::{Continuation, Pause, TokenLogprobs};
use crate::executor::SlotKey;
use crate::request::{Branches, Request};
use crate::sampler::{Sampler, Sampling};

/// Identifies a run; never used again. Also the `request` of its sequence and ledger.
pub(crate) type RunId = u64;

/// Where the KV of a run is.
#[derive(Debug)]
pub(crate) enum State {
    /// Nowhere: it is new, or was thrown away.
    Waiting,
    /// In the pool, in a slot.
    Running,
    /// In the pool, and being written to the spill store.
    Storing(Record),
    /// In the spill store.
    Stored(Record),
    /// In the spill store, its pages in the pool being filled.
    Loading(Record),
}

/// A sequence in the spill store.
#[derive(Debug)]
pub(crate) struct Record {
    pub number: u64,
    pub image: SequenceImage,
}

/// One branch of a request.
#[derive(Debug)]
pub(crate) struct Run {
    pub id: RunId,
    /// The request's key.
    pub request: u64,
    pub branch: u32,
    pub sequence: Sequence,
    /// Prompt and generated tokens. Those from `sequence.next_position()` on are still to be computed;
    /// at least one is, unless its logits are awaited by a beam search.
    pub tokens: Vec<u32>,
    pub prompt_tokens: usize,
    pub sampler: Sampler,
    pub state: State,
    /// Where it runs, while it does.
    pub slot: Option<SlotKey>,
    /// Tokens whose blocks the prefix cache knows.
    pub published: usize,
    /// Of generated tokens, where asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Sum over generated tokens, where asked for or needed.
    pub cumulative_logprob: f64,
    /// Logits of the last token, kept until all beams of the search have theirs.
    pub beam_logits: Option<Vec<f32>>,
    /// Order of admission: later ones give way first.
    pub admitted: u64,
    /// Times it was swapped or thrown away.
    pub preemptions: u32,
    /// Since when it stands still, in microseconds.
    pub paused_since_us: Option<u64>,
    /// Most tokens ever computed: fewer now means that some are computed again.
    pub most_computed: usize,
    /// Ledger entries told so far.
    pub entries_told: usize,
    /// Ledger entries that it has from the branch it was forked off, which reports them.
    pub entries_inherited: usize,
}

impl Run {
    /// Tokens computed.
    pub(crate) fn computed(&self) -> usize {
        self.sequence.next_position()
    }

    /// Tokens that are known and not computed.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed()
    }

    /// Generated tokens.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    /// Whether its next step gives one new token: nothing older is to be computed.
    pub(crate) fn is_decoding(&self) -> bool {
        self.remaining() == 1 && self.computed() >= self.prompt_tokens
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Running)
    }

    /// Whether it is to be let in (again).
    pub(crate) fn is_out(&self) -> bool {
        matches!(self.state, State::Waiting | State::Stored(_))
    }
}

/// One request.
#[derive(Debug)]
pub(crate) struct Live {
    pub request: Arc<Request>,
    /// Order of arrival.
    pub arrival: u64,
    /// Limit of generated tokens in force.
    pub limit: usize,
    /// Identity of its prefixes; `None`: the cache is off for it.
    pub root: Option<PrefixRoot>,
    /// Branches that go on.
    pub runs: Vec<RunId>,
    /// Branches that have ended, by number.
    pub ended: Vec<(u32, Continuation)>,
    pub beams: Option<BeamSearch>,
    /// All branches exist.
    pub branched: bool,
    /// It was let in at least once.
    pub was_admitted: bool,
    pub cached_tokens: usize,
    pub pauses: Vec<Pause>,
    pub recomputed_tokens: usize,
    pub drafts: (usize, usize),
    /// Prompt tokens told as computed.
    pub prompt_told: usize,
    /// KV usage of the branches that have ended.
    pub usage: Option<KvUsage>,
    /// Most bytes that its branches held at once, shared ones counted once.
    pub peak_bytes: usize,
}

impl Live {
    /// Branches that are still to be made.
    pub(crate) fn missing_branches(&self) -> usize {
        if self.branched { 0 } else { self.request.branches.width() - 1 }
    }

    /// The sampler of a branch: each has its own random numbers.
    pub(crate) fn sampler(&self, branch: u32) -> Sampler {
        let Request { sampling, prompt, end_ids, constraint, .. } = &*self.request;
        let seed = sampling.seed.wrapping_add(u64::from(branch));
        let sampling = Sampling { seed, ..sampling.clone() };
        Sampler::begin(sampling, prompt, end_ids, constraint.clone())
    }

    /// Log-probabilities to be asked of the sampler: those wanted, or the chosen token's where the best
    /// branches are to be found.
    pub(crate) fn logprobs_wanted(&self) -> Option<usize> {
        let Branches::Sample { n, best_of } = self.request.branches else {
            return self.request.logprobs;
        };
        self.request.logprobs.or((best_of > n).then_some(0))
    }

    /// Adds what the KV of a branch went through.
    pub(crate) fn add_usage(&mut self, of_branch: KvUsage) {
        match &mut self.usage {
            None => self.usage = Some(of_branch),
            Some(sum) => {
                for (format, tokens) in of_branch.tokens_by_format.iter() {
                    sum.tokens_by_format[format] += tokens;
                }
                sum.dropped_tokens += of_branch.dropped_tokens;
                sum.held_bytes += of_branch.held_bytes;
                sum.peak_bytes += of_branch.peak_bytes;
                sum.bytes_at_f16 += of_branch.bytes_at_f16;
                sum.relief.extend(of_branch.relief);
            }
        }
    }
}
