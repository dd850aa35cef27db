//! The picture: the pool, its requests, what gave way, rates.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table};

use super::pool::{Bytes, Kind, Pool};
use super::watch::Watch;

/// Formats as the server names them, most precise first, each with its color: cool to warm as they lose.
const FORMATS: [(&str, Color); 6] = [
    ("f16", Color::Blue),
    ("int8", Color::Cyan),
    ("fp8-e4m3", Color::Magenta),
    ("fp8-e5m2", Color::LightMagenta),
    ("k8v4", Color::Green),
    ("int4", Color::Yellow),
];
const FAINT: Style = Style::new().fg(Color::DarkGray);

/// Columns from which the rungs stand beside the requests, whose table takes 101.
const BESIDE_WIDTH: u16 = 142;

/// Draws what is known.
pub fn draw(frame: &mut Frame<'_>, watch: &Watch, url: &str) {
    let Some(pool) = &watch.pool else {
        let text = watch.trouble.as_deref().unwrap_or("looking");
        frame.render_widget(Paragraph::new(clean(&format!("{url}: {text}"))), frame.area());
        return;
    };
    let rows = (frame.area().height / 5).clamp(2, 10);
    let parts = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(rows + 4),
        Constraint::Min(4),
        Constraint::Length(1),
    ]);
    let [head, memory, lower, foot] = parts.areas(frame.area());
    draw_head(frame, head, watch, pool, url);
    draw_memory(frame, memory, pool);
    let [requests, relief] = match lower.width >= BESIDE_WIDTH {
        true => Layout::horizontal([Constraint::Min(60), Constraint::Length(40)]).areas(lower),
        false => Layout::vertical([Constraint::Min(3), Constraint::Max(8)]).areas(lower),
    };
    draw_requests(frame, requests, pool);
    draw_relief(frame, relief, pool);
    frame.render_widget(Paragraph::new("q quits").style(FAINT), foot);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, watch: &Watch, pool: &Pool, url: &str) {
    let [words, line] = Layout::horizontal([Constraint::Min(50), Constraint::Max(60)]).areas(area);
    let rates = watch.rates.unwrap_or_default();
    let ms = |mean: Option<f64>| mean.map_or("–".into(), |mean| format!("{mean:.0} ms"));
    let limit = pool.ceilings.kv.min(pool.ceilings.ridge).min(pool.ceilings.configured);
    let limit = limit.min(pool.ceilings.latency.unwrap_or(u64::MAX));
    let state = match &watch.trouble {
        Some(trouble) => Span::styled(clean(trouble), Color::Red),
        None => Span::styled("live", Color::Green),
    };
    let lines = vec![
        Line::from(vec![
            Span::styled(clean(&pool.model), Modifier::BOLD),
            Span::styled(format!("  {}  ", clean(url)), FAINT),
            state,
        ]),
        Line::from(format!(
            "{} running, {} waiting, {} paused; about {limit} at most ({})",
            pool.running,
            pool.waiting,
            pool.paused,
            clean(&pool.ceilings.binding)
        )),
        Line::from(format!(
            "{:.1} tok/s, prefill {:.0} tok/s, first token {}, between {}",
            rates.generated,
            rates.prefill,
            ms(watch.latencies.first_token),
            ms(watch.latencies.between_tokens)
        )),
    ];
    frame.render_widget(Paragraph::new(lines), words);
    let shown = watch.history.len().saturating_sub(line.width as usize);
    frame
        .render_widget(Sparkline::default().data(&watch.history[shown..]).style(Color::Blue), line);
}

