//! The tokens among which the next one is drawn, and the draw.
//!
//! Nothing is sorted: probabilities are sums over a row in the order of ids, and the cut of `top_k` and
//! `top_p` is found by buckets, so the cost is bounded however flat the distribution is.

use reef_kernels::dispatch::Tier;
use reef_kernels::logits::{CHUNK, at_least, exp_weights, lane_maxima, maxima_len, sums_len};

use super::Sampling;

/// Bit fields of a weight, highest first, (shift, bits): weights are not negative, so their bits as f32
/// are ordered as they are.
const FIELDS: [(u32, u32); 3] = [(21, 11), (10, 11), (0, 10)];
const MOST_BUCKETS: usize = 1 << 11;
/// Histograms that take turns: neighbors of a flat row fall into one bucket, and an addition need not wait
/// for the one before.
const TURNS: usize = 4;

/// A row's weights and the buffers to choose among them.
#[derive(Default)]
pub(super) struct Candidates {
    /// Probability over that of the likeliest token, `[vocabulary]`.
    weights: Vec<f32>,
    /// Sums of chunks of weights.
    sums: Vec<f32>,
    maxima: Vec<f32>,
    ids: Vec<u32>,
    /// (weight, token), ids rising.
    kept: Vec<(f32, u32)>,
    /// Bits of weights near the cut.
    near: Vec<u32>,
    masses: Vec<[f64; TURNS]>,
}

impl Candidates {
    /// Weighs `row`, whose largest logit is `largest` (finite), at `temperature`.
    pub fn weigh(&mut self, tier: Tier, row: &[f32], largest: f32, temperature: f32) {
        self.weights.resize(row.len(), 0.0);
        self.sums.resize(sums_len(row.len()), 0.0);
        exp_weights(tier, row, largest, temperature, &mut self.weights, &mut self.sums);
    }

    /// Sum of all weights.
    pub fn total(&self) -> f64 {
        self.sums.iter().map(|sum| f64::from(*sum)).sum()
    }

    /// Draws from the weighed row, cut as `sampling` says; `unit` is uniform in [0, 1).
    pub fn draw(&mut self, tier: Tier, sampling: &Sampling, unit: f64) -> u32 {
        let Sampling { top_k, top_p, min_p, .. } = *sampling;
        let top_k = if top_k < self.weights.len() { top_k } else { 0 };
        if top_k == 0 && top_p >= 1.0 && min_p == 0.0 {
            return self.draw_from_all(unit * self.total());
        }
        self.cut(tier, (top_k, top_p, min_p));
        let sum: f64 = self.kept.iter().map(|(weight, _)| f64::from(*weight)).sum();
        let kept = self.kept.iter().map(|(weight, token)| (*weight, *token));
        pick(kept, unit * sum).unwrap_or(0)
    }

    /// Finds the chunk by its sum, then the token in it.
    fn draw_from_all(&self, mut left: f64) -> u32 {
        let of_chunk = |chunk: usize, left: f64| {
            let first = chunk * CHUNK;
            let weights = &self.weights[first..self.weights.len().min(first + CHUNK)];
            pick(weights.iter().copied().zip(first as u32..), left)
        };
        for (chunk, sum) in self.sums.iter().enumerate() {
            let sum = f64::from(*sum);
            if left < sum {
                return of_chunk(chunk, left).unwrap_or(0);
            }
            left -= sum;
        }
        let last = self.sums.iter().rposition(|sum| *sum > 0.0);
        last.and_then(|chunk| of_chunk(chunk, f64::INFINITY)).unwrap_or(0)
    }

    /// Fills `kept`: `min_p` first, `top_k` of what is left, `top_p` of what is left then.
    fn cut(&mut self, tier: Tier, (top_k, top_p, min_p): (usize, f32, f32)) {
        let mut threshold = f32::MIN_POSITIVE.max(min_p);
        if top_k > 0 {
            threshold = threshold.max(self.reached_by(tier, top_k));
        } else if min_p == 0.0 {
            // All lighter ones together are at most half of what the nucleus leaves out.
            let beyond = (1.0 - f64::from(top_p)) * self.total() / self.weights.len() as f64;
            threshold = threshold.max((beyond / 2.0) as f32);
        }
        self.ids.resize(self.weights.len(), 0);
        let count = at_least(tier, &self.weights, threshold, &mut self.ids);
        self.kept.clear();
        let weighed = self.ids[..count].iter().map(|id| (self.weights[*id as usize], *id));
        self.kept.extend(weighed);
        if top_k > 0 && top_k < self.kept.len() {
            self.keep_heaviest(|_| 1.0, top_k as f64);
        }
        if top_p < 1.0 {
            let total = match top_k == 0 && min_p == 0.0 {
                true => self.total(),
                false => self.kept.iter().map(|(weight, _)| f64::from(*weight)).sum(),
            };
            self.keep_heaviest(f64::from, total * f64::from(top_p));
        }
    }

