//! Comparisons of one row: what the log gives goes in, what it prints is compared.

use serde::Serialize;

use super::cells::{self, Printed};
use super::row::Row;
use crate::engines::llamacpp::Buffers;
use crate::engines::setup::Setup;
use crate::engines::vllm::behavior::{self, Change};
use crate::engines::vllm::pool::Layout;
use crate::engines::{Engine, GIB, PlanError, sglang, trtllm};
use crate::model::{Cache, Model};

/// One predicted number beside the reported one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// What is compared.
    pub metric: &'static str,
    /// What it was predicted from.
    pub given: &'static str,
    /// Prediction at the printed values of what was given.
    pub predicted: f64,
    /// As reported.
    pub reported: f64,
    /// `(predicted - reported) / reported`.
    pub relative_error: f64,
    /// |relative error| <= 1 %.
    pub within_1pct: bool,
    /// Some value that prints as what was given gives exactly what was reported.
    pub exact: bool,
}

impl Check {
    fn new(
        metric: &'static str,
        given: &'static str,
        predicted: f64,
        reported: Printed,
        exact: bool,
    ) -> Check {
        let relative_error = match reported.value == 0.0 {
            true => predicted.abs(),
            false => (predicted - reported.value) / reported.value.abs(),
        };
        // Rounding of what was given may move a small number by more than 1 %.
        let within_1pct = exact || relative_error.abs() <= 0.01;
        let reported = reported.value;
        Check { metric, given, predicted, reported, relative_error, within_1pct, exact }
    }

    /// A number that needs nothing rounded.
    fn plain(
        metric: &'static str,
        given: &'static str,
        predicted: f64,
        reported: Printed,
    ) -> Check {
        Check::new(metric, given, predicted, reported, reported.reads(predicted))
    }
}

/// Most block counts tried when a rounded number leaves several open.
const BLOCKS_TRIED: u64 = 100_000;

/// All comparisons that the row allows, the most telling first: blocks, tokens, memory, needs, lengths,
/// concurrency.
///
/// # Errors
/// A model that the engine's accounting does not cover.
pub fn checks(row: &Row, model: &Model, setup: &Setup) -> Result<Vec<Check>, PlanError> {
    match row.engine().map(Engine::name) {
        Some("vllm") => vllm(row, model, setup),
        Some("sglang") => Ok(sglang(row, model, setup)),
        Some("trtllm") => Ok(tokens_from_memory(row, trtllm::token_bytes(model, setup), 32)),
        Some("llamacpp") => Ok(llamacpp(row, model, setup)),
        _ => Ok(Vec::new()),
    }
}

/// What a rounded amount of memory allows: the block count at the printed value, and all counts.
struct Blocks {
    printed: u64,
    range: std::ops::RangeInclusive<u64>,
    given: &'static str,
}

impl Blocks {
    fn check(
        &self,
        metric: &'static str,
        reported: Printed,
        of_blocks: impl Fn(u64) -> f64,
    ) -> Check {
        let mut tried = self.range.clone().take(BLOCKS_TRIED as usize);
        let exact = tried.any(|blocks| reported.reads(of_blocks(blocks)));
        Check::new(metric, self.given, of_blocks(self.printed), reported, exact)
    }
}

fn vllm(row: &Row, model: &Model, setup: &Setup) -> Result<Vec<Check>, PlanError> {
    let length = setup.max_model_len.or(model.trained_context);
    let batched = behavior::batched_tokens(model, setup, length);
    let layout = Layout::new(model, setup, batched)?;
    let mut checks = Vec::new();
    let available = row.bytes("kv_available_gib").filter(|kv| kv.value > 0.0);
    if let Some(kv) = available {
        let blocks = Blocks {
            printed: layout.blocks(kv.value),
            range: layout.blocks(kv.low())..=layout.blocks(kv.high()),
            given: "kv_available_gib",
        };
        from_memory(row, &layout, setup, length, &blocks, &mut checks);
    }
    checks.extend(available_memory(row));
    if let (Some(needed), Some(length)) = (row.printed("kv_needed_gib"), setup.max_model_len) {
        let bytes = layout.needed_bytes(length) as f64;
        checks.push(Check::plain("kv_needed_gib", "max_model_len", bytes / GIB, needed));
    }
    if let Some(blocks) = known_blocks(row, &layout, setup, length) {
        checks.extend(concurrency(row, &layout, setup, &blocks));
    }
    checks.extend(concurrency_elsewhere(row, &layout, setup));
    checks.extend(first_engine(row, &layout, setup));
    checks.extend(pages(row, model, setup, &layout));
    Ok(checks)
}

