//! KV memory over time as a small picture of characters.

use reef_kv::page::PageFormat;

use super::stream::Sample;

const COLUMNS: usize = 60;
const ROWS: usize = 8;

/// Rows of a chart, top first: columns are time, height is bytes up to `budget_bytes`; `#` is f16,
/// `o` is int8 (below), each column the state at its end.
pub fn chart(samples: &[Sample], budget_bytes: usize) -> Vec<String> {
    let columns: Vec<&Sample> = pick(samples);
    let cells = |bytes: usize| (bytes * ROWS * 2).div_ceil(budget_bytes.max(1) * 2).min(ROWS);
    let row = |row: usize| -> String {
        let height = ROWS - row;
        let cell = |sample: &&Sample| {
            let int8 = cells(sample.used[PageFormat::Int8]);
            let all = cells(sample.used[PageFormat::Int8] + sample.used[PageFormat::F16]);
            match height {
                h if h <= int8 => 'o',
                h if h <= all => '#',
                _ => ' ',
            }
        };
        columns.iter().map(cell).collect()
    };
    (0..ROWS).map(row).collect()
}

fn pick(samples: &[Sample]) -> Vec<&Sample> {
    let count = samples.len().min(COLUMNS);
    (1..=count).map(|column| &samples[column * samples.len() / count - 1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use reef_kv::ByFormat;

    #[test]
    fn int8_lies_below_f16_and_the_budget_is_the_top() {
        let sample = |f16, int8| Sample { tokens: 0, used: ByFormat { f16, int8 } };
        let rows = chart(&[sample(50, 0), sample(50, 50), sample(0, 100)], 100);
        assert_eq!(rows.len(), ROWS);
        assert_eq!(rows[0], " #o");
        assert_eq!(rows[ROWS - 1], "#oo");
        assert!(chart(&[], 100).iter().all(String::is_empty));
    }
}
