//! What a process takes, from /proc: resident memory over time, and CPU time. Elsewhere than on Linux nothing is
//! known.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Ticks a second of the times in /proc, on every Linux that Rust runs on (`USER_HZ`).
const TICKS_PER_SECOND: f64 = 100.0;
/// The first part of the samples is the way to the working size.
const WARM_UP: f64 = 1.0 / 3.0;

/// Bytes resident in memory, if known.
pub fn resident_bytes(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kibibytes| kibibytes << 10)
}

/// Seconds of CPU that the process has used, if known.
pub fn cpu_seconds(process: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in brackets, may hold anything; fields 14 and 15 are 11 and 12 behind it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: f64 = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(ticks / TICKS_PER_SECOND)
}

/// Resident memory over time: (seconds, bytes).
#[derive(Clone, Debug, Default)]
pub struct Series(Vec<(f64, f64)>);

impl Series {
    /// Samples `process` every half second, for ever: to be dropped with what it runs beside.
    pub async fn sample(&mut self, process: u32) {
        let start = Instant::now();
        loop {
            if let Some(bytes) = resident_bytes(process) {
                self.0.push((start.elapsed().as_secs_f64(), bytes as f64));
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Bytes at most.
    pub fn most_bytes(&self) -> f64 {
        self.0.iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max)
    }

    /// Bytes by which it grew behind the warm-up, by the slope; `None` of too few samples.
    pub fn growth_bytes(&self) -> Option<f64> {
        growth(self.behind_the_warm_up())
    }

    /// The same, of a growth that goes on: three times the least of three parts. Buffers that grow once, when more
    /// run at once than ever before, are in one part or two; a leak is in all.
    pub fn steady_growth_bytes(&self) -> Option<f64> {
        let rest = self.behind_the_warm_up();
        let parts = rest.chunks(rest.len().div_ceil(3).max(1)).map(growth);
        let least = parts.reduce(|one, other| Some(one?.min(other?))).flatten()?;
        Some(3.0 * least)
    }

    fn behind_the_warm_up(&self) -> &[(f64, f64)] {
        &self.0[(self.0.len() as f64 * WARM_UP) as usize..]
    }

    /// As a JSON object, in MiB.
    pub fn json(&self) -> Value {
        const MIB: f64 = (1 << 20) as f64;
        json!({
            "samples": self.0.len(),
            "max_mib": self.most_bytes() / MIB,
            "last_mib": self.0.last().map(|(_, bytes)| bytes / MIB),
            "growth_mib": self.growth_bytes().map(|bytes| bytes / MIB),
            "steady_growth_mib": self.steady_growth_bytes().map(|bytes| bytes / MIB),
        })
    }
}

/// Bytes by which `samples` grow from the first to the last, by the least squares' line.
fn growth(samples: &[(f64, f64)]) -> Option<f64> {
    let count = Some(samples.len() as f64).filter(|count| *count >= 8.0)?;
    let mean = |of: fn(&(f64, f64)) -> f64| samples.iter().map(of).sum::<f64>() / count;
    let (mean_s, mean_bytes) = (mean(|sample| sample.0), mean(|sample| sample.1));
    let (mut both, mut square) = (0.0, 0.0);
    for (seconds, bytes) in samples {
        both += (seconds - mean_s) * (bytes - mean_bytes);
        square += (seconds - mean_s).powi(2);
    }
    Some(both / square * (samples.last()?.0 - samples.first()?.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_seen_behind_the_warm_up() {
        let series =
            |of: &dyn Fn(usize) -> f64| Series((0..90).map(|s| (s as f64, of(s))).collect());
        let flat = series(&|second| if second < 20 { second as f64 } else { 20.0 });
        assert!(flat.growth_bytes().unwrap().abs() < 1e-9);
        let leak = series(&|second| 100.0 + second as f64 * 2.0);
        assert!((leak.growth_bytes().unwrap() - 118.0).abs() < 1e-6);
        assert!((leak.steady_growth_bytes().unwrap() - 114.0).abs() < 1e-6);
        let step = series(&|second| if second < 60 { 0.0 } else { 100.0 });
        assert!(step.growth_bytes().unwrap() > 50.0);
        assert!(step.steady_growth_bytes().unwrap().abs() < 1e-9);
        assert_eq!(Series::default().growth_bytes(), None);
        assert_eq!(Series::default().steady_growth_bytes(), None);
    }
}
