//! Points of several series and the front of the best.

use super::frame::{Axis, Frame, HEIGHT, WIDTH, color_class, escape, text_width};

/// A point.
#[derive(Clone, Debug)]
pub struct Point {
    /// Value on the x axis; less is better.
    pub x: f64,
    /// Value on the y axis; less is better.
    pub y: f64,
    /// Its name: written beside it where it is on the front, shown on hover elsewhere.
    pub label: String,
}

/// Points of one kind.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its color, 0 to 7.
    pub color: usize,
    /// Its points.
    pub points: Vec<Point>,
}

/// A scatter chart in which less is better on both axes.
#[derive(Clone, Debug)]
pub struct Scatter {
    /// Title.
    pub title: String,
    /// What was measured, under the title.
    pub subtitle: String,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// The points.
    pub series: Vec<Series>,
}

/// Radius of a point in pixels.
const RADIUS: f64 = 5.0;

impl Scatter {
    /// The chart as SVG.
    pub fn svg(&self) -> String {
        let mut frame = Frame::new(&self.title, &self.subtitle, self.x.clone(), self.y.clone());
        let names: Vec<_> = self.series.iter().map(|s| (s.color, s.name.clone())).collect();
        frame.legend(&names);
        let all: Vec<(usize, &Point)> = self
            .series
            .iter()
            .flat_map(|series| series.points.iter().map(|point| (series.color, point)))
            .collect();
        let mut front: Vec<&Point> = front(&all);
        front.sort_by(|a, b| a.x.total_cmp(&b.x));
        draw_front(&mut frame, &front);
        for (color, point) in &all {
            let (x, y) = (frame.x_of(point.x), frame.y_of(point.y));
            frame.push(format_args!(
                "<circle class=\"ring fill {}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{RADIUS}\">\
                 <title>{}</title></circle>",
                color_class(*color),
                escape(&point.label)
            ));
        }
        draw_labels(&mut frame, &front, &all);
        frame.end()
    }
}

/// The points that no other point beats or equals on both axes.
fn front<'a>(all: &[(usize, &'a Point)]) -> Vec<&'a Point> {
    let beaten = |point: &Point| {
        all.iter().any(|(_, other)| {
            let no_worse = other.x <= point.x && other.y <= point.y;
            no_worse && (other.x < point.x || other.y < point.y)
        })
    };
    all.iter().map(|(_, point)| *point).filter(|point| !beaten(point)).collect()
}

/// A step line: what is the best that can be had for at most so many bytes.
fn draw_front(frame: &mut Frame, front: &[&Point]) {
    let mut path = String::new();
    for (index, point) in front.iter().enumerate() {
        let (x, y) = (frame.x_of(point.x), frame.y_of(point.y));
        path += &match index {
            0 => format!("M{x:.1} {y:.1}"),
            _ => format!("H{x:.1}V{y:.1}"),
        };
    }
    if front.len() > 1 {
        frame.push(format_args!("<path class=\"line front\" d=\"{path}\"/>"));
    }
}

/// A rectangle in pixels: left, top, right, bottom.
type Area = [f64; 4];

/// Names the points of the front, each where it covers no point, no other name and not the line.
fn draw_labels(frame: &mut Frame, front: &[&Point], all: &[(usize, &Point)]) {
    let around = |x: f64, y: f64| [x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS];
    let mut taken: Vec<Area> =
        all.iter().map(|(_, point)| around(frame.x_of(point.x), frame.y_of(point.y))).collect();
    for pair in front.windows(2) {
        let [(x, y), (next_x, next_y)] =
            [pair[0], pair[1]].map(|point| (frame.x_of(point.x), frame.y_of(point.y)));
        taken.push([x, y - 1.0, next_x, y + 1.0]);
        taken.push([next_x - 1.0, y, next_x + 1.0, next_y]);
    }
    for point in front {
        let (x, y) = (frame.x_of(point.x), frame.y_of(point.y));
        let width = text_width(&point.label) * 0.95;
        // Above right, right, below left, above left, below right: baseline and left end.
        let places = [
            (x + 8.0, y - 6.0),
            (x + 9.0, y + 4.0),
            (x - width - 6.0, y + 15.0),
            (x - width - 8.0, y - 6.0),
            (x + 6.0, y + 16.0),
        ];
        let area = |(left, base): (f64, f64)| [left, base - 10.0, left + width, base + 2.0];
        let free = |area: &Area| {
            let inside =
                area[0] > 0.0 && area[2] < WIDTH && area[1] > 70.0 && area[3] < HEIGHT - 50.0;
            inside && !taken.iter().any(|other| overlap(area, other))
        };
        if let Some(place) = places.into_iter().find(|place| free(&area(*place))) {
            taken.push(area(place));
            frame.push(format_args!(
                "<text class=\"ink small\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                place.0,
                place.1,
                escape(&point.label)
            ));
        }
    }
}

fn overlap(a: &Area, b: &Area) -> bool {
    a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
}

#[cfg(test)]
mod tests {
    use super::super::Scale;
    use super::*;

    fn chart(points: Vec<Point>) -> Scatter {
        let tick = |value: f64| format!("{value}");
        Scatter {
            title: "a < b".into(),
            subtitle: String::new(),
            x: Axis { label: "x".into(), scale: Scale::Linear { low: 0.0, high: 10.0 }, tick },
            y: Axis { label: "y".into(), scale: Scale::Linear { low: 0.0, high: 10.0 }, tick },
            series: vec![Series { name: "s".into(), color: 0, points }],
        }
    }

    fn point(x: f64, y: f64) -> Point {
        Point { x, y, label: format!("at {x} {y}") }
    }

    #[test]
    fn the_front_holds_what_nothing_beats() {
        let points = [point(1.0, 5.0), point(2.0, 5.0), point(3.0, 1.0), point(4.0, 2.0)];
        let all: Vec<(usize, &Point)> = points.iter().map(|point| (0, point)).collect();
        let labels: Vec<&str> = front(&all).iter().map(|point| point.label.as_str()).collect();
        assert_eq!(labels, ["at 1 5", "at 3 1"]);
    }

    #[test]
    fn points_lie_where_they_should_and_text_is_escaped() {
        let svg = chart(vec![point(5.0, 5.0)]).svg();
        assert!(svg.contains("a &lt; b") && !svg.contains("a < b"));
        // The middle of the plot: 72 + (760 - 72 - 24) / 2 and 84 + (480 - 84 - 56) / 2.
        assert!(svg.contains("cx=\"404.0\" cy=\"254.0\""), "{svg}");
        assert!(svg.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn names_do_not_cover_one_another() {
        let crowd: Vec<Point> =
            (0..6).map(|i| point(5.0 + 0.01 * f64::from(i), 5.0 - 0.01 * f64::from(i))).collect();
        let svg = chart(crowd).svg();
        let named = svg.matches("<text class=\"ink small\"").count();
        assert!((1..6).contains(&named), "{named}");
    }
}
