//! What the engine says of itself at a scrape. Its totals are exposed as they are, so nothing counts twice.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use reef_engine::Engine;
use reef_engine::event::{PauseKind, PauseReason};
use reef_engine::stats::{Ceiling, Counters, EngineStats};

use super::Served;
use super::writer::Writer;

/// A look at the engine, taken on its thread.
#[derive(Clone, Debug)]
pub struct EngineSample {
    /// Its totals and its pool.
    pub stats: EngineStats,
    /// Bytes of pages that each tenant's requests hold.
    pub tenant_bytes: Vec<usize>,
    /// Tokens that those who wait have still to compute.
    pub waiting_tokens: usize,
}

impl EngineSample {
    /// A look at `engine`, between two of its turns.
    pub fn of(engine: &Engine) -> EngineSample {
        EngineSample {
            stats: engine.stats(),
            tenant_bytes: engine.tenant_bytes(),
            waiting_tokens: engine.waiting_tokens(),
        }
    }

    /// Bytes that sequences hold, as a part of the budget: what vLLM calls usage, whose free blocks include
    /// those that only the prefix cache knows.
    pub fn kv_usage(&self) -> f64 {
        let accounts = &self.stats.accounts;
        accounts.held_bytes() as f64 / accounts.budget_bytes.max(1) as f64
    }
}

/// Looks closer to each other than this say little of a rate.
const RATE_SPAN: Duration = Duration::from_millis(500);

/// The last sample. Where the engine has died the families stay at what it last said.
#[derive(Debug, Default)]
pub(super) struct LastSample(Mutex<Last>);

#[derive(Debug, Default)]
struct Last {
    answers: bool,
    sample: Option<EngineSample>,
    /// When the rate was last taken, and at how many generated tokens.
    rated: Option<(Instant, u64)>,
    tokens_per_second: f64,
}

impl LastSample {
    fn lock(&self) -> MutexGuard<'_, Last> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None`: the engine does not answer.
    pub(super) fn set(&self, sample: Option<EngineSample>, now: Instant) {
        let mut last = self.lock();
        last.answers = sample.is_some();
        let Some(sample) = sample else { return };
        let tokens = sample.stats.counters.generated_tokens;
        let (since, before) = *last.rated.get_or_insert((now, tokens));
        let elapsed = now.saturating_duration_since(since);
        if elapsed >= RATE_SPAN {
            last.tokens_per_second = tokens.saturating_sub(before) as f64 / elapsed.as_secs_f64();
            last.rated = Some((now, tokens));
        }
        last.sample = Some(sample);
    }

    /// Between the last two looks that were far enough from each other.
    pub(super) fn tokens_per_second(&self) -> f64 {
        self.lock().tokens_per_second
    }
}

/// Writes the families of the last sample.
#[derive(Debug)]
pub(super) struct EngineCollector {
    pub served: Arc<Served>,
    pub last: Arc<LastSample>,
}

impl Collector for EngineCollector {
    fn encode(&self, encoder: DescriptorEncoder) -> std::fmt::Result {
        let last = self.last.lock();
        let mut write = Writer(encoder);
        let answers = f64::from(u8::from(last.answers));
        write.gauge("reef:engine_up", "1: the engine answers.", answers)?;
        cache_config(&mut write, &self.served)?;
        let Some(sample) = &last.sample else { return Ok(()) };
        queue(&mut write, sample)?;
        memory(&mut write, sample)?;
        tenants(&mut write, sample, &self.served)?;
        spill(&mut write, &sample.stats)?;
        steps(&mut write, &sample.stats)?;
        relief(&mut write, &sample.stats)?;
        troubles(&mut write, &sample.stats.counters)
    }
}

fn cache_config(write: &mut Writer<'_>, served: &Served) -> std::fmt::Result {
    let (block_size, blocks) = (served.block_size.to_string(), served.f16_blocks.to_string());
    let caching = if served.prefix_caching { "True" } else { "False" };
    let labels = [
        ("block_size", block_size.as_str()),
        ("num_gpu_blocks", &blocks),
        ("cache_dtype", "f16"),
        ("enable_prefix_caching", caching),
    ];
    let help = "How the KV cache is configured; blocks are those that it holds at f16.";
    write.gauges("vllm:cache_config_info", help, [(labels, 1.0)])
}

