//! KV memory over time as a small picture of characters.

use reef_kv::page::PageFormat;

use super::stream::Sample;

const COLUMNS: usize = 60;
const ROWS: usize = 8;

/// The character that stands for a format; the fewer the bits, the lighter.
pub fn mark(format: PageFormat) -> char {
    match format {
        PageFormat::F16 => '#',
        PageFormat::Int8 => 'o',
        PageFormat::Fp8E4M3 | PageFormat::Fp8E5M2 => '8',
        PageFormat::K8V4 => ':',
        PageFormat::Int4 => '.',
    }
}

/// Rows of a chart, top first: columns are time, height is bytes up to `budget_bytes`, the least
/// precise format lowest ([`mark`]), each column the state at its end.
pub fn chart(samples: &[Sample], budget_bytes: usize) -> Vec<String> {
    let columns: Vec<&Sample> = pick(samples);
    let cells = |bytes: usize| (bytes * ROWS).div_ceil(budget_bytes.max(1)).min(ROWS);
    let row = |row: usize| -> String {
        let height = ROWS - row;
        let cell = |sample: &&Sample| {
            let mut bytes = 0;
            let mut upward = PageFormat::ALL.into_iter().rev();
            let found = upward.find(|format| {
                bytes += sample.used[*format];
                height <= cells(bytes)
            });
            found.map_or(' ', mark)
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
    fn fewer_bits_lie_lower_and_the_budget_is_the_top() {
        let sample = |f16, int8, int4| {
            let bytes = |format| match format {
                PageFormat::F16 => f16,
                PageFormat::Int8 => int8,
                PageFormat::Int4 => int4,
                _ => 0,
            };
            Sample { step: 0, tokens: 0, used: ByFormat::from_fn(bytes) }
        };
        let samples = [sample(50, 0, 0), sample(50, 50, 0), sample(0, 100, 0), sample(25, 25, 50)];
        let rows = chart(&samples, 100);
        assert_eq!(rows.len(), ROWS);
        assert_eq!(rows[0], " #o#");
        assert_eq!(rows[2], " #oo");
        assert_eq!(rows[ROWS - 1], "#oo.");
        assert!(chart(&[], 100).iter().all(String::is_empty));
    }
}
