//! Progress bars on stderr, for work that takes over two seconds.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// A bar that appears once the work has taken two seconds; drawn only on a terminal.
pub struct Progress {
    start: Instant,
    total: u64,
    unit: &'static str,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Work of `total` steps called `unit` begins.
    pub fn new(total: usize, unit: &'static str) -> Progress {
        Progress { start: Instant::now(), total: total as u64, unit, bar: None }
    }

    /// `done` steps are done.
    pub fn set(&mut self, done: usize) {
        if self.start.elapsed() >= PATIENCE {
            self.bar.get_or_insert_with(|| draw(self.total, self.unit)).set_position(done as u64);
        }
    }

    /// The work is over: the bar goes.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

fn draw(total: u64, unit: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(4));
    let template = format!("{{bar:32}} {{pos}}/{{len}} {unit}, {{per_sec}}, {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar
}