    /// A weight that at least `count` tokens reach, and few more.
    fn reached_by(&mut self, tier: Tier, count: usize) -> f32 {
        self.maxima.resize(maxima_len(self.weights.len()), 0.0);
        lane_maxima(tier, &self.weights, &mut self.maxima);
        nth_largest(&mut self.maxima, count).unwrap_or(0.0)
    }

    /// Keeps the heaviest candidates, as few as have `mass` of `goal` together (all, if they have less);
    /// of equals those with the lowest ids.
    fn keep_heaviest(&mut self, mass: impl Fn(f32) -> f64, goal: f64) {
        self.near.clear();
        self.near.extend(self.kept.iter().map(|(weight, _)| weight.to_bits()));
        let mut heavier = 0.0;
        for (shift, bits) in FIELDS {
            let bucket = |weight: u32| (weight >> shift) as usize & ((1 << bits) - 1);
            self.masses.clear();
            self.masses.resize(MOST_BUCKETS, [0.0; TURNS]);
            let (mut low, mut high) = (MOST_BUCKETS, 0);
            for (turn, weight) in self.near.iter().enumerate() {
                let place = bucket(*weight);
                (low, high) = (low.min(place), high.max(place));
                self.masses[place][turn % TURNS] += mass(f32::from_bits(*weight));
            }
            let mut at = high;
            while at > low {
                let of_bucket: f64 = self.masses[at].iter().sum();
                if heavier + of_bucket >= goal {
                    break;
                }
                heavier += of_bucket;
                at -= 1;
            }
            // Where rounding left the goal out of reach, `at` is the lowest that holds any.
            retain(&mut self.near, |weight| bucket(weight) == at);
        }
        let Some(&least) = self.near.first() else { return };
        let of_each = mass(f32::from_bits(least));
        let mut equals = (((goal - heavier) / of_each).ceil() as usize).clamp(1, self.near.len());
        retain(&mut self.kept, |(weight, _)| {
            let equal = (weight.to_bits() == least) & (equals > 0);
            equals -= usize::from(equal);
            (weight.to_bits() > least) | equal
        });
    }

    /// The `count` largest of `row` (its logits, as weighed), largest first, ties by id.
    pub fn likeliest(&mut self, tier: Tier, row: &[f32], count: usize) -> &[u32] {
        self.maxima.resize(maxima_len(row.len()), 0.0);
        lane_maxima(tier, row, &mut self.maxima);
        // Minus infinity stands for an absent maximum.
        let threshold = nth_largest(&mut self.maxima, count).unwrap_or(f32::MIN).max(f32::MIN);
        self.ids.resize(row.len(), 0);
        let found = match count {
            0 => 0,
            _ => at_least(tier, row, threshold, &mut self.ids),
        };
        let found = &mut self.ids[..found];
        let order = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
        if count < found.len() && count > 0 {
            found.select_nth_unstable_by(count - 1, order);
        }
        let count = count.min(found.len());
        found[..count].sort_unstable_by(order);
        &found[..count]
    }
}

/// `Vec::retain` without a branch an item, which on a flat row could not be foretold.
fn retain<T: Copy>(items: &mut Vec<T>, mut keeps: impl FnMut(T) -> bool) {
    let mut kept = 0;
    for place in 0..items.len() {
        let item = items[place];
        items[kept] = item;
        kept += usize::from(keeps(item));
    }
    items.truncate(kept);
}

/// The `count`-th largest, no NaN among them; `None` where there are not so many.
fn nth_largest(values: &mut [f32], count: usize) -> Option<f32> {
    if count == 0 || count > values.len() {
        return None;
    }
    let (_, nth, _) = values.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    Some(*nth)
}