fn draw_memory(frame: &mut Frame<'_>, area: Rect, pool: &Pool) {
    let accounts = &pool.accounts;
    let held = accounts.used_bytes.saturating_sub(accounts.cached_bytes);
    let title = format!(
        " KV memory: {} held of {}, peak {} ",
        size(held),
        size(accounts.budget_bytes),
        size(accounts.peak_bytes)
    );
    let block = Block::new().borders(Borders::TOP).title(title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let parts =
        [Constraint::Length(1), Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)];
    let [bar, legend, map, why] = Layout::vertical(parts).areas(inner);
    frame.render_widget(Paragraph::new(budget_bar(pool, bar.width)), bar);
    frame.render_widget(Paragraph::new(legend_line(pool)), legend);
    frame.render_widget(Paragraph::new(heat_map(pool, map)), map);
    let color = if pool.would_wait { Color::Yellow } else { Color::Green };
    frame.render_widget(Paragraph::new(clean(&pool.why_not)).style(color), why);
}

/// The parts of the budget: name, bytes, style.
fn shares(pool: &Pool) -> Vec<(&str, u64, Style)> {
    let accounts = &pool.accounts;
    let idle = |format: &str| pool.held.get("cached").and_then(|idle| idle.get(format)).copied();
    let mut shares: Vec<(&str, u64, Style)> = FORMATS
        .iter()
        .map(|(format, color)| {
            let used = accounts.used.get(*format).copied().unwrap_or(0);
            (*format, used.saturating_sub(idle(format).unwrap_or(0)), Style::new().fg(*color))
        })
        .collect();
    shares.push(("idle", accounts.cached_bytes, Style::new().fg(Color::Gray)));
    shares.push(("fenced", accounts.fenced_bytes, Style::new().fg(Color::LightRed)));
    shares.push(("free", accounts.free_bytes, FAINT));
    shares.retain(|(_, bytes, _)| *bytes > 0);
    shares
}

fn budget_bar(pool: &Pool, width: u16) -> Line<'static> {
    let budget = pool.accounts.budget_bytes.max(1) as f64;
    let columns = |bytes: u64| (bytes as f64 / budget * f64::from(width)).round() as usize;
    let parts = shares(pool).into_iter().map(|(name, bytes, style)| {
        let letter = if name == "free" { "░" } else { "█" };
        Span::styled(letter.repeat(columns(bytes)), style)
    });
    Line::from(parts.collect::<Vec<_>>())
}

fn legend_line(pool: &Pool) -> Line<'static> {
    let parts = shares(pool).into_iter().flat_map(|(name, bytes, style)| {
        [Span::styled("■ ", style), Span::from(format!("{name} {}  ", size(bytes)))]
    });
    Line::from(parts.collect::<Vec<_>>())
}

fn style_of(kind: &Kind) -> (&'static str, Style) {
    let Some(format) = &kind.format else {
        return match kind.state.as_str() {
            "fenced" => ("▒", Style::new().fg(Color::LightRed)),
            "reserved" => ("·", FAINT),
            _ => ("░", FAINT),
        };
    };
    let color = FORMATS.iter().find(|(name, _)| name == format).map_or(Color::White, |(_, c)| *c);
    match kind.state.as_str() {
        "open" => ("▓", Style::new().fg(color)),
        "cached" => ("▒", Style::new().fg(Color::Gray)),
        "pinned" => ("▚", Style::new().fg(color)),
        _ => ("█", Style::new().fg(color)),
    }
}

/// The arena from start to end, as many letters as there is room for; a letter shows the cell in its middle.
fn heat_map(pool: &Pool, area: Rect) -> Vec<Line<'static>> {
    let looks: Vec<(&str, Style)> = pool.map.kinds.iter().map(style_of).collect();
    let spans = pool.map.spans.len();
    let letters = area.width as usize * area.height as usize;
    if spans == 0 || letters == 0 {
        return Vec::new();
    }
    // Whole letters to a span where there are more letters than spans.
    let (a_span, across) = match letters / spans {
        0 => (1.0, spans as f64 / letters as f64),
        whole => (whole as f64, 1.0),
    };
    let letter = |index: usize| {
        let span = &pool.map.spans[((index as f64 / a_span) * across) as usize];
        let cells: usize = span.iter().skip(2).step_by(2).sum();
        let within = (index as f64 % a_span + 0.5) / a_span * cells as f64;
        kind_at(span, within as usize)
            .and_then(|kind| looks.get(kind))
            .copied()
            .unwrap_or((" ", FAINT))
    };
    let count = letters.min((spans as f64 * a_span / across).ceil() as usize);
    let shown: Vec<_> = (0..count).map(letter).collect();
    let lines = shown.chunks(area.width as usize).map(|line| {
        Line::from(
            line.iter().map(|(letter, style)| Span::styled(*letter, *style)).collect::<Vec<_>>(),
        )
    });
    lines.collect()
}

