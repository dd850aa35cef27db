//! Relief in the twin: what a plan may do, and what it has done.

use std::panic::{AssertUnwindSafe, catch_unwind};

use reef_kv::page::PageFormat;
use reef_kv::policy::EvictionPolicy;
use reef_kv::relief::{DropTarget, MoveKind};
use reef_kv::*;

use crate::model::{Twin, has_nan, keep_rows, shown, stamp};
use crate::{BLOCK, Simulation, policy, see};

impl Simulation {
    pub fn relieve(&mut self, tokens: usize, stretch: usize, name: &str, panics_at: usize) {
        let policy = policy(name, TAIL_TOKENS);
        let wanted: Vec<usize> =
            self.sequences.iter().map(|(sequence, _)| sequence.remaining(tokens)).collect();
        let plan = self.plan(&wanted, tokens, stretch, &*policy);
        assert_eq!(plan, self.plan(&wanted, tokens, stretch, &*policy), "not deterministic");
        let demands = self.demands(&wanted, tokens, stretch);
        let needed = relief_needed_bytes(&self.pool, &demands) > 0;
        let unknown = demands.iter().any(|demand| demand.sequence.config().max_tokens.is_none());
        let by_context = |planned: &relief::Move| planned.reason == Reason::Context;
        assert!(needed || unknown || plan.moves.iter().all(by_context));
        self.protects_what_it_must(&plan, name);
        let done = self.carry_out(&plan, panics_at);
        if !done {
            return;
        }
        if plan.shortage.is_some() {
            // It gave up all it may: nothing is left that a second plan would take.
            let again = self.plan(&wanted, tokens, stretch, &*policy);
            assert!(again.shortage.is_some());
            assert_eq!(again.moves, []);
            return;
        }
        // What was planned for fits, beside pins and idle blocks too: every sequence can grow by its demand.
        // One that wants nothing copies no open block that is read elsewhere, so it must not be written.
        for (index, tokens) in wanted.into_iter().enumerate() {
            assert!(tokens == 0 || self.grow(index, tokens));
        }
    }

