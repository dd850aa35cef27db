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

    /// Bytes a second by which it grows behind the warm-up, by least squares; `None` of too few samples.
    pub fn slope(&self) -> Option<f64> {
        let rest = &self.0[(self.0.len() as f64 * WARM_UP) as usize..];
        let count = Some(rest.len() as f64).filter(|count| *count >= 8.0)?;
        let mean = |of: fn(&(f64, f64)) -> f64| rest.iter().map(of).sum::<f64>() / count;
        let (mean_s, mean_bytes) = (mean(|sample| sample.0), mean(|sample| sample.1));
        let (mut both, mut square) = (0.0, 0.0);
        for (seconds, bytes) in rest {
            both += (seconds - mean_s) * (bytes - mean_bytes);
            square += (seconds - mean_s).powi(2);
        }
        Some(both / square)
    }

    /// Bytes by which it grew behind the warm-up, by the slope.
    pub fn growth_bytes(&self) -> Option<f64> {
        let first = self.0.get((self.0.len() as f64 * WARM_UP) as usize)?.0;
        Some(self.slope()? * (self.0.last()?.0 - first))
    }

    /// As a JSON object, in MiB.
    pub fn json(&self) -> Value {
        const MIB: f64 = (1 << 20) as f64;
        json!({
            "samples": self.0.len(),
            "max_mib": self.most_bytes() / MIB,
            "last_mib": self.0.last().map(|(_, bytes)| bytes / MIB),
            "slope_mib_per_minute": self.slope().map(|slope| slope * 60.0 / MIB),
            "growth_mib": self.growth_bytes().map(|bytes| bytes / MIB),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_seen_behind_the_warm_up() {
        let flat = |second: usize| if second < 20 { second as f64 } else { 20.0 };
        let leak = |second: usize| 100.0 + second as f64 * 2.0;
        let series =
            |of: &dyn Fn(usize) -> f64| Series((0..90).map(|s| (s as f64, of(s))).collect());
        assert!(series(&flat).slope().unwrap().abs() < 1e-9);
        assert!((series(&leak).slope().unwrap() - 2.0).abs() < 1e-9);
        assert!((series(&leak).growth_bytes().unwrap() - 118.0).abs() < 1e-6);
        assert_eq!(Series::default().slope(), None);
    }
}
