//! Which treatments are measured, the most telling first: a run that is cut short is of use.

use reef_engine::eval::{Eviction, Treatment};
use reef_kv::page::PageFormat;
use reef_kv::policy;

/// The axes of the grid; an empty axis is all there is.
pub struct Grid<'a> {
    pub formats: &'a [PageFormat],
    pub policies: &'a [String],
    pub budgets: &'a [usize],
    /// Leave out most combinations.
    pub quick: bool,
    pub seed: u64,
}

/// Tokens kept by policies.
const BUDGETS: [usize; 3] = [512, 1024, 256];
/// The same of a quick run.
const QUICK_BUDGETS: [usize; 1] = [512];

/// Formats alone, then policies with the first format, then the rest.
pub fn grid(axes: &Grid<'_>) -> Vec<Treatment> {
    let formats = match axes.formats {
        [] => PageFormat::ALL.to_vec(),
        some => some.to_vec(),
    };
    let policies: Vec<String> = match axes.policies {
        [] => policy::NAMES.map(String::from).to_vec(),
        some => some.to_vec(),
    };
    let budgets = match (axes.budgets, axes.quick) {
        ([], true) => QUICK_BUDGETS.to_vec(),
        ([], false) => BUDGETS.to_vec(),
        (some, _) => some.to_vec(),
    };
    let mut cells: Vec<Treatment> = formats.iter().map(|format| Treatment::flat(*format)).collect();
    for (place, format) in formats.iter().enumerate() {
        for budget in &budgets {
            for (rank, policy) in policies.iter().enumerate() {
                if axes.quick && place > 0 && rank > 0 {
                    continue;
                }
                let eviction =
                    Eviction { policy: policy.clone(), budget_tokens: *budget, seed: axes.seed };
                cells.push(Treatment { eviction: Some(eviction), ..Treatment::flat(*format) });
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axes: &Grid<'_>) -> Vec<String> {
        grid(axes).iter().map(Treatment::label).collect()
    }

    #[test]
    fn the_grid_is_a_product_and_quick_a_cross() {
        let formats = [PageFormat::F16, PageFormat::Int4];
        let policies = ["sinks".to_string(), "h2o".to_string()];
        let axes =
            Grid { formats: &formats, policies: &policies, budgets: &[512], quick: false, seed: 0 };
        let all = ["f16", "int4", "f16 sinks 512", "f16 h2o 512", "int4 sinks 512", "int4 h2o 512"];
        assert_eq!(labels(&axes), all);
        assert_eq!(labels(&Grid { quick: true, ..axes }), all[..5]);
    }

    #[test]
    fn every_cell_is_there_once() {
        let axes = Grid { formats: &[], policies: &[], budgets: &[], quick: false, seed: 0 };
        let mut labels = labels(&axes);
        assert_eq!(labels.len(), 6 + 6 * 6 * 3);
        labels.sort_unstable();
        labels.dedup();
        assert_eq!(labels.len(), 6 + 6 * 6 * 3);
    }
}
