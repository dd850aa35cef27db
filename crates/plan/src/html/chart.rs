//! Lines over the context length, both axes logarithmic, drawn for a wide and for a narrow page: text in a
//! drawing that is shrunk to a phone cannot be read.

use std::fmt::Write as _;

use super::escaped;
use super::sweep::{Height, Row, Sweep, unit};
use crate::report::shown;

/// A drawing's size in CSS pixels.
struct Frame {
    class: &'static str,
    width: f64,
    height: f64,
    /// Most labels along the lengths.
    labels: usize,
}

const FRAMES: [Frame; 2] = [
    Frame { class: "wide", width: 900.0, height: 380.0, labels: 12 },
    Frame { class: "narrow", width: 350.0, height: 280.0, labels: 5 },
];
/// Room for the labels: left, right, top, bottom.
const MARGIN: (f64, f64, f64, f64) = (58.0, 22.0, 12.0, 34.0);

/// Adds the chart with its legend.
pub fn push(page: &mut String, sweep: &Sweep) {
    let rows: Vec<&Row> = sweep.rows().iter().filter(|row| row.points.len() > 1).collect();
    if rows.is_empty() {
        return;
    }
    let (title, axis) = match sweep.height {
        Height::Concurrency => {
            ("Requests at once against context length", "requests at once, by KV format")
        }
        Height::KvBytes => {
            ("KV memory against context length", "memory of the KV cache, by KV format")
        }
    };
    let _ = writeln!(page, "<h2>{title}</h2>\n<ul class=\"legend\">");
    for (index, row) in rows.iter().enumerate() {
        let own = if row.planned { " (planned)" } else { "" };
        let name = escaped(&row.format);
        let _ = writeln!(page, "<li><i class=\"line{index}\"></i>{name}{own}</li>");
    }
    page.push_str("</ul>\n");
    for frame in &FRAMES {
        draw(page, frame, &rows, sweep.height, title);
    }
    let _ = writeln!(page, "<p class=\"hint\">Across: tokens of a request. Up: {axis}.</p>");
}

/// Positions in a drawing.
struct Scale {
    x: (f64, f64),
    y: (f64, f64),
    left: f64,
    bottom: f64,
    width: f64,
    height: f64,
}

impl Scale {
    fn new(frame: &Frame, rows: &[&Row]) -> Scale {
        let points = || rows.iter().flat_map(|row| row.points.iter());
        let bounds = |values: &mut dyn Iterator<Item = f64>| {
            values
                .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)))
        };
        let x = bounds(&mut points().map(|(length, _)| (*length as f64).log2()));
        let y = bounds(&mut points().map(|(_, value)| value.log10()));
        // At least a decade, so that a flat line is flat.
        let y = (y.0.floor(), y.1.ceil().max(y.0.floor() + 1.0));
        let (left, right, top, bottom) = MARGIN;
        Scale {
            x: (x.0, x.1.max(x.0 + 1.0)),
            y,
            left,
            bottom: frame.height - bottom,
            width: frame.width - left - right,
            height: frame.height - top - bottom,
        }
    }

    fn across(&self, log_length: f64) -> f64 {
        self.left + self.width * (log_length - self.x.0) / (self.x.1 - self.x.0)
    }

    fn up(&self, log_value: f64) -> f64 {
        self.bottom - self.height * (log_value - self.y.0) / (self.y.1 - self.y.0)
    }
}

fn draw(page: &mut String, frame: &Frame, rows: &[&Row], height: Height, title: &str) {
    let scale = Scale::new(frame, rows);
    let _ = writeln!(
        page,
        "<svg class=\"chart {}\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">",
        frame.class,
        frame.width,
        frame.height,
        escaped(title)
    );
    let right = scale.left + scale.width;
    let decades = (scale.y.1 - scale.y.0) as i32;
    let step = (decades / 5).max(1);
    for decade in (0..=decades).step_by(step as usize) {
        let log_value = scale.y.0 + f64::from(decade);
        let y = scale.up(log_value);
        let text = label(10_f64.powf(log_value), height);
        let _ = writeln!(
            page,
            "<line class=\"grid\" x1=\"{:.1}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"up\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
            scale.left,
            scale.left - 6.0,
            y + 4.0
        );
    }
    let powers = (scale.x.1.floor() - scale.x.0.ceil()) as usize + 1;
    let step = powers.div_ceil(frame.labels).max(1);
    for power in (0..powers).step_by(step) {
        let log_length = scale.x.0.ceil() + power as f64;
        let x = scale.across(log_length);
        let _ = writeln!(
            page,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>\
             <text class=\"along\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
            scale.bottom - scale.height,
            scale.bottom,
            scale.bottom + 20.0,
            length_label(log_length)
        );
    }
    for (index, row) in rows.iter().enumerate() {
        let points: Vec<String> = row
            .points
            .iter()
            .map(|(length, value)| {
                let (x, y) = (scale.across((*length as f64).log2()), scale.up(value.log10()));
                format!("{x:.1},{y:.1}")
            })
            .collect();
        let _ = writeln!(page, "<polyline class=\"line{index}\" points=\"{}\"/>", points.join(" "));
        for ((length, value), point) in row.points.iter().zip(&points) {
            let (x, y) = point.split_once(',').unwrap_or_default();
            let _ = writeln!(
                page,
                "<circle class=\"line{index}\" cx=\"{x}\" cy=\"{y}\" r=\"3\"><title>{}: {} at {length} \
                 tokens</title></circle>",
                escaped(&row.format),
                shown(*value, unit(height))
            );
        }
    }
    page.push_str("</svg>\n");
}

/// A power of ten: a count, or bytes in the unit that keeps it short.
fn label(value: f64, height: Height) -> String {
    match height {
        Height::KvBytes if value >= 1e9 => format!("{:.0} GB", value / 1e9),
        Height::KvBytes if value >= 1e6 => format!("{:.0} MB", value / 1e6),
        Height::KvBytes => format!("{:.0} kB", value / 1e3),
        Height::Concurrency if value < 1.0 => {
            let text = format!("{value:.6}");
            text.trim_end_matches('0').to_string()
        }
        Height::Concurrency => format!("{value:.0}"),
    }
}

fn length_label(log_length: f64) -> String {
    let length = log_length.exp2().round();
    match length {
        _ if length >= 1_048_576.0 => format!("{:.0}M", length / 1_048_576.0),
        _ => format!("{:.0}k", length / 1024.0),
    }
}