/// Blocks, printed tokens and the estimated longest length from the pool's size.
fn from_memory(
    row: &Row,
    layout: &Layout,
    setup: &Setup,
    length: Option<u64>,
    blocks: &Blocks,
    checks: &mut Vec<Check>,
) {
    if let Some(reported) = row.printed("num_blocks") {
        checks.push(blocks.check("num_blocks", reported, |blocks| blocks as f64));
    }
    if let Some(reported) = row.printed("kv_tokens") {
        let tokens = |blocks| printed_tokens(layout, setup, length, blocks) as f64;
        checks.push(blocks.check("kv_tokens", reported, tokens));
    }
    if let (Some(reported), Some(length)) = (row.printed("est_max_len"), length) {
        let bytes = |blocks: u64| blocks as f64 * layout.block_bytes as f64;
        let longest = |blocks| layout.longest(bytes(blocks), length) as f64;
        checks.push(blocks.check("est_max_len", reported, longest));
    }
    // `no (131072 starts: 139810 tokens, 1.07x)`: the same pool at a length that does start.
    let started = row.text("started");
    let lengths = cells::before(started, " starts");
    if let (Some(length), Some(reported)) =
        (lengths.first(), cells::before(started, " tokens").first())
    {
        let length = Some(length.value as u64);
        let tokens = |blocks| printed_tokens(layout, setup, length, blocks) as f64;
        checks.push(blocks.check("kv_tokens_elsewhere", *reported, tokens));
    }
}

fn printed_tokens(layout: &Layout, setup: &Setup, length: Option<u64>, blocks: u64) -> u64 {
    match length.filter(|_| behavior::has(Change::TokensFromConcurrency, setup)) {
        Some(length) => layout.tokens_from_concurrency(blocks, length),
        None => layout.tokens_of_one_group(blocks),
    }
}

/// The pool from the ledger: budget (or total times share) less weights, activations and the rest.
fn available_memory(row: &Row) -> Option<Check> {
    let reported = row.printed("kv_available_gib")?;
    let budget = row.printed("budget_gib").or_else(|| {
        let (total, share) =
            (row.printed("gpu_total_gib")?, row.printed("gpu_memory_utilization")?);
        Some(total.scaled(share.value))
    })?;
    let weights = row.printed("weights_gib")?;
    let mut parts = vec![weights, row.printed("activation_peak_gib")?];
    if !row.text("weights_gib").contains("non-torch") {
        parts.push(row.printed("non_torch_gib")?);
    }
    let predicted = budget.value - parts.iter().map(|part| part.value).sum::<f64>();
    let freedom = budget.half_unit + parts.iter().map(|part| part.half_unit).sum::<f64>();
    let exact = (predicted - reported.value).abs() <= freedom + reported.half_unit + 1e-9;
    Some(Check::new("kv_available_gib", "ledger", predicted, reported, exact))
}

/// The block count from what the log prints most exactly: blocks, else tokens, else memory.
fn known_blocks(row: &Row, layout: &Layout, setup: &Setup, length: Option<u64>) -> Option<Blocks> {
    if let Some(blocks) = row.whole("num_blocks").filter(|blocks| *blocks > 0) {
        return Some(Blocks { printed: blocks, range: blocks..=blocks, given: "num_blocks" });
    }
    if let Some(tokens) = row.printed("kv_tokens") {
        let of_blocks = |blocks: u64| printed_tokens(layout, setup, length, blocks) as f64;
        let limit = 1_u64 << 40;
        let first = first_block(limit, |blocks| of_blocks(blocks) >= tokens.low());
        let last = first_block(limit, |blocks| of_blocks(blocks) > tokens.high());
        if first < last {
            let range = first..=last - 1;
            return Some(Blocks { printed: first, range, given: "kv_tokens" });
        }
    }
    let kv = row.bytes("kv_available_gib").filter(|kv| kv.value > 0.0)?;
    Some(Blocks {
        printed: layout.blocks(kv.value),
        range: layout.blocks(kv.low())..=layout.blocks(kv.high()),
        given: "kv_available_gib",
    })
}

/// Smallest block count of which `is` holds (it holds of all larger ones), at most `limit`.
fn first_block(limit: u64, is: impl Fn(u64) -> bool) -> u64 {
    let (mut below, mut above) = (0, limit);
    while above > below {
        let middle = below + (above - below) / 2;
        if is(middle) { above = middle } else { below = middle + 1 }
    }
    below
}

/// Concurrency at the row's length, or the length that it says the number is for.
fn concurrency(row: &Row, layout: &Layout, setup: &Setup, blocks: &Blocks) -> Option<Check> {
    let reported = row.printed("max_concurrency").filter(|reported| reported.value > 0.0)?;
    let is_for = cells::after(row.text("other_reported"), "is for max_model_len");
    let length = is_for.map(|printed| printed.value as u64).filter(|length| *length > 0);
    let length = length.or(setup.max_model_len)?;
    Some(blocks.check("max_concurrency", reported, |blocks| layout.concurrency(blocks, length)))
}