/// The kind of a cell of `[page_bytes, kind, cells, ...]`.
fn kind_at(span: &[usize], cell: usize) -> Option<usize> {
    let mut seen = 0;
    span.get(1..)?.chunks_exact(2).find_map(|run| {
        seen += run[1];
        (cell < seen).then_some(run[0])
    })
}

fn draw_requests(frame: &mut Frame<'_>, area: Rect, pool: &Pool) {
    let more = match pool.requests_left_out {
        0 => String::new(),
        more => format!(", {more} more wait"),
    };
    let title = format!(" Requests: {}{more} ", pool.requests.len());
    let block = Block::new().borders(Borders::TOP).title(title);
    let several = pool.requests.iter().any(|row| row.tenant != pool.requests[0].tenant);
    let row = |row: &super::pool::Request| {
        let state = match &row.pause {
            Some(pause) => format!("{}: {pause}", row.state),
            None => row.state.clone(),
        };
        let tenant = row.tenant.clone().filter(|_| several).unwrap_or_default();
        let rung = row.last_rung.as_ref().map_or(String::new(), |last| last.rung.clone());
        let color = match row.state.as_str() {
            "paused" => Color::Yellow,
            "waiting" => Color::DarkGray,
            _ => Color::Reset,
        };
        let cells = [
            format!("#{}", row.key),
            clean(&tenant),
            clean(&row.fidelity),
            clean(&state),
            row.prompt_tokens.to_string(),
            format!("{}/{}", row.generated_tokens, row.max_tokens),
            size(total(&row.bytes)),
            format!("{:.0}", row.dropped_tokens),
            row.pauses.to_string(),
            clean(&rung),
        ];
        Row::new(cells.map(Cell::from)).style(color)
    };
    let tenant_width = if several { 12 } else { 0 };
    let widths = [7, tenant_width, 6, 17, 7, 12, 9, 7, 6, 9].map(Constraint::Length);
    let names = [
        "key",
        "",
        "allows",
        "state",
        "prompt",
        "generated",
        "memory",
        "dropped",
        "pauses",
        "rung",
    ];
    let table = Table::new(pool.requests.iter().map(row), widths)
        .header(Row::new(names).style(FAINT))
        .block(block);
    frame.render_widget(table, area);
}

