//! What vLLM does, by version: data, with where each date is from.

use crate::engines::GIB;
use crate::engines::setup::Setup;
use crate::engines::version::{LATEST, Version};
use crate::model::{Cache, Model};

/// Behaviour that changed from one version to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The second engine (V1) is the default.
    SecondEngine,
    /// Window layers get groups of their own instead of being charged as full attention, and concurrency
    /// is counted in blocks, not tokens.
    WindowGroups,
    /// So do chunked-attention layers.
    ChunkGroups,
    /// Layers whose pages differ in size may share a pool: the smaller get larger blocks.
    UnifiedPages,
    /// "GPU KV cache size" is concurrency times length, not the blocks of one group.
    TokensFromConcurrency,
    /// The estimate of CUDA graph memory is subtracted from the pool.
    GraphsSubtracted,
    /// `--gpu-memory-utilization` is 0.92 where it is not given, 0.9 before.
    LargerShare,
    /// The check at the start charges groups with their padding, not each layer for itself.
    NeedByGroups,
    /// The same check looks at one pipeline rank's layers.
    NeedByRank,
    /// The default batch of devices of 160 GiB and more is 16,384 tokens.
    LargestBatch,
    /// The default batch is raised to hold an image of a model that may not cut one.
    ImageBatch,
    /// Prefix caching may be turned on for recurrent models at all.
    StatePrefixPossible,
    /// Prefix caching (and with it two states a sequence) is on for recurrent models.
    StatePrefixCaching,
}

/// Since when. Where a source gives a merge, the first release after it.
const SINCE: [(Change, Version); 13] = [
    // Release notes of 0.8.0: V1 by default for supported models.
    (Change::SecondEngine, Version::new(0, 8)),
    // vllm#17996 (June 2025).
    (Change::WindowGroups, Version { major: 0, minor: 9, patch: 1 }),
    // VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE: False in copies of late 2025, True in 2026's.
    (Change::ChunkGroups, Version::new(0, 12)),
    // unify_kv_cache_spec_page_size: absent about 0.10.1, present about 0.20, used by 0.19 logs.
    (Change::UnifiedPages, Version::new(0, 12)),
    // Formula quoted in vllm#51041; vllm#43308 dates the change between 0.20.0 and 0.21.0.
    (Change::TokensFromConcurrency, Version::new(0, 21)),
    // VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS on by default: 0.19 prints only, 0.21 subtracts.
    (Change::GraphsSubtracted, Version::new(0, 21)),
    // `Field(default=0.92)` in copies of 0.25 and later, 0.9 at 0.20; taken to have come with the
    // subtraction of graphs, whose log message advises it.
    (Change::LargerShare, Version::new(0, 21)),
    // `_max_memory_usage_bytes_from_groups` came with the fitting of `--max-model-len auto`, January 2026.
    (Change::NeedByGroups, Version::new(0, 14)),
    // vllm#34076 reports the whole model's need under pp 2 in 0.15.2rc1; copies of 2026-03 project the
    // groups on each worker first.
    (Change::NeedByRank, Version::new(0, 16)),
    // vllm#51726, first in 0.28.0 (`device_memory >= 160 * GiB_bytes`); see also vllm#53961.
    (Change::LargestBatch, Version::new(0, 28)),
    // 0.20 and 0.21 refuse Gemma 4 ("max_tokens_per_mm_item (2496) is larger than
    // max_num_batched_tokens (2048)"); 0.29 starts on a T4 with 4,096.
    (Change::ImageBatch, Version::new(0, 26)),
    // vllm#28228: 0.11 turns the flag off again ("without support for prefix caching: disabling"), so do
    // logs up to 0.15; logs of 0.17 have it.
    (Change::StatePrefixPossible, Version::new(0, 16)),
    // Logs: one state a sequence at 0.19 and 0.23, two at 0.24 and in late 2026, without a flag.
    (Change::StatePrefixCaching, Version::new(0, 24)),
];

/// Months and the last version out by then (release dates; 2026 as dated by logs that name both).
const CALENDAR: [(u32, Version); 21] = [
    (202_401, Version::new(0, 2)),
    (202_404, Version::new(0, 4)),
    (202_407, Version::new(0, 5)),
    (202_409, Version::new(0, 6)),
    (202_501, Version::new(0, 7)),
    (202_503, Version::new(0, 8)),
    (202_505, Version::new(0, 9)),
    (202_507, Version { major: 0, minor: 9, patch: 2 }),
    (202_508, Version::new(0, 10)),
    (202_510, Version::new(0, 11)),
    (202_512, Version::new(0, 12)),
    (202_601, Version::new(0, 13)),
    (202_602, Version::new(0, 15)),
    (202_603, Version::new(0, 17)),
    (202_604, Version::new(0, 19)),
    (202_605, Version::new(0, 21)),
    (202_606, Version::new(0, 23)),
    (202_607, Version::new(0, 24)),
    (202_608, Version::new(0, 25)),
    (202_609, Version::new(0, 28)),
    (202_610, Version::new(0, 30)),
];

/// Reads a version: a number, else a month, else the engine's name (`V0`, `V1`).
///
/// Gives the version and whether it is the first engine.
pub fn parse_version(text: &str) -> (Version, bool) {
    let first = text.contains("V0");
    let number = Version::parse(text, 10).or_else(|| Version::of_month(text, &CALENDAR));
    let version = number.unwrap_or(if first { Version::new(0, 7) } else { LATEST });
    let since = Version::new(0, 8);
    (version, first || (version < since && !text.contains("V1")))
}