/// The same pool at another length: `7.77x at max_model_len 81920`.
fn concurrency_elsewhere(row: &Row, layout: &Layout, setup: &Setup) -> Option<Check> {
    const MARK: &str = "x at max_model_len";
    let (here, length) = (row.printed("max_concurrency")?, setup.max_model_len?);
    let other = row.text("other_reported");
    let elsewhere = *cells::before(other, MARK).first()?;
    let there = cells::after(other, MARK)?.value as u64;
    let request = layout.request_blocks(length) as f64;
    let range = (here.low() * request).ceil() as u64..=(here.high() * request).floor() as u64;
    let printed = (here.value * request).round() as u64;
    let blocks = Blocks { printed, range, given: "max_concurrency" };
    let of = |blocks| layout.concurrency(blocks, there);
    Some(blocks.check("max_concurrency_elsewhere", elsewhere, of))
}

/// What only the first engine prints: CPU blocks of its 4 GiB of swap, tokens in the refusal.
fn first_engine(row: &Row, layout: &Layout, setup: &Setup) -> Vec<Check> {
    const SWAP_BYTES: f64 = 4.0 * GIB;
    let other = row.text("other_reported");
    let mut checks = Vec::new();
    if let Some(reported) = cells::after(other, "cpu_blocks").filter(|_| setup.first_engine) {
        let blocks = (SWAP_BYTES / layout.block_bytes as f64).floor();
        checks.push(Check::plain("cpu_blocks", "4 GiB of swap", blocks, reported));
    }
    let marks = ["max tokens in KV cache", "KV cache can hold"];
    let tokens = marks.iter().find_map(|mark| cells::after(other, mark));
    if let (Some(reported), Some(blocks)) = (tokens, row.whole("num_blocks")) {
        let tokens = layout.tokens_of_one_group(blocks) as f64;
        checks.push(Check::plain("kv_tokens", "num_blocks", tokens, reported));
    }
    checks
}

/// Sizes of blocks and pages: a hybrid's block, and what vLLM-Ascend prints.
fn pages(row: &Row, model: &Model, setup: &Setup, layout: &Layout) -> Vec<Check> {
    let mut checks = Vec::new();
    let state = model.layers.iter().find_map(|layer| match layer {
        Cache::Recurrent(state) => Some(state),
        _ => None,
    });
    let other = row.text("other_reported");
    if let Some(reported) = cells::after(other, "attn_single_token_k_page_size") {
        let heads = model.layers.iter().find_map(|layer| layer.heads());
        let keys = heads.map_or(0, |h| setup.kv_keys.bytes(h.per_rank(setup.tp) * h.key_dim));
        checks.push(Check::plain("k_bytes_per_token_layer", "config", keys as f64, reported));
        if let (Some(reported), Some(state)) = (cells::after(other, "ssm_block_page_size"), state) {
            let bytes = state.state_elements / setup.tp * state.state_bytes.unwrap_or(2);
            checks.push(Check::plain("state_bytes", "config", bytes as f64, reported));
        }
    } else if let (Some(reported), Some(_)) = (row.printed("block_size"), state) {
        let block = layout.block_size() as f64;
        checks.push(Check::plain("block_size", "config", block, reported));
    }
    checks
}

/// K and V are printed apart, in GiB; tokens follow from the memory where it is known.
fn sglang(row: &Row, model: &Model, setup: &Setup) -> Vec<Check> {
    let (keys, values) = sglang::token_bytes(model, setup);
    let mut checks = tokens_from_memory(row, keys + values, 1);
    let other = row.text("other_reported");
    if let Some(tokens) = row.printed("kv_tokens") {
        for (metric, mark, bytes) in [("k_gib", "K ", keys), ("v_gib", "V ", values)] {
            if let Some(reported) = printed_pools(other, mark, model).filter(|_| bytes > 0) {
                let gib = bytes as f64 * tokens.value / GIB;
                checks.push(Check::plain(metric, "kv_tokens", gib, reported));
            }
        }
    }
    if let (Some(reported), Some(length), Some(tokens)) =
        (row.printed("max_concurrency"), setup.max_model_len, row.printed("kv_tokens"))
    {
        let concurrency = tokens.value / length as f64;
        checks.push(Check::plain("max_concurrency", "kv_tokens", concurrency, reported));
    }
    checks
}