fn draw_relief(frame: &mut Frame<'_>, area: Rect, pool: &Pool) {
    let line = |entry: &super::pool::Relieved| {
        let who = entry.request.map_or("prefixes".into(), |key| format!("#{key}"));
        let color = FORMATS.iter().find(|(name, _)| *name == entry.rung).map(|(_, color)| *color);
        let seconds = entry.ago_ms / 1000;
        Line::from(vec![
            Span::styled(format!("{:>4} s ", seconds.min(9999)), FAINT),
            Span::styled(format!("{:<12}", clean(&entry.rung)), color.unwrap_or(Color::Red)),
            Span::from(format!("{who:<9}{} blocks, {}", entry.blocks, size(entry.bytes))),
        ])
    };
    let lines: Vec<Line<'_>> =
        pool.relief.iter().rev().take(area.height as usize).map(line).collect();
    let block = Block::new().borders(Borders::TOP).title(" What gave way ");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn total(bytes: &Bytes) -> u64 {
    bytes.values().sum()
}

fn size(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    let amount = bytes as f64;
    match bytes {
        0..=1_048_575 => format!("{:.0} KiB", amount / KIB),
        1_048_576..=1_073_741_823 => format!("{:.1} MiB", amount / KIB / KIB),
        _ => format!("{:.2} GiB", amount / KIB / KIB / KIB),
    }
}

/// Text of others: a terminal obeys control characters.
fn clean(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn shown(watch: &Watch, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, watch, "http://host")).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content().chunks(width as usize).map(|line| {
            let text: String = line.iter().map(|cell| cell.symbol()).collect();
            text.trim_end().to_string()
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    fn pool(now_ms: u64, generated_tokens: u64) -> Pool {
        let document = json!({
            "model": "smollm2\u{1b}[31m", "now_ms": now_ms, "running": 2, "waiting": 1, "paused": 0,
            "why_not": "One more request would wait.", "would_wait": true,
            "ceilings": {"kv": 3, "ridge": 40, "configured": 64, "binding": "kv"},
            "accounts": {"budget_bytes": 8 << 20, "used_bytes": 6 << 20, "free_bytes": 2 << 20,
                "used": {"f16": 4 << 20, "int4": 2 << 20}, "cached_bytes": 1 << 20, "peak_bytes": 7 << 20},
            "held": {"cached": {"f16": 1 << 20}},
            "map": {"kinds": [{"state": "sealed", "format": "f16"}, {"state": "free"},
                {"state": "open", "format": "f16"}, {"state": "cached", "format": "f16"}],
                "spans": [[100, 0, 3, 2, 1], [100, 3, 4], [0, 1, 1], [0, 1, 1]]},
            "requests": [
                {"key": 7, "tenant": "a", "fidelity": "int4", "state": "decode", "prompt_tokens": 120,
                 "generated_tokens": 45, "max_tokens": 256, "bytes": {"int4": 2 << 20}, "pauses": 1,
                 "last_rung": {"rung": "int4"}},
                {"key": 9, "tenant": "b", "fidelity": "exact", "state": "paused", "pause": "swap"},
            ],
            "relief": [{"ago_ms": 2500, "request": 7, "rung": "int4", "blocks": 3, "bytes": 300000}],
            "counters": {"generated_tokens": generated_tokens},
        });
        serde_json::from_value(document).unwrap()
    }

    #[test]
    fn a_picture_shows_memory_requests_and_relief() {
        let mut watch = Watch::default();
        watch.see(pool(1000, 0));
        watch.see(pool(2000, 50));
        let wide = shown(&watch, 120, 28);
        let expected = [
            "smollm2[31m  http://host  live",
            "2 running, 1 waiting, 0 paused; about 3 at most (kv)",
            "50.0 tok/s, prefill 0 tok/s, first token –, between –",
            "─ KV memory: 5.0 MiB held of 8.0 MiB, peak 7.0 MiB ─",
            "■ f16 3.0 MiB  ■ int4 2.0 MiB  ■ idle 1.0 MiB  ■ free 2.0 MiB",
            "One more request would wait.",
            "#7      a            int4   decode            120     45/256       2.0 MiB",
            "#9      b            exact  paused: swap",
            "   2 s int4        #7       3 blocks, 293 KiB",
        ];
        for line in expected {
            assert!(wide.contains(line.trim_matches('─')), "{line:?} is missing in\n{wide}");
        }
        // Three quarters of the first span are full f16 pages, then an open one, idle ones, free ones.
        let map: String = wide.lines().skip(6).take(5).collect();
        let count = |letter| map.chars().filter(|one| *one == letter).count();
        assert_eq!([count('█'), count('▓'), count('▒'), count('░')], [112, 38, 150, 300]);
        for (width, height) in [(80, 24), (40, 12), (10, 5), (1, 1), (300, 80)] {
            shown(&watch, width, height);
        }
    }

    #[test]
    fn trouble_is_told_beside_what_was_seen() {
        let mut watch = Watch { trouble: Some("cannot reach it".into()), ..Watch::default() };
        assert_eq!(shown(&watch, 60, 3).trim_end(), "http://host: cannot reach it");
        watch.see(pool(1, 1));
        assert!(shown(&watch, 90, 20).contains("cannot reach it"));
    }
}
