//! Letting waiting runs into the pool: in order, whole, and only where they fit.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeSet;

use reef_kv::admission::Need;
use reef_kv::page::PageFormat;
use reef_kv::transfer::EmptyPages;

use crate::config::AdmissionPolicy;
use crate::engine::Engine;
use crate::event::{Event, PauseKind, PauseReason};
use crate::executor::SlotKey;
use crate::preempt::MOST_PREEMPTIONS;
use crate::run::{Live, Record, Run, RunId, State};
use crate::session::HORIZON_TOKENS;

/// Kept tokens that a sequence whose blocks may be dropped is expected to need, so that text stays good;
/// relief goes below it before anybody stands still.
const EVICT_KEPT_TOKENS: usize = 512;

/// What became of the first in the queue.
enum Verdict {
    Admitted,
    /// Its tenant or class is at its limit: others may pass.
    AtLimit,
    /// The pool or the slots are full: nobody passes it.
    Full,
}

impl Engine {
    /// Lets in whoever fits. The first that does not fit is not passed by others, unless only its own
    /// tenant's or class's limit stands in the way.
    pub(crate) fn admit(&mut self) {
        if !std::mem::take(&mut self.queue_changed) {
            return;
        }
        let mut at_limit = BTreeSet::new();
        while let Some(id) = self.next_waiting(&at_limit) {
            match self.try_admit(id) {
                Verdict::Admitted => {}
                Verdict::AtLimit => {
                    at_limit.insert(id);
                }
                Verdict::Full => {
                    self.protect_prefix(id);
                    break;
                }
            }
        }
    }

    /// The first in the queue: by priority, those that were let in before first, then the tenant that
    /// had least, then by arrival.
    pub(crate) fn next_waiting(&self, except: &BTreeSet<RunId>) -> Option<RunId> {
        let waiting = self.waiting.iter().copied().filter(|id| !except.contains(id));
        waiting.min_by(|a, b| self.queue_order(*a, *b))
    }

    fn queue_order(&self, a: RunId, b: RunId) -> Ordering {
        let key = |id: RunId| {
            let run = &self.runs[&id];
            let live = &self.requests[&run.request];
            let place = (Reverse(live.request.priority), run.preemptions == 0);
            (place, self.share.time(live.request.tenant), (live.arrival, id))
        };
        let ((a_place, a_time, a_arrival), (b_place, b_time, b_arrival)) = (key(a), key(b));
        a_place.cmp(&b_place).then(a_time.total_cmp(&b_time)).then(a_arrival.cmp(&b_arrival))
    }

    /// The runs that are let in together: all beams of a search, else one.
    pub(crate) fn unit(&self, id: RunId) -> Vec<RunId> {
        let live = &self.requests[&self.runs[&id].request];
        if live.beams.is_some() { live.runs.clone() } else { vec![id] }
    }

    fn try_admit(&mut self, id: RunId) -> Verdict {
        let unit = self.unit(id);
        if unit.iter().any(|id| !self.runs[id].is_out()) {
            return Verdict::AtLimit;
        }
        if !self.heals() && !self.within_limits(&unit) {
            return Verdict::AtLimit;
        }
        let Some(displaced) = self.displaced_by(&unit) else { return Verdict::Full };
        // What is swapped gives its memory back later: only where the first chunk need not wait for it.
        let kind = (!self.fits_now(&unit)).then_some(PauseKind::Recompute);
        for victim in displaced {
            self.preempt(victim, PauseReason::Priority, kind);
        }
        for id in unit {
            if !self.let_in(id) {
                return Verdict::Full;
            }
        }
        Verdict::Admitted
    }

    /// Runs of lower priority that have to leave so that `unit` fits; `None`: it does not fit.
    fn displaced_by(&self, unit: &[RunId]) -> Option<Vec<RunId>> {
        let live = &self.requests[&self.runs[&unit[0]].request];
        let slots = unit.len() + live.missing_branches();
        let resumes = self.runs[&unit[0]].preemptions > 0;
        let needs = unit.iter().flat_map(|id| self.needs(*id, resumes)).collect();
        self.displaced_for(needs, slots, live.request.priority, resumes)
    }

