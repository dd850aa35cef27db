//! A plan as one self-contained page: no script, no font, no load from anywhere, light and dark.
//!
//! Every number stands in a `<data value>` with the value that the JSON has; the JSON itself is in the page too.

mod bar;
mod chart;
mod sweep;

use std::fmt::Write as _;

use crate::engines::{Engine, Verdict};
use crate::figure::Figure;
use crate::fit::Fit;
use crate::log::compare::{Basis, Line};
use crate::log::report::word;
use crate::model::Model;
use crate::report::{shown, verdict};
use sweep::Sweep;

const STYLE: &str = include_str!("style.css");

/// The page of a plan; `log` are the lines of a comparison with a start-up log.
///
/// # Errors
/// A figure that JSON cannot hold.
pub fn page(
    engine: &dyn Engine,
    model: &Model,
    fit: &Fit,
    log: Option<&[Line]>,
) -> Result<String, serde_json::Error> {
    let sweep = Sweep::new(engine, model, fit);
    let title = format!("{} on {} {}", fit.model.name, fit.plan.engine, fit.plan.version);
    let mut page = String::new();
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{0}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{0}</h1>\n",
        escaped(&title)
    );
    push_verdict(&mut page, fit);
    bar::push(&mut page, fit);
    push_mends(&mut page, fit);
    chart::push(&mut page, &sweep);
    sweep.push_table(&mut page);
    if let Some(lines) = log {
        push_log(&mut page, lines);
    }
    push_provenance(&mut page, fit);
    push_notes(&mut page, fit);
    let document = serde_json::json!({"fit": fit, "formats": sweep.rows(), "comparison": log});
    // `<` inside JSON strings may be written so; no text can end the element.
    let json = serde_json::to_string(&document)?.replace('<', "\\u003c");
    let _ = write!(
        page,
        "<script type=\"application/json\" id=\"plan\">{json}</script>\n</main>\n</body>\n</html>\n"
    );
    Ok(page)
}

/// Text that HTML shows as it is.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            _ => safe.push(c),
        }
    }
    safe
}

/// A figure's value as people read it, with the value itself.
fn data(figure: &Figure) -> String {
    number(figure.value, &shown(figure.value, figure.unit))
}

fn number(value: f64, text: &str) -> String {
    // As serde_json writes it, so that the page and the JSON agree to the digit.
    format!("<data value=\"{}\">{}</data>", serde_json::json!(value), escaped(text))
}

fn push_verdict(page: &mut String, fit: &Fit) {
    let plan = &fit.plan;
    let class = match plan.verdict {
        Verdict::Starts => "good",
        Verdict::ProbablyStarts | Verdict::ProbablyRefuses => "near",
        Verdict::Refuses => "bad",
        Verdict::Unknown => "open",
    };
    let text = escaped(&verdict(fit));
    let _ = writeln!(page, "<p class=\"verdict {class}\">{text}</p>");
    if let Some(refusal) = &plan.refusal {
        let _ = writeln!(page, "<blockquote>{}</blockquote>", escaped(refusal));
    }
    let facts = [
        ("tokens as printed", &plan.printed_tokens),
        ("full requests at once", &plan.concurrency),
        ("longest request", &plan.max_len),
        ("KV per token", &plan.kv_bytes_per_token),
    ];
    page.push_str("<dl class=\"facts\">\n");
    for (name, figure) in facts {
        if let Some(figure) = figure {
            let _ = writeln!(page, "<div><dt>{name}</dt><dd>{}</dd></div>", data(figure));
        }
    }
    page.push_str("</dl>\n");
}

fn push_mends(page: &mut String, fit: &Fit) {
    if fit.mends.is_empty() {
        return;
    }
    page.push_str("<h2>What helps most</h2>\n<ul class=\"mends\">\n");
    for mend in &fit.mends {
        let _ = writeln!(
            page,
            "<li><code>{}</code> <span>{}</span></li>",
            escaped(&mend.flag),
            escaped(&mend.buys)
        );
    }
    page.push_str("</ul>\n");
}

fn push_log(page: &mut String, lines: &[Line]) {
    page.push_str("<h2>The log against the plan</h2>\n");
    for basis in [Basis::Flags, Basis::LogsPool] {
        let of: Vec<&Line> = lines.iter().filter(|line| line.basis == basis).collect();
        if of.is_empty() {
            continue;
        }
        let head = match basis {
            Basis::Flags => "From model, device and flags alone",
            Basis::LogsPool => "From the pool that the log prints",
        };
        let _ = writeln!(page, "<h3>{head}</h3>\n<ul class=\"log\">");
        for line in of {
            let plan = line.plan.as_ref().map_or("no plan".into(), data);
            let relative = line.relative.map_or(String::new(), |share| {
                format!(" <span class=\"share\">{:+.2} %</span>", 100.0 * share)
            });
            let word = word(line.agreement);
            let _ = write!(
                page,
                "<li><b>{}</b> <span class=\"tag {}\">{word}</span><div>log {}, planned {plan}{relative}</div>",
                line.name,
                word.replace(' ', "-"),
                data(&line.log)
            );
            if let Some(reason) = &line.reason {
                let _ = write!(page, "<small>{}</small>", escaped(reason));
            }
            page.push_str("</li>\n");
        }
        page.push_str("</ul>\n");
    }
}

/// Every line of the plan with where its number comes from.
fn push_provenance(page: &mut String, fit: &Fit) {
    let (plan, ledger) = (&fit.plan, &fit.plan.ledger);
    let pool = plan.pool.as_ref();
    let lines = [
        ("device memory", ledger.total.as_ref()),
        ("engine may use", ledger.reserved.as_ref()),
        ("weights", ledger.weights.as_ref()),
        ("activation peak", ledger.activation.as_ref()),
        ("outside the tensor library", ledger.non_torch.as_ref()),
        ("CUDA graphs", ledger.graphs.as_ref()),
        ("left for KV", ledger.kv.as_ref()),
        ("KV per token", plan.kv_bytes_per_token.as_ref()),
        ("KV of one full request", plan.kv_needed.as_ref()),
        ("bytes of a block", pool.map(|pool| &pool.block_bytes)),
        ("blocks", pool.map(|pool| &pool.blocks)),
        ("tokens as printed", plan.printed_tokens.as_ref()),
        ("full requests at once", plan.concurrency.as_ref()),
        ("longest request", plan.max_len.as_ref()),
    ];
    page.push_str("<h2>Where every number comes from</h2>\n<ul class=\"sources\">\n");
    for (name, figure) in lines {
        let Some(figure) = figure else {
            continue;
        };
        let range = match figure.is_exact() {
            true => String::new(),
            false => format!(
                " <span class=\"range\">{} to {}</span>",
                number(figure.low, &shown(figure.low, figure.unit)),
                number(figure.high, &shown(figure.high, figure.unit))
            ),
        };
        let word = figure.provenance_word();
        let _ = writeln!(
            page,
            "<li><b>{name}</b> <span class=\"tag {word}\">{word}</span><div>{}{range}</div>\
             <small>{}</small></li>",
            data(figure),
            escaped(figure.explanation())
        );
    }
    page.push_str("</ul>\n");
}

fn push_notes(page: &mut String, fit: &Fit) {
    if fit.plan.notes.is_empty() {
        return;
    }
    page.push_str("<h2>Notes</h2>\n<ul class=\"notes\">\n");
    for note in &fit.plan.notes {
        let _ = writeln!(page, "<li>{}</li>", escaped(note));
    }
    page.push_str("</ul>\n");
}