/// The candidate that `left` falls on when weights are laid end to end; the last that weighs anything
/// where rounding leaves none.
fn pick(candidates: impl Iterator<Item = (f32, u32)>, mut left: f64) -> Option<u32> {
    let mut last = None;
    for (weight, token) in candidates {
        if weight > 0.0 {
            last = Some(token);
        }
        left -= f64::from(weight);
        if left < 0.0 {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::super::SplitMix64;
    use super::*;

    /// Tokens kept, by sorting.
    fn sorted_cut(weights: &[f32], (top_k, top_p, min_p): (usize, f32, f32)) -> Vec<u32> {
        let positive = |(weight, _): &(f32, u32)| *weight >= f32::MIN_POSITIVE.max(min_p);
        let mut kept: Vec<_> = weights.iter().copied().zip(0..).filter(positive).collect();
        kept.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if top_k > 0 {
            kept.truncate(top_k);
        }
        let goal = kept.iter().map(|(weight, _)| f64::from(*weight)).sum::<f64>();
        let goal = goal * f64::from(top_p);
        let (mut sum, mut count) = (0.0, 0);
        while count < kept.len() && (top_p == 1.0 || sum < goal || count == 0) {
            sum += f64::from(kept[count].0);
            count += 1;
        }
        let mut ids: Vec<u32> = kept[..count].iter().map(|(_, id)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// Rows from steep to flat, some with many ties.
    fn row(random: &mut SplitMix64, count: usize) -> Vec<f32> {
        let steepness = [0.0, 0.01, 1.0, 10.0][(random.unit() * 4.0) as usize];
        let ties = random.unit() < 0.3;
        let logit = |unit: f64| {
            let logit = steepness * (unit.powi(4) * 6.0 - 3.0);
            if ties { logit.round() as f32 } else { logit as f32 }
        };
        (0..count).map(|_| logit(random.unit())).collect()
    }

    #[test]
    fn cuts_are_those_of_sorting() {
        let mut random = SplitMix64(5);
        let mut candidates = Candidates::default();
        for round in 0..600 {
            let count = [1, 7, 40, 300, 1025, 5000][round % 6];
            let row = row(&mut random, count);
            let tier = Tier::detect();
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            candidates.weigh(tier, &row, largest, 0.8);
            let top_k = [0, 1, 3, 40, 1000][(random.unit() * 5.0) as usize];
            let top_p = [1.0, 0.95, 0.5, 1e-6][(random.unit() * 4.0) as usize];
            let min_p = [0.0, 0.05, 1.0][(random.unit() * 3.0) as usize];
            candidates.cut(tier, (top_k, top_p, min_p));
            let found: Vec<u32> = candidates.kept.iter().map(|(_, id)| *id).collect();
            let expected = sorted_cut(&candidates.weights, (top_k, top_p, min_p));
            // Sums in another order may round a nucleus to one token more or fewer.
            let what = format!("{count} logits, top_k {top_k}, top_p {top_p}, min_p {min_p}");
            assert!(found.len().abs_diff(expected.len()) <= usize::from(top_p < 1.0), "{what}");
            let missing = expected.iter().filter(|id| !found.contains(id)).count();
            assert!(missing <= usize::from(top_p < 1.0), "{what}");
        }
    }

    #[test]
    fn draws_at_both_ends_are_tokens_with_weight() {
        let mut candidates = Candidates::default();
        let mut row = vec![f32::NEG_INFINITY; 3000];
        (row[1500], row[1501], row[2100]) = (0.0, 1.0, 0.5);
        let tier = Tier::detect();
        candidates.weigh(tier, &row, 1.0, 1.0);
        let almost_one = 1.0 - f64::EPSILON / 2.0;
        let plain = Sampling { temperature: 1.0, ..Sampling::default() };
        for sampling in [plain.clone(), Sampling { top_k: 10, ..plain }] {
            assert_eq!(candidates.draw(tier, &sampling, 0.0), 1500);
            assert_eq!(candidates.draw(tier, &sampling, almost_one), 2100);
        }
        assert_eq!(candidates.draw_from_all(f64::INFINITY), 2100);
    }

    #[test]
    fn the_likeliest_are_those_of_sorting() {
        let mut random = SplitMix64(9);
        let mut candidates = Candidates::default();
        for round in 0..300 {
            let count = [1, 20, 300, 2000][round % 4];
            let mut row = row(&mut random, count);
            row[0] = if round % 3 == 0 { f32::NAN } else { row[0] };
            for top in [0, 1, 5, 20, 5000] {
                let mut expected: Vec<u32> =
                    (0..count as u32).filter(|id| !row[*id as usize].is_nan()).collect();
                expected.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
                expected.truncate(top);
                assert_eq!(candidates.likeliest(Tier::detect(), &row, top), expected);
            }
        }
    }
}
