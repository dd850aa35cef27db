//! The cells as a table and as a chart.

use serde_json::Value;

use crate::chart::{Axis, Point, Scale, Scatter, Series};
use crate::eval::table::{grouped, markdown};

fn number(row: &Value, key: &str) -> Option<f64> {
    row[key].as_f64()
}

fn interval(value: &Value, digits: usize) -> String {
    let ends = value["low"].as_f64().zip(value["high"].as_f64());
    match (value["mean"].as_f64(), ends) {
        (Some(mean), Some((low, high))) => {
            format!("{mean:+.digits$} ({low:+.digits$} to {high:+.digits$})")
        }
        (Some(mean), None) => format!("{mean:+.digits$}"),
        _ => String::new(),
    }
}

fn recall(row: &Value) -> String {
    let recall = &row["recall"];
    let part = |key: &str| recall[key].as_f64().map(|share| share * 100.0);
    match (part("share"), part("low"), part("high")) {
        (Some(share), Some(low), Some(high)) => format!("{share:.1} ({low:.1} to {high:.1})"),
        _ => String::new(),
    }
}

/// All cells, the largest first.
pub fn table(rows: &[Value]) -> String {
    let mut sorted: Vec<&Value> = rows.iter().collect();
    let bytes = |row: &Value| number(row, "held_bytes_per_token").unwrap_or(0.0);
    sorted.sort_by(|a, b| bytes(b).total_cmp(&bytes(a)));
    let row = |row: &&Value| {
        let small =
            |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.1e}"));
        vec![
            row["kv_format"].as_str().unwrap_or_default().to_string(),
            row["policy"].as_str().unwrap_or("none").to_string(),
            row["budget"].as_u64().map_or(String::new(), |budget| budget.to_string()),
            grouped(bytes(row)),
            format!("{:.3}", number(row, "ppl").unwrap_or(0.0)),
            interval(&row["ppl_change_percent"], 2),
            small(row["kld"]["mean"].as_f64()),
            number(row, "top1_agreement").map_or(String::new(), |s| format!("{:.1}", s * 100.0)),
            recall(row),
        ]
    };
    let header = [
        "KV",
        "policy",
        "kept",
        "bytes held per token",
        "PPL",
        "change of PPL in %",
        "KLD",
        "same top in %",
        "recall in %",
    ];
    markdown(&header, &sorted.iter().map(row).collect::<Vec<_>>())
}

/// Divergence against bytes held per token of context.
pub fn chart(title: &str, text: &str, context: usize, rows: &[Value]) -> String {
    let point = |row: &Value| {
        let kld = row["kld"]["mean"].as_f64().filter(|kld| *kld > 0.0)?;
        let budget = row["budget"].as_u64().map_or(String::new(), |tokens| format!(" {tokens}"));
        let policy = row["policy"].as_str().map_or(String::new(), |name| format!(" {name}"));
        Some(Point {
            x: number(row, "held_bytes_per_token")?,
            y: kld,
            label: format!("{}{policy}{budget}", row["kv_format"].as_str()?),
        })
    };
    let mut series: Vec<Series> = Vec::new();
    for row in rows {
        let name = row["policy"].as_str().unwrap_or("nothing dropped");
        let Some(point) = point(row) else { continue };
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => {
                series.push(Series { name: name.into(), color: series.len(), points: vec![point] });
            }
        }
    }
    let points = || series.iter().flat_map(|series| &series.points);
    let x = Axis {
        label: "bytes of KV held per token of context".into(),
        scale: Scale::from_zero(points().map(|point| point.x)),
        tick: grouped,
    };
    let y = Axis {
        label: "KL divergence from f16 KV, nats per token".into(),
        scale: Scale::log_around(points().map(|point| point.y)),
        tick: |value| match value {
            value if value >= 0.01 => format!("{value}"),
            value => format!("{value:e}"),
        },
    };
    let subtitle = format!(
        "{text}, windows of {context} tokens; lower left is better, the dashed line is the best at each size"
    );
    Scatter { title: title.into(), subtitle, x, y, series }.svg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rows() -> Vec<Value> {
        let row = |format: &str, policy: Option<&str>, bytes: f64, kld: f64| {
            json!({
                "kv_format": format,
                "policy": policy,
                "budget": policy.map(|_| 512),
                "ppl": 20.0,
                "ppl_change_percent": {"mean": 0.5, "low": 0.25, "high": 0.75},
                "kld": {"mean": kld, "low": null, "high": null},
                "top1_agreement": 0.95,
                "recall": {"share": 0.9, "low": 0.8, "high": 0.95, "questions": 64},
                "held_bytes_per_token": bytes,
            })
        };
        vec![
            row("f16", None, 23_040.0, 0.0),
            row("int4", None, 7_300.0, 0.01),
            row("f16", Some("sinks"), 5_760.0, 0.2),
        ]
    }

    #[test]
    fn the_table_goes_from_large_to_small() {
        let table = table(&rows());
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[2].contains("23,040") && lines[4].contains("sinks"));
        assert!(
            lines[3].contains("+0.50 (+0.25 to +0.75)") && lines[3].contains("90.0 (80.0 to 95.0)")
        );
    }

    #[test]
    fn the_chart_names_the_front_and_leaves_out_f16() {
        let svg = chart("KV", "a.txt", 2048, &rows());
        assert!(svg.contains(">int4</text>") && svg.contains(">f16 sinks 512</text>"));
        assert!(!svg.contains(">f16</text>"));
        assert!(svg.contains("nothing dropped"));
    }
}