fn queue(write: &mut Writer<'_>, sample: &EngineSample) -> std::fmt::Result {
    let stats = &sample.stats;
    let (running, waiting) = (stats.running as f64, stats.waiting as f64);
    write.gauge("vllm:num_requests_running", "Sequences in steps.", running)?;
    write.gauge("vllm:num_requests_waiting", "Sequences that wait to be let in.", waiting)?;
    write.gauge(
        "reef:waiting_tokens",
        "Tokens that those who wait have still to compute.",
        sample.waiting_tokens as f64,
    )?;
    write.gauge(
        "reef:paused",
        "Sequences that were let in and stand still, in the pool or out of it.",
        stats.paused as f64,
    )?;
    let ceilings = &stats.ceilings;
    let limits = [
        ("kv", Some(ceilings.kv), Ceiling::Kv),
        ("ridge", Some(ceilings.ridge), Ceiling::Ridge),
        ("latency", ceilings.latency, Ceiling::Latency),
        ("configured", Some(ceilings.configured), Ceiling::Configured),
    ];
    let known =
        limits.iter().filter_map(|(name, limit, _)| Some(([("limit", *name)], (*limit)? as f64)));
    write.gauges("reef:running_ceiling", "Sequences that may run, by what limits them.", known)?;
    let binding = limits.iter().map(|(name, _, ceiling)| {
        ([("limit", *name)], f64::from(u8::from(*ceiling == ceilings.binding)))
    });
    write.gauges("reef:running_ceiling_binds", "1 for the lowest ceiling.", binding)
}

fn memory(write: &mut Writer<'_>, sample: &EngineSample) -> std::fmt::Result {
    let accounts = &sample.stats.accounts;
    write.gauge(
        "vllm:kv_cache_usage_perc",
        "Bytes that sequences hold, as a part of the budget; 1 is all.",
        sample.kv_usage(),
    )?;
    write.gauge("reef:kv_budget_bytes", "Bytes of KV memory.", accounts.budget_bytes as f64)?;
    write.gauge(
        "reef:kv_peak_bytes",
        "Most bytes of pages ever in use at once.",
        accounts.peak_bytes as f64,
    )?;
    let owners = [
        ("held", accounts.held_bytes()),
        ("cached", accounts.cached_bytes),
        ("fenced", accounts.fenced_bytes),
        ("free", accounts.free_bytes),
        ("reserved", accounts.reserved_bytes),
        ("fragmentation", accounts.fragmentation_bytes),
        ("table", accounts.table_bytes),
    ];
    let owners = owners.map(|(owner, bytes)| ([("owner", owner)], bytes as f64));
    let help = "Every byte of the budget by whose it is; the owners add up to it.";
    write.gauges("reef:kv_bytes", help, owners)?;
    let formats = accounts.used.iter().map(|(of, bytes)| ([("format", of.name())], *bytes as f64));
    let help = "Bytes of pages in use (held or cached) by their format.";
    write.gauges("reef:kv_page_bytes", help, formats)?;
    let spill = sample.stats.spill;
    let tiers = |pool: usize, spilled: Option<usize>| {
        let pool = Some(([("tier", "pool")], pool as f64));
        let spill = spilled.map(|bytes| ([("tier", "spill")], bytes as f64));
        pool.into_iter().chain(spill)
    };
    write.gauges(
        "reef:kv_tier_bytes",
        "Bytes of KV by where they are: in the pool (held or cached), in the spill store.",
        tiers(accounts.used_bytes(), spill.map(|spill| spill.used_bytes)),
    )?;
    write.gauges(
        "reef:kv_tier_capacity_bytes",
        "Bytes that each tier can hold.",
        tiers(accounts.budget_bytes, spill.map(|spill| spill.capacity_bytes)),
    )
}

fn tenants(write: &mut Writer<'_>, sample: &EngineSample, served: &Served) -> std::fmt::Result {
    let held = served.tenants.iter().zip(&sample.tenant_bytes);
    let held = held.map(|(tenant, bytes)| ([("tenant", tenant.name.as_str())], *bytes as f64));
    let help =
        "Bytes of pages that a tenant's requests hold; blocks that several share count for each.";
    write.gauges("reef:kv_tenant_bytes", help, held)?;
    let quotas = served.tenants.iter().filter_map(|tenant| {
        Some(([("tenant", tenant.name.as_str())], tenant.quota_bytes? as f64))
    });
    write.gauges("reef:kv_tenant_quota_bytes", "Bytes that a tenant may hold, if limited.", quotas)
}

fn spill(write: &mut Writer<'_>, stats: &EngineStats) -> std::fmt::Result {
    let counters = &stats.counters;
    let written = counters.spilled_bytes;
    write.counter("reef:spill_written_bytes", "Bytes written to the spill store.", written)?;
    write.counter("reef:spill_read_bytes", "Bytes read from it.", counters.loaded_bytes)?;
    let failures = counters.spill_failures;
    write.counter("reef:spill_failures", "Records that the spill store lost.", failures)?;
    let Some(usage) = stats.spill else { return Ok(()) };
    write.gauge("reef:spill_records", "Sequences in the spill store.", usage.records as f64)?;
    let closed = f64::from(u8::from(usage.closed));
    write.gauge("reef:spill_closed", "1: the disk failed too often, no more is stored.", closed)
}

