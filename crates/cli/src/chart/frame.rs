//! What every chart has: size, colors, title, axes with ticks and units, a legend.

use std::fmt::Write as _;

use super::Scale;

/// One axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it shows, with the unit.
    pub label: String,
    /// How values are spread.
    pub scale: Scale,
    /// The text of a tick.
    pub tick: fn(f64) -> String,
}

/// Size of the file and of the plot in it, in pixels.
pub const WIDTH: f64 = 760.0;
pub const HEIGHT: f64 = 480.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 56.0;

/// Colors of series in light and dark surroundings, told apart also by color-blind readers; the order
/// is part of that.
const COLORS: [(&str, &str); 8] = [
    ("#2a78d6", "#3987e5"),
    ("#1baf7a", "#199e70"),
    ("#eda100", "#c98500"),
    ("#e34948", "#e66767"),
    ("#4a3aa7", "#9085e9"),
    ("#e87ba4", "#d55181"),
    ("#008300", "#3fa33f"),
    ("#898781", "#898781"),
];

/// A chart being drawn: `text` is the SVG so far.
pub struct Frame {
    x: Axis,
    y: Axis,
    pub text: String,
}

impl Frame {
    /// Background, title, axes and grid.
    pub fn new(title: &str, subtitle: &str, x: Axis, y: Axis) -> Frame {
        let text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" role=\"img\" aria-label=\"{0}\">\n<title>{0}</title>\n<style>{1}</style>\n\
             <rect class=\"surface\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n\
             <text class=\"ink title\" x=\"{LEFT}\" y=\"28\">{0}</text>\n\
             <text class=\"muted\" x=\"{LEFT}\" y=\"46\">{2}</text>\n",
            escape(title),
            style(),
            escape(subtitle),
        );
        let mut frame = Frame { x, y, text };
        frame.draw_axes();
        frame
    }

    fn draw_axes(&mut self) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in self.y.scale.ticks() {
            let (y, label) = (self.y_of(tick), escape(&(self.y.tick)(tick)));
            self.push(format_args!(
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
                 <text class=\"muted end\" x=\"{:.1}\" y=\"{:.1}\">{label}</text>",
                LEFT - 8.0,
                y + 4.0
            ));
        }
        for tick in self.x.scale.ticks() {
            let (x, label) = (self.x_of(tick), escape(&(self.x.tick)(tick)));
            self.push(format_args!(
                "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>\
                 <text class=\"muted middle\" x=\"{x:.1}\" y=\"{:.1}\">{label}</text>",
                bottom + 4.0,
                bottom + 18.0
            ));
        }
        let (x_label, y_label) = (escape(&self.x.label), escape(&self.y.label));
        self.push(format_args!(
            "<line class=\"axis\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\"/>"
        ));
        let (middle_x, middle_y) = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
        self.push(format_args!(
            "<text class=\"ink middle\" x=\"{middle_x:.1}\" y=\"{:.1}\">{x_label}</text>\
             <text class=\"ink middle\" transform=\"rotate(-90 16 {middle_y:.1})\" x=\"16\" \
             y=\"{middle_y:.1}\">{y_label}</text>",
            HEIGHT - 14.0
        ));
    }

    /// The names of series with their colors, under the title.
    pub fn legend(&mut self, names: &[(usize, String)]) {
        let mut x = LEFT;
        for (color, name) in names {
            let (class, name_text) = (color_class(*color), escape(name));
            self.push(format_args!(
                "<circle class=\"fill {class}\" cx=\"{:.1}\" cy=\"64\" r=\"5\"/>\
                 <text class=\"ink\" x=\"{:.1}\" y=\"68\">{name_text}</text>",
                x + 5.0,
                x + 15.0
            ));
            x += 15.0 + text_width(name) + 18.0;
        }
    }

    /// Pixel of a value on the x axis.
    pub fn x_of(&self, value: f64) -> f64 {
        LEFT + self.x.scale.place(value) * (WIDTH - LEFT - RIGHT)
    }

    /// Pixel of a value on the y axis.
    pub fn y_of(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.scale.place(value) * (HEIGHT - TOP - BOTTOM)
    }

    /// Adds an element.
    pub fn push(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{element}");
    }

    /// The finished file.
    pub fn end(mut self) -> String {
        self.text.push_str("</svg>\n");
        self.text
    }
}

/// Class of the color of series `index`; colors are not reused, those past the last share it.
pub fn color_class(index: usize) -> String {
    format!("c{}", index.min(COLORS.len() - 1))
}

/// Width of `text` in pixels, about.
pub fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 6.4
}

/// `text` as the content of an element or attribute.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn style() -> String {
    let mut style = String::from(
        "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif}.title{font-size:16px;font-weight:600}\
         .middle{text-anchor:middle}.end{text-anchor:end}.small{font-size:11px}\
         .line{fill:none;stroke-width:2;stroke-linejoin:round}.grid,.axis{stroke-width:1}\
         .surface{fill:#fcfcfb}.ink{fill:#0b0b0b}.muted{fill:#52514e}.grid{stroke:#e6e5e1}.axis{stroke:#a3a19b}\
         .front{stroke:#52514e;stroke-dasharray:4 3}.ring{stroke:#fcfcfb;stroke-width:2}\
         .limit{stroke:#0b0b0b;stroke-width:1.5;stroke-dasharray:6 4}\
         .halo{stroke:#fcfcfb;stroke-width:4;stroke-linejoin:round}",
    );
    let colors = |pick: fn(&(&'static str, &'static str)) -> &'static str| {
        let rule = |(index, pair): (usize, &(&'static str, &'static str))| {
            let color = pick(pair);
            format!(".fill.c{index}{{fill:{color}}}.line.c{index}{{stroke:{color}}}")
        };
        COLORS.iter().enumerate().map(rule).collect::<String>()
    };
    style += &colors(|pair| pair.0);
    style += "@media (prefers-color-scheme:dark){.surface{fill:#1a1a19}.ink{fill:#fff}.muted{fill:#c3c2b7}\
              .grid{stroke:#33332f}.axis{stroke:#6b6a64}.front{stroke:#c3c2b7}.ring{stroke:#1a1a19}\
              .limit{stroke:#fff}.halo{stroke:#1a1a19}";
    style += &colors(|pair| pair.1);
    style + "}"
}