    fn demands(&self, wanted: &[usize], step_tokens: usize, stretch: usize) -> Vec<Demand<'_>> {
        let mut demands = Vec::new();
        for ((sequence, _), &tokens) in self.sequences.iter().zip(wanted) {
            let stretch_tokens = tokens + stretch;
            demands.push(Demand { sequence, tokens, step_tokens, stretch_tokens });
        }
        demands
    }

    fn plan(
        &self,
        wanted: &[usize],
        step: usize,
        stretch: usize,
        policy: &dyn EvictionPolicy,
    ) -> ReliefPlan {
        plan_relief(&self.pool, &self.demands(wanted, step, stretch), policy)
    }

    /// No plan touches exact requests, pinned layers, open blocks, or drops what the policy protects; no
    /// move is forbidden by contract, ladder or the model's keys; each gives bytes back.
    fn protects_what_it_must(&self, plan: &ReliefPlan, policy: &str) {
        let config = self.pool.config();
        for planned in &plan.moves {
            let found =
                |(sequence, _): &&(Sequence, Twin)| sequence.config().request == planned.request;
            let (sequence, twin) = self.sequences.iter().find(found).unwrap();
            assert!(config.ladder.permits(sequence.config().contract, planned.rung()));
            assert!(planned.first + BLOCK <= twin.next);
            assert!(planned.bytes > 0 && planned.harm >= 0.0);
            match planned.kind {
                MoveKind::Drop(_) => assert!(
                    policy == "window"
                        || planned.first > 0 && planned.first + BLOCK + TAIL_TOKENS <= twin.next
                ),
                MoveKind::Encode { group, .. } => {
                    assert!(config.groups[group].pinned.len() < config.groups[group].layers);
                }
            }
        }
    }

    fn shrinks(&self, group: usize, from: PageFormat, to: PageFormat) -> bool {
        let shape = self.pool.config().groups[group].shape;
        from.can_become(to) && shape.page_bytes(to) < shape.page_bytes(from)
    }

    /// Carries `plan` out with a kernel that refuses pages with a NaN and panics at its `panics_at`-th
    /// job. Returns whether it ran to the end and nothing was refused.
    pub fn carry_out(&mut self, plan: &ReliefPlan, panics_at: usize) -> bool {
        let mut done = 0;
        let mut kernel = |jobs: &mut [EncodeJob<'_>]| {
            for job in jobs {
                keep_rows(job);
                job.refused = has_nan(job.source[0]) && job.source_format == PageFormat::F16;
                done += 1;
                if done > panics_at {
                    // Prints nothing, unlike `panic!`.
                    std::panic::resume_unwind(Box::new("kernel fault"));
                }
            }
        };
        let mut sequences: Vec<&mut Sequence> = self.sequences.iter_mut().map(|(s, _)| s).collect();
        let result = catch_unwind(AssertUnwindSafe(|| {
            apply_relief(&self.pool, &mut sequences, plan, self.step, &mut kernel)
        }));
        let (mut refused_pages, mut whole) = (0, result.is_ok());
        match &result {
            Ok(Err(error)) => {
                assert_eq!(*error, relief::ReliefError::StepInFlight);
                assert!(!self.fences.is_empty());
                return false;
            }
            Ok(Ok(outcome)) => {
                // Room that refused pages did not make may be missing.
                let promised = outcome.unfinished_blocks == 0 || outcome.refused_pages > 0;
                assert!(promised, "a plan found no room");
                see("relief", 1);
                see("dropped block", outcome.dropped_blocks);
                see("re-encoded block", outcome.encoded_blocks);
                see("refused page", outcome.refused_pages);
                see("moved page", outcome.moved_pages);
                refused_pages = outcome.refused_pages;
                whole = outcome.unfinished_blocks == 0;
            }
            Err(_) => {}
        }
        for planned in &plan.moves {
            let found =
                self.sequences.iter().position(|(s, _)| s.config().request == planned.request);
            match planned.kind {
                MoveKind::Drop(target) => self.follow_drop(found.unwrap(), target),
                MoveKind::Encode { group, format } => {
                    let at = (group, planned.first);
                    self.follow_encode(found.unwrap(), at, format, whole);
                }
            }
        }
        result.is_ok() && refused_pages == 0
    }

    /// Drops come first and no kernel runs in them.
    fn follow_drop(&mut self, index: usize, target: DropTarget) {
        let twin = &mut self.sequences[index].1;
        let groups = &self.pool.config().groups;
        let mut any = false;
        for (group, config) in groups.iter().enumerate().filter(|(_, g)| g.window.is_none()) {
            let Some(block) = twin.blocks.get(&(group, target.first)) else { continue };
            let mut block = block.borrow_mut();
            for layer in 0..config.layers {
                let meant = target.page.is_none_or(|page| page == (group, layer));
                if meant && block.layers[layer].take().is_some() {
                    *twin.dropped_in.entry((group, layer)).or_default() += BLOCK;
                    block.cached = false;
                    any = true;
                }
            }
        }
        assert!(any, "nothing to drop at {target:?}");
        twin.blocks.retain(|_, block| block.borrow().layers.iter().any(Option::is_some));
    }

    fn follow_encode(&mut self, index: usize, at: (usize, usize), to: PageFormat, whole: bool) {
        let (group, first) = at;
        let (sequence, twin) = &self.sequences[index];
        let value = twin.values[first];
        let pinned = &self.pool.config().groups[group].pinned;
        let now = shown(sequence)[&at].clone();
        let before = twin.blocks[&at].borrow().clone();
        let mut after = before.clone();
        let shared = self.holders(&twin.blocks[&at]) > 1;
        see("re-encoded shared block", usize::from(shared && now != before.layers));
        for (layer, format) in after.layers.iter_mut().enumerate() {
            let Some(from) = *format else { continue };
            let nan = has_nan(stamp(value, group, layer)) && from == PageFormat::F16;
            if !pinned.contains(&layer) && !nan && self.shrinks(group, from, to) {
                *format = Some(to);
            }
        }
        if !whole || before.disturbed {
            // Each page is either as it was or in the new format.
            for (layer, format) in now.iter().enumerate() {
                assert!([before.layers[layer], after.layers[layer]].contains(format));
            }
            after.disturbed |= now != after.layers;
            after.layers = now;
        }
        *twin.blocks[&at].borrow_mut() = after;
    }
}
