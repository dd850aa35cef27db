//! Results as tables: for people on a terminal and, as they are, for Markdown.

use reef_engine::eval::comparison::Difference;
use serde_json::{Value, json};

/// A Markdown table, its columns aligned.
pub fn markdown(header: &[&str], rows: &[Vec<String>]) -> String {
    let head: Vec<String> = header.iter().map(ToString::to_string).collect();
    let width = |column: usize| {
        let cells = rows.iter().chain([&head]).filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!(" {cell:width$} |"));
        format!("|{}", cells.collect::<String>())
    };
    let rule: String = widths.iter().map(|width| format!("{}|", "-".repeat(width + 2))).collect();
    let rule = format!("|{rule}");
    [line(&head), rule].into_iter().chain(rows.iter().map(line)).collect::<Vec<_>>().join("\n")
}

/// A mean with its interval as JSON: `{"mean": …, "low": …, "high": …}`, ends null for a short text.
pub fn interval_json(difference: Option<Difference>) -> Value {
    difference.map_or(Value::Null, |Difference { mean, interval }| {
        json!({"mean": mean, "low": interval.map(|i| i.low), "high": interval.map(|i| i.high)})
    })
}

/// A mean with its interval in a cell: `+0.12 (+0.05 to +0.19)`.
pub fn interval_text(difference: Option<Difference>, digits: usize) -> String {
    match difference {
        None => String::new(),
        Some(Difference { mean, interval: None }) => format!("{mean:+.digits$}"),
        Some(Difference { mean, interval: Some(i) }) => {
            format!("{mean:+.digits$} ({:+.digits$} to {:+.digits$})", i.low, i.high)
        }
    }
}

/// A whole number with thousands separated: `23,040`.
pub fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        let left = digits.len() - index;
        if index > 0 && left % 3 == 0 && digits.as_bytes()[index - 1] != b'-' {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use reef_engine::eval::Interval;

    #[test]
    fn columns_are_aligned() {
        let table = markdown(&["a", "bb"], &[vec!["1".into(), "2".into()], vec!["10".into()]]);
        assert_eq!(table, "| a  | bb |\n|----|----|\n| 1  | 2  |\n| 10 |");
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(
            [0.4, 999.0, 1000.0, 23040.4, -1234.0].map(grouped),
            ["0", "999", "1,000", "23,040", "-1,234"]
        );
    }

    #[test]
    fn intervals_are_shown_where_there_are_some() {
        let interval = Some(Interval { mean: 1.0, low: 0.5, high: 1.5 });
        assert_eq!(
            interval_text(Some(Difference { mean: 1.0, interval }), 1),
            "+1.0 (+0.5 to +1.5)"
        );
        assert_eq!(interval_text(Some(Difference { mean: -1.0, interval: None }), 2), "-1.00");
        assert_eq!(interval_text(None, 2), "");
    }
}
