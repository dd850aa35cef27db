//! Areas on top of one another under a limit, with marks where something happened.

use std::fmt::Write as _;

use super::frame::{Axis, Frame, color_class, escape, text_width};

/// One area of the stack.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Its name in the legend.
    pub name: String,
    /// Its color, 0 to 7.
    pub color: usize,
    /// Its height at each place on the x axis.
    pub heights: Vec<f64>,
}

/// Something that happened at places on the x axis.
#[derive(Clone, Debug)]
pub struct Mark {
    /// What it was: written where it happened first.
    pub label: String,
    /// Its color, 0 to 7.
    pub color: usize,
    /// Where, in order; at least one.
    pub places: Vec<f64>,
}

/// A stacked area chart.
#[derive(Clone, Debug)]
pub struct Stack {
    /// Title.
    pub title: String,
    /// What was measured, under the title.
    pub subtitle: String,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Places on the x axis, in order; as many as each layer has heights.
    pub places: Vec<f64>,
    /// Areas, the lowest first.
    pub layers: Vec<Layer>,
    /// The height that is not to be passed, and its name.
    pub limit: (f64, String),
    /// What happened.
    pub marks: Vec<Mark>,
}

/// Length of the tick of a mark, in pixels.
const TICK: f64 = 7.0;
/// Height of a line of labels, in pixels.
const LINE: f64 = 15.0;

impl Stack {
    /// The chart as SVG.
    pub fn svg(&self) -> String {
        let mut frame = Frame::new(&self.title, &self.subtitle, self.x.clone(), self.y.clone());
        let names: Vec<_> = self.layers.iter().rev().map(|l| (l.color, l.name.clone())).collect();
        frame.legend(&names);
        let mut below = vec![0.0; self.places.len()];
        for layer in &self.layers {
            let above: Vec<f64> = below.iter().zip(&layer.heights).map(|(a, b)| a + b).collect();
            self.draw_area(&mut frame, layer, &below, &above);
            below = above;
        }
        self.draw_limit(&mut frame);
        for (line, mark) in self.marks.iter().enumerate() {
            draw_mark(&mut frame, mark, self.limit.0, line);
        }
        frame.end()
    }

    fn draw_area(&self, frame: &mut Frame, layer: &Layer, below: &[f64], above: &[f64]) {
        let mut path = String::new();
        let edge = self.places.iter().zip(above).chain(self.places.iter().zip(below).rev());
        for (index, (place, height)) in edge.enumerate() {
            let command = if index == 0 { 'M' } else { 'L' };
            // Writing to a String cannot fail.
            let _ = write!(path, "{command}{:.1} {:.1}", frame.x_of(*place), frame.y_of(*height));
        }
        if !path.is_empty() {
            frame.push(format_args!(
                "<path class=\"fill {}\" d=\"{path}Z\"><title>{}</title></path>",
                color_class(layer.color),
                escape(&layer.name)
            ));
        }
    }

    fn draw_limit(&self, frame: &mut Frame) {
        let (height, name) = &self.limit;
        let y = frame.y_of(*height);
        let (left, right) = (frame.x_of(f64::NEG_INFINITY), frame.x_of(f64::INFINITY));
        frame.push(format_args!(
            "<line class=\"limit\" x1=\"{left:.1}\" y1=\"{y:.1}\" x2=\"{right:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"ink end small\" x=\"{right:.1}\" y=\"{:.1}\">{}</text>",
            y - 5.0,
            escape(name)
        ));
    }
}

/// A tick under the limit at each place; a line down and the label at the first, on line `line`.
fn draw_mark(frame: &mut Frame, mark: &Mark, limit: f64, line: usize) {
    let Some(first) = mark.places.first() else { return };
    let (color, top) = (color_class(mark.color), frame.y_of(limit));
    let mut last_x = f64::NEG_INFINITY;
    for place in &mark.places {
        let x = frame.x_of(*place);
        // Ticks closer than a pixel are one.
        if x - last_x >= 1.0 {
            last_x = x;
            frame.push(format_args!(
                "<line class=\"line {color}\" x1=\"{x:.1}\" y1=\"{top:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>",
                top + TICK
            ));
        }
    }
    let (x, bottom) = (frame.x_of(*first), frame.y_of(0.0));
    let base = top + TICK + LINE * (line + 1) as f64;
    let fits = x + 6.0 + text_width(&mark.label) < frame.x_of(f64::INFINITY);
    let label = escape(&mark.label);
    // Twice: the first is a border that keeps the second readable on any area.
    let (class, text_x) = if fits { ("ink small", x + 6.0) } else { ("ink small end", x - 6.0) };
    frame.push(format_args!(
        "<line class=\"front\" x1=\"{x:.1}\" y1=\"{top:.1}\" x2=\"{x:.1}\" y2=\"{bottom:.1}\"/>\
         <text class=\"halo {class}\" x=\"{text_x:.1}\" y=\"{base:.1}\">{label}</text>\
         <text class=\"{class}\" x=\"{text_x:.1}\" y=\"{base:.1}\">{label}</text>"
    ));
}

#[cfg(test)]
mod tests {
    use super::super::Scale;
    use super::*;

    #[test]
    fn areas_stand_on_one_another_and_marks_are_named_once() {
        let axis = |label: &str| Axis {
            label: label.into(),
            scale: Scale::Linear { low: 0.0, high: 10.0 },
            tick: |value| format!("{value}"),
        };
        let layer = |name: &str, heights: [f64; 2]| Layer {
            name: name.into(),
            color: 0,
            heights: heights.to_vec(),
        };
        let chart = Stack {
            title: "memory".into(),
            subtitle: String::new(),
            x: axis("tokens"),
            y: axis("MiB"),
            places: vec![0.0, 10.0],
            layers: vec![layer("low", [2.0, 2.0]), layer("high", [0.0, 3.0])],
            limit: (5.0, "budget".into()),
            marks: vec![Mark { label: "int8 & on".into(), color: 1, places: vec![5.0, 5.0, 6.0] }],
        };
        let svg = chart.svg();
        // 340 pixels for 10: the upper area stands on 2 (y 356) and reaches 5 (y 254) on the right.
        assert!(svg.contains("d=\"M72.0 356.0L736.0 254.0L736.0 356.0L72.0 356.0Z\""), "{svg}");
        assert_eq!(svg.matches("<text class=\"ink small\" x=\"410.0\"").count(), 1);
        assert_eq!(svg.matches("int8 &amp; on").count(), 2);
        assert_eq!(svg.matches("class=\"line c1\"").count(), 2);
        let empty = Stack { places: Vec::new(), layers: Vec::new(), marks: Vec::new(), ..chart };
        assert!(empty.svg().ends_with("</svg>\n"));
    }
}
