//! What each step down is expected to cost, in nats of negative log-likelihood per later token.

use crate::account::ByFormat;
use crate::page::PageFormat;
use crate::relief::Zone;

/// Expected rise of the negative log-likelihood, in nats per later token, of each kind of relief.
///
/// Estimates, not promises: they rank moves and are summed into the ledger.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HarmTable {
    /// Were every sealed token in that format: mean Kullback-Leibler divergence from f16 KV with f32
    /// activations (so that the cache alone differs), teacher-forced over a text. 0 for f16.
    pub format_nats: ByFormat<f64>,
    /// Were every token but those of the first block and of the recent tail dropped: rise of the mean
    /// negative log-likelihood over that of the whole context, teacher-forced over a text.
    pub evict_nats: f64,
}

/// How much a token of `zone` weighs in the harm of its block, relative to the middle: with the last 128
/// tokens in f16, 4-bit KV lost about 1.5 % of perplexity where it loses 5.5 % without (a 3B model,
/// contexts of about 1,024), so an eighth of the context carries 73 % of the harm: (0.73 / 0.125) / (0.27 /
/// 0.875) = 19. The first block, on which all attention leans, is taken to weigh as much as the tail.
pub(crate) fn zone_weight(zone: Zone) -> f64 {
    match zone {
        Zone::Middle => 1.0,
        Zone::Tail | Zone::Sinks => 19.0,
    }
}

impl Default for HarmTable {
    /// For a model that was not measured. Formats: published orders of magnitude for groups of 32, as
    /// the logarithm of the rise of perplexity: int8 0.04 % (ik_llama.cpp PR 1034, q8_0); K8V4 0.7 %
    /// (KVSplit and mlx PR 1550: 0.5-0.9 %); int4 5.8 % (4 bits, SmolLM2-135M, quant.cpp); FP8 E4M3
    /// has twice the error of int8 and E5M2 four times, and divergence grows with its square. Dropping:
    /// SmolLM2-135M with the first block and 1,024 or 512 tokens kept of 8,192 loses 0.062 and 0.131
    /// nats (docs/quality.md), extrapolated to 160.
    fn default() -> HarmTable {
        let nats = |format| match format {
            PageFormat::F16 => 0.0,
            PageFormat::Int8 => 4e-4,
            PageFormat::Fp8E4M3 => 1.6e-3,
            PageFormat::Fp8E5M2 => 6.4e-3,
            PageFormat::K8V4 => 7e-3,
            PageFormat::Int4 => 5.6e-2,
        };
        HarmTable { format_nats: ByFormat::from_fn(nats), evict_nats: 0.25 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_precise_formats_are_expected_to_cost_more_and_dropping_most() {
        let table = HarmTable::default();
        for pair in PageFormat::ALL.windows(2) {
            assert!(table.format_nats[pair[0]] < table.format_nats[pair[1]]);
        }
        assert!(table.format_nats[PageFormat::Int4] < table.evict_nats);
    }
}