/// Whether this start shows a behaviour.
pub fn has(change: Change, setup: &Setup) -> bool {
    let since = SINCE.iter().find(|(known, _)| *known == change).map(|(_, since)| *since);
    let new_enough = since.is_some_and(|since| setup.version >= since);
    new_enough && (change == Change::SecondEngine || !setup.first_engine)
}

/// States that a recurrent group keeps per sequence beyond the one per block of `all` mode: 1 without
/// prefix caching, 2 with it (`align`), and one per draft token.
pub fn states_per_sequence(setup: &Setup) -> u64 {
    let aligned = setup.prefix_caching.unwrap_or_else(|| has(Change::StatePrefixCaching, setup));
    let aligned = aligned && has(Change::StatePrefixPossible, setup);
    1 + u64::from(aligned) + setup.draft_tokens()
}

/// Tokens of an attention block: the flag, else the backend's.
pub fn block_size(model: &Model, setup: &Setup) -> u64 {
    if let Some(block) = setup.block_size {
        return block;
    }
    let sparse = |layer: &Cache| matches!(layer, Cache::Latent(latent) if latent.indexer_dim > 0);
    // FlashMLA's kernels take latents of 512 + 64 channels only.
    let flash_mla =
        |layer: &Cache| matches!(layer, Cache::Latent(l) if l.rank == 512 && l.rope_dim == 64);
    match setup.architecture.as_str() {
        _ if model.layers.iter().any(sparse) => 64,
        // CUTLASS_MLA of data-center Blackwell.
        "Blackwell" if is_large(setup) && model.layers.iter().any(flash_mla) => 128,
        "Hopper" | "" if model.layers.iter().any(flash_mla) => 64,
        "Alchemist" | "Battlemage" => 64,
        _ => 16,
    }
}

/// Tokens of a default batch that holds one image of a Gemma (2,496 tokens).
const IMAGE_BATCH: u64 = 4096;

/// `--max-num-batched-tokens` where it is not given: 16,384 on GPUs of 160 GiB and more since 0.28, 8,192 on GPUs of 70 GiB and more (A100 excepted),
/// 2,048 on others; the first engine without chunked prefill profiles a whole sequence, and turns chunked
/// prefill (2,048; 512 before 0.6.4) on above 32,768 tokens.
pub fn batched_tokens(model: &Model, setup: &Setup, max_model_len: Option<u64>) -> u64 {
    if let Some(tokens) = setup.max_num_batched_tokens {
        return tokens;
    }
    if setup.first_engine {
        return match max_model_len {
            Some(length) if length > 32_768 => 2048,
            Some(length) => length.max(2048),
            None => 2048,
        };
    }
    let default = match is_large(setup) {
        true if has(Change::LargestBatch, setup) && memory_gib(setup) >= 160.0 => 16_384,
        true => 8192,
        false => 2048,
    };
    // Gemma's image tokens attend in both directions: an image must fit one batch.
    let whole_images = model.has_encoder && !setup.text_only && model.family.starts_with("gemma");
    match whole_images && has(Change::ImageBatch, setup) {
        true => default.max(IMAGE_BATCH.min(max_model_len.unwrap_or(u64::MAX))),
        false => default,
    }
}

/// Memory of the device; 0 where it is not known.
fn memory_gib(setup: &Setup) -> f64 {
    setup.total.as_ref().map_or(0.0, |total| total.value / GIB)
}

/// `--gpu-memory-utilization`, given or not.
pub fn utilization(setup: &Setup) -> f64 {
    let default = if has(Change::LargerShare, setup) { 0.92 } else { 0.9 };
    setup.utilization.unwrap_or(default)
}

/// `--max-num-seqs` where it is not given: 1,024 on large GPUs, and on all before 0.8.5 ("warming up sampler
/// with 1024 dummy requests").
pub fn sequences(setup: &Setup) -> u64 {
    let many = is_large(setup) || setup.version < Version { major: 0, minor: 8, patch: 5 };
    let default = if !setup.first_engine && many { 1024 } else { 256 };
    setup.max_num_seqs.unwrap_or(default)
}

/// vLLM's class of large GPUs: at least 70 GiB and not an A100.
fn is_large(setup: &Setup) -> bool {
    memory_gib(setup) >= 70.0 && setup.architecture != "Ampere"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_decide_behaviour() {
        let setup = |text| {
            let (version, first_engine) = parse_version(text);
            Setup { version, first_engine, ..Setup::default() }
        };
        assert!(setup("0.6.x (V0)").first_engine && setup("0.7.2").first_engine);
        assert!(setup("0.9.x (V0)").first_engine && !setup("0.8.x (V1)").first_engine);
        assert!(!has(Change::TokensFromConcurrency, &setup("0.20.2 (V1)")));
        assert!(has(Change::TokensFromConcurrency, &setup("0.21.0 (V1)")));
        assert!(has(Change::TokensFromConcurrency, &setup("2026-09")));
        assert!(has(Change::TokensFromConcurrency, &setup("V1")));
        assert!(!has(Change::TokensFromConcurrency, &setup("V1 (2025-10)")));
        assert!(!has(Change::WindowGroups, &setup("0.10.2 (V0)")));
    }
}