/// The size of keys or values: the first number after `mark`, draft pools aside; of a model with windows
/// the sum over its pools, which are printed apart.
fn printed_pools(text: &str, mark: &str, model: &Model) -> Option<Printed> {
    let spaced = format!(" {}", text.replace("size: ", "").replace("size ", ""));
    let target: Vec<&str> = spaced.split("draft").take(1).collect();
    let sizes = cells::after_each(target.first()?, &format!(" {mark}"));
    let windows = model.layers.iter().any(|layer| matches!(layer, Cache::Sliding { .. }));
    let first = *sizes.first()?;
    if !windows {
        return Some(first);
    }
    let value = sizes.iter().map(|size| size.value).sum();
    Some(Printed { value, half_unit: sizes.iter().map(|size| size.half_unit).sum() })
}

/// Tokens that a pool of the reported size holds, in blocks of `block` tokens unless the row says.
fn tokens_from_memory(row: &Row, token_bytes: u64, block: u64) -> Vec<Check> {
    let block = row.whole("block_size").filter(|block| *block > 0).unwrap_or(block);
    let block_bytes = (token_bytes as f64 * block as f64).max(1.0);
    let (Some(kv), Some(reported)) = (row.bytes("kv_available_gib"), row.printed("kv_tokens"))
    else {
        return Vec::new();
    };
    let blocks_in = |bytes: f64| (bytes.max(0.0) / block_bytes).floor() as u64;
    let range = blocks_in(kv.low())..=blocks_in(kv.high());
    let blocks = Blocks { printed: blocks_in(kv.value), range, given: "kv_available_gib" };
    vec![blocks.check("kv_tokens", reported, |blocks| blocks as f64 * block as f64)]
}

/// A hybrid prints its cells and its states apart: `KV 256.00 MiB ...; RS 201.00 MiB`.
fn recurrent_buffers(
    words: &str,
    buffers: &Buffers,
    check: &impl Fn(&'static str, u64, Printed) -> Check,
) -> Vec<Check> {
    let marks = ["recurrent", "rs ", "rs buffer", "state"];
    let at = marks.iter().filter_map(|mark| words.find(mark)).min().unwrap_or(words.len());
    let (cells_part, state_part) = words.split_at(at);
    let first = |text: &str| cells::before(text, " mib").first().copied();
    let attention = buffers.full.bytes + buffers.window.bytes;
    let mut checks = Vec::new();
    checks.extend(first(cells_part).map(|reported| check("kv_mib", attention, reported)));
    let state = first(state_part);
    checks.extend(state.map(|reported| check("state_mib", buffers.state.bytes, reported)));
    checks
}

/// Buffers in MiB: the whole (`KV self size`), or the parts, or keys alone.
fn llamacpp(row: &Row, model: &Model, setup: &Setup) -> Vec<Check> {
    const MIB: f64 = (1_u64 << 20) as f64;
    let other = row.text("other_reported");
    let Some(context) = setup.max_model_len else {
        return Vec::new();
    };
    let buffers = Buffers::new(model, setup, context);
    let check = |metric, bytes: u64, reported| {
        Check::plain(metric, "max_model_len", bytes as f64 / MIB, reported)
    };
    let words = other.to_lowercase();
    // The oldest logs print MiB as MB.
    if let Some(reported) = cells::after(&words, "kv self size") {
        return vec![check("kv_mib", buffers.bytes(), reported)];
    }
    if buffers.state.layers > 0 && buffers.full.layers > 0 {
        return recurrent_buffers(&words, &buffers, &check);
    }
    let parts = (cells::after(other, "non-SWA"), cells::after(other, "; SWA"));
    if let (Some(full), Some(window)) = parts {
        let sum = Printed { value: full.value + window.value, half_unit: full.half_unit * 2.0 };
        let mut checks = vec![check("kv_mib", buffers.full.bytes + buffers.window.bytes, sum)];
        checks.push(check("kv_full_mib", buffers.full.bytes, full));
        checks.push(check("kv_window_mib", buffers.window.bytes, window));
        return checks;
    }
    let sizes = cells::before(other, " MiB");
    let Some(first) = sizes.first() else {
        return Vec::new();
    };
    let keys_only = Setup { kv_values: setup.kv_keys, ..setup.clone() };
    let keys = Buffers::new(model, &keys_only, context).bytes() / 2;
    let parts = format!(" {}", words.replace("(f16)", "").replace("(q8_0)", ""));
    let keys_alone = [" k ", ", k:"].iter().any(|mark| parts.contains(mark))
        && ![" v ", ", v:"].iter().any(|mark| parts.contains(mark));
    match keys_alone {
        true => vec![check("k_mib", keys, *first)],
        false => vec![check("kv_mib", buffers.bytes(), *first)],
    }
}