    /// The same for `needs` of somebody of `priority` that takes `slots`; those inside count with what they
    /// need soon, or to their ends where it `resumes`.
    pub(crate) fn displaced_for(
        &self,
        mut needs: Vec<Need>,
        slots: usize,
        priority: i32,
        resumes: bool,
    ) -> Option<Vec<RunId>> {
        let mut inside: Vec<RunId> =
            self.runs.values().filter(|r| !r.is_out()).map(|r| r.id).collect();
        // Who leaves first stands last.
        inside.sort_by_key(|&id| (Reverse(self.priority(id)), self.runs[&id].admitted));
        let own = needs.len();
        needs.extend(inside.iter().flat_map(|id| self.needs(*id, resumes)));
        let most_running = self.most_running().max(slots);
        let mut displaced = Vec::new();
        loop {
            let taken: usize = inside.iter().map(|id| 1 + self.missing_branches_of(*id)).sum();
            // Alone it fits: that was checked when it came.
            let fits = inside.is_empty() || self.pool.fits_together(needs.iter().copied());
            if fits && taken + slots <= most_running {
                return Some(displaced);
            }
            let last = *inside.last()?;
            let run = &self.runs[&last];
            let gives_way = self.priority(last) < priority && run.preemptions < MOST_PREEMPTIONS;
            if !gives_way || !run.is_running() {
                return None;
            }
            inside.pop();
            displaced.push(last);
            needs.truncate(own);
            needs.extend(inside.iter().flat_map(|id| self.needs(*id, resumes)));
        }
    }

    /// Whether the first chunks of `unit` fit in what is free or idle.
    fn fits_now(&self, unit: &[RunId]) -> bool {
        let tokens: usize =
            unit.iter().map(|id| self.runs[id].remaining().min(self.chunk_tokens)).sum();
        let accounts = self.pool.accounts();
        let bytes = tokens * self.pool.config().bytes_per_token(PageFormat::F16);
        bytes <= accounts.free_bytes + accounts.cached_bytes
    }

    fn missing_branches_of(&self, id: RunId) -> usize {
        self.requests[&self.runs[&id].request].missing_branches()
    }

    /// What a run takes of the pool: to its end where it is to be `reserved` for, else soon.
    pub(crate) fn needs(&self, id: RunId, reserved: bool) -> Vec<Need> {
        let run = &self.runs[&id];
        let live = &self.requests[&run.request];
        let floor = self.pool.config().floor(live.request.fidelity);
        let block_size = self.pool.config().block_size();
        let generated = self.expected_tokens(run, live, reserved);
        let total = run.prompt_tokens + generated;
        let evicts = self.pool.config().ladder.permits(live.request.fidelity, reef_kv::Rung::Evict);
        let kept = if evicts { total.min(EVICT_KEPT_TOKENS) } else { total };
        // A branch shares the full blocks of the prompt with the first.
        let shared = if run.branch > 0 { run.prompt_tokens / block_size * block_size } else { 0 };
        let need = |tokens: usize| Need { tokens: tokens.max(1), floor, step_tokens: 1 };
        let mut needs = vec![need(kept.saturating_sub(shared))];
        needs.extend((0..live.missing_branches()).map(|_| need(generated + block_size)));
        needs
    }

    /// Tokens that a run will have generated, all or soon.
    fn expected_tokens(&self, run: &Run, live: &Live, reserved: bool) -> usize {
        let soon = (run.generated() + HORIZON_TOKENS).min(live.limit);
        let policy = self.config.scheduling.admission;
        match live.request.max_tokens {
            _ if policy == AdmissionPolicy::Utilize && !reserved => soon,
            Some(_) => live.limit,
            None => soon.max(self.expected_tokens as usize).min(live.limit),
        }
    }

    /// Whether the tenant's quota and the batch class's share bear `unit`; alone it always may.
    fn within_limits(&self, unit: &[RunId]) -> bool {
        let (tenant, priority) = self.tenant_and_priority(unit[0]);
        let asked: usize = unit.iter().map(|id| self.needed_bytes(*id)).sum();
        let batch = || {
            let held = self.needed_bytes_of(&|of| of.1 < 0);
            held == 0 || held + asked <= self.batch_bytes()
        };
        self.over_quota(tenant, asked).is_none() && (priority >= 0 || batch())
    }

    /// (bytes that its runs inside need, quota) of a tenant whose quota does not bear `asked` bytes more.
    pub(crate) fn over_quota(&self, tenant: usize, asked: usize) -> Option<(usize, usize)> {
        let quota = self.config.tenants[tenant].quota_bytes?;
        let held = self.needed_bytes_of(&|of| of.0 == tenant);
        (held > 0 && held + asked > quota).then_some((held, quota))
    }

    fn needed_bytes_of(&self, belongs: &dyn Fn((usize, i32)) -> bool) -> usize {
        let inside = self.runs.values().filter(|run| !run.is_out());
        let of_kind = inside.filter(|run| belongs(self.tenant_and_priority(run.id)));
        of_kind.map(|run| self.needed_bytes(run.id)).sum()
    }

    /// Bytes of pages that a run is to be kept room for.
    pub(crate) fn needed_bytes(&self, id: RunId) -> usize {
        let needs = self.needs(id, self.runs[&id].preemptions > 0);
        needs.into_iter().map(|need| self.pool.page_bytes(need)).sum()
    }

