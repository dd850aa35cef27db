//! The ledger as a stacked bar: the whole device, what the engine leaves alone included.

use std::fmt::Write as _;

use super::{data, number};
use crate::figure::Unit;
use crate::fit::Fit;
use crate::report::shown;

/// Width of the drawing's coordinates; the picture is as wide as the page.
const WIDTH: f64 = 1000.0;

/// Adds the bar and its legend. Parts that exceed the device are drawn to scale of their sum.
pub fn push(page: &mut String, fit: &Fit) {
    let ledger = &fit.plan.ledger;
    let parts = [
        ("weights", ledger.weights.as_ref()),
        ("activation peak", ledger.activation.as_ref()),
        ("outside the tensor library", ledger.non_torch.as_ref()),
        ("CUDA graphs", ledger.graphs.as_ref()),
        ("left for KV", ledger.kv.as_ref()),
    ];
    let known: Vec<_> = parts
        .iter()
        .enumerate()
        .filter_map(|(index, (name, figure))| Some((index, *name, (*figure)?)))
        .collect();
    let sum: f64 = known.iter().map(|(_, _, figure)| figure.value.max(0.0)).sum();
    let total = ledger.total.as_ref().map(|figure| figure.value);
    let scale = WIDTH / total.unwrap_or(sum).max(sum).max(1.0);
    page.push_str("<h2>Where the memory of a device goes</h2>\n");
    let _ = writeln!(
        page,
        "<svg class=\"bar\" viewBox=\"0 0 {WIDTH} 60\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"stacked bar of the memory of one device\">\n\
         <rect class=\"rest\" x=\"0\" y=\"0\" width=\"{WIDTH}\" height=\"60\"/>"
    );
    let mut left = 0.0;
    for (index, name, figure) in &known {
        let width = figure.value.max(0.0) * scale;
        let _ = writeln!(
            page,
            "<rect class=\"part{index}\" x=\"{left:.2}\" y=\"0\" width=\"{width:.2}\" height=\"60\">\
             <title>{name}: {}</title></rect>",
            shown(figure.value, figure.unit)
        );
        left += width;
    }
    if let Some(reserved) = ledger.reserved.as_ref().filter(|_| total.is_some()) {
        let x = reserved.value * scale;
        let _ = writeln!(
            page,
            "<line class=\"share\" x1=\"{x:.2}\" x2=\"{x:.2}\" y1=\"0\" y2=\"60\"><title>the engine may \
             use what is left of this line</title></line>"
        );
    }
    page.push_str("</svg>\n<ul class=\"legend\">\n");
    for (index, name, figure) in &known {
        let _ =
            writeln!(page, "<li><i class=\"part{index}\"></i>{name} <b>{}</b></li>", data(figure));
    }
    if let Some(total) = total.filter(|total| *total > sum) {
        let rest = number(total - sum, &shown(total - sum, Unit::Bytes))
            .replace("<data", "<data class=\"rest\"");
        let _ = writeln!(page, "<li><i class=\"rest\"></i>not used <b>{rest}</b></li>");
    }
    page.push_str("</ul>\n");
    if total.is_some_and(|total| sum > total) {
        page.push_str(
            "<p class=\"hint\">More than the device has: the bar is as long as all parts.</p>\n",
        );
    }
    if ledger.reserved.is_some() && total.is_some() {
        page.push_str("<p class=\"hint\">The line marks what the engine may use.</p>\n");
    }
}