fn steps(write: &mut Writer<'_>, stats: &EngineStats) -> std::fmt::Result {
    let counters = &stats.counters;
    write.tally("vllm:iteration_tokens_total", "Rows computed in a step.", &stats.steps.rows)?;
    write.tally("reef:step_seconds", "Seconds of a step, where measured.", &stats.steps.seconds)?;
    let rows = [("prefill", counters.prefill_rows), ("decode", counters.decode_rows)];
    let rows = rows.map(|(kind, rows)| ([("kind", kind)], rows));
    write.counters("reef:computed_rows", "Rows computed; decode includes drafts.", rows)?;
    let drafts = stats.speculation.unwrap_or_default();
    // Each step with drafts computes them and one row more.
    let draft_steps = (drafts.computed - drafts.proposed) as u64;
    write.counter("vllm:spec_decode_num_drafts", "Times that drafts were tried.", draft_steps)?;
    let (proposed, accepted) = counters.drafts;
    write.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens tried.", proposed)?;
    write.counter("vllm:spec_decode_num_accepted_tokens", "Of these, accepted.", accepted)
}

fn relief(write: &mut Writer<'_>, stats: &EngineStats) -> std::fmt::Result {
    let counters = &stats.counters;
    let cells = || counters.steps_down.iter();
    let blocks = cells().map(|(rung, reason, sum)| {
        ([("rung", rung.name()), ("reason", reason.name())], sum.blocks)
    });
    let help = "Blocks that came down a rung of the ladder, by rung and reason.";
    write.counters("reef:relief_blocks", help, blocks)?;
    let bytes = cells()
        .map(|(rung, reason, sum)| ([("rung", rung.name()), ("reason", reason.name())], sum.bytes));
    write.counters("reef:relief_bytes", "Bytes that this gave back, by rung and reason.", bytes)?;
    write.counter(
        "reef:evicted_prefix_bytes",
        "Bytes of idle prefixes given back: the rung drop_prefix, which harms no request.",
        counters.evicted_prefix_bytes,
    )?;
    let reasons =
        PauseKind::ALL.into_iter().flat_map(|kind| PauseReason::ALL.map(|why| (kind, why)));
    let pauses = reasons.map(|(kind, reason)| {
        let labels = [("kind", kind.name()), ("reason", reason.name())];
        (labels, counters.pauses_for(kind, reason))
    });
    write.counters("reef:pauses", "Times a sequence stood still, by kind and reason.", pauses)?;
    write.counter(
        "vllm:num_preemptions",
        "Times a sequence left the pool: swapped out, or to be computed again.",
        preemptions(counters),
    )?;
    let ended = &stats.ended;
    let degraded = ended.by_format.iter().filter(|(of, _)| *of != reef_kv::page::PageFormat::F16);
    let degraded = degraded.map(|(of, tokens)| ([("format", of.name())], *tokens));
    let help = "Tokens that were in a format below f16 when their sequence ended, by format.";
    write.counters("reef:degraded_tokens", help, degraded)?;
    let help = "Tokens that had been dropped when their sequence ended.";
    write.counter("reef:dropped_tokens", help, ended.dropped)
}

/// Who was swapped out and could not be read back had left the pool before.
fn preemptions(counters: &Counters) -> u64 {
    let left = counters.pauses(PauseKind::Swap) + counters.pauses(PauseKind::Recompute);
    left - counters.pauses_for(PauseKind::Recompute, PauseReason::SpillFailure)
}

fn troubles(write: &mut Writer<'_>, counters: &Counters) -> std::fmt::Result {
    let violations = counters.violations;
    write.counter("reef:invariant_violations", "Invariants found broken.", violations)?;
    write.counter(
        "reef:stalls",
        "Times that nothing ran although somebody waited and memory was free.",
        counters.stalls,
    )?;
    let kinds = [
        ("stale_completion", counters.stale_completions),
        ("lost_completion", counters.lost_completions),
        ("unplanned_shortage", counters.unplanned_shortages),
        ("shortage_alone", counters.shortages_alone),
    ];
    let kinds = kinds.map(|(kind, count)| ([("kind", kind)], count));
    write.counters("reef:anomalies", "What should not be and was mended, by kind.", kinds)
}