    pub(crate) fn batch_bytes(&self) -> usize {
        let share = self.config.scheduling.batch_share;
        (self.pool.config().budget_bytes as f64 * share) as usize
    }

    pub(crate) fn tenant_and_priority(&self, id: RunId) -> (usize, i32) {
        let request = &self.requests[&self.runs[&id].request].request;
        (request.tenant, request.priority)
    }

    /// Brings a run into the pool, or begins to. `false`: no room after all; nothing has changed.
    fn let_in(&mut self, id: RunId) -> bool {
        let Some(run) = self.runs.get_mut(&id) else { return true };
        match std::mem::replace(&mut run.state, State::Waiting) {
            State::Stored(record) => return self.load(id, record),
            _ => self.start(id),
        }
        true
    }

    fn start(&mut self, id: RunId) {
        self.attach_prefix(id);
        self.waiting.retain(|&waiting| waiting != id);
        self.take_slot(id);
    }

    /// Gives a run a slot and a generation, and tells that it runs.
    pub(crate) fn take_slot(&mut self, id: RunId) {
        let slot = (0..).find(|slot| !self.slots.contains(slot)).unwrap_or(0);
        self.slots.insert(slot);
        self.next_generation = self.next_generation.wrapping_add(1);
        self.next_admission += 1;
        let now_us = self.now_us;
        let Some(run) = self.runs.get_mut(&id) else { return };
        run.state = State::Running;
        run.slot = Some(SlotKey { slot, request: run.request, generation: self.next_generation });
        run.admitted = self.next_admission;
        let recomputed_tokens = run.most_computed.saturating_sub(run.computed());
        let (request, branch) = (run.request, run.branch);
        let paused = run.paused_since_us.take();
        self.running.push(id);
        let Some(live) = self.requests.get_mut(&request) else { return };
        live.recomputed_tokens += recomputed_tokens;
        let first = !std::mem::replace(&mut live.was_admitted, true);
        let (max_tokens, cached_tokens) = (live.limit, live.cached_tokens);
        if first {
            self.tell(request, Event::Admitted { max_tokens, cached_tokens });
        }
        if let Some(since) = paused {
            let paused_us = now_us.saturating_sub(since);
            self.tell(request, Event::Resumed { branch, recomputed_tokens, paused_us });
        }
    }

    /// Takes over what the prefix cache has of the run's known tokens.
    fn attach_prefix(&mut self, id: RunId) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        let Some(live) = self.requests.get_mut(&run.request) else { return };
        let (Some(cache), Some(root)) = (&mut self.prefix, &live.root) else { return };
        if live.request.prompt_logprobs.is_some() {
            return;
        }
        let found = cache.lookup(root, &run.tokens, live.request.fidelity);
        run.sequence.attach_prefix(found.attached);
        // A copy that finds no room is only a shorter hit.
        if let Some(partial) = found.partial {
            let _ = run.sequence.copy_rows(&partial.blocks, partial.rows);
        }
        run.published = run.computed() / self.config.block_size * self.config.block_size;
        if !live.was_admitted {
            live.cached_tokens = run.computed().min(run.prompt_tokens);
        }
        self.counters.cached_tokens += run.computed() as u64;
    }

    /// Begins to load a run from the spill store. `false`: its pages find no room.
    fn load(&mut self, id: RunId, record: Record) -> bool {
        let (Some(run), Some(spill)) = (self.runs.get_mut(&id), &mut self.spill) else {
            return true;
        };
        let mut pages: Option<EmptyPages> = None;
        let mut restore = || {
            pages = run.sequence.restore(&record.image).ok();
            pages.is_some()
        };
        match &mut self.prefix {
            Some(cache) if !restore() => {
                cache.evict(&mut restore);
            }
            Some(_) => {}
            None => {
                restore();
            }
        }
        let Some(pages) = pages else {
            run.state = State::Stored(record);
            // Pages may come free without anybody's leaving.
            self.queue_changed = true;
            return false;
        };
        self.waiting.retain(|&waiting| waiting != id);
        match spill.load(record.number, pages) {
            Ok(()) => run.state = State::Loading(record),
            Err(_) => {
                spill.discard(record.number);
                self.throw_away_record(id);
            }
        }
        true
    }

    /// The first in the queue does not fit: what it would find in the prefix cache goes last.
    fn protect_prefix(&mut self, id: RunId) {
        let Some(run) = self.runs.get(&id) else { return };
        if let (Some(cache), Some(root)) = (&mut self.prefix, &self.requests[&run.request].root) {
            cache.protect(root, &run.tokens);
        }
    }
}
