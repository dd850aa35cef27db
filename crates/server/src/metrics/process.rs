//! What the process takes of the machine, under the names that Prometheus client libraries share.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::writer::Writer;

/// Reads the process's state at each scrape. Where the system does not tell (no `/proc`), the family is absent.
#[derive(Debug)]
pub(super) struct ProcessCollector {
    start_seconds: f64,
}

impl ProcessCollector {
    /// Of a process that starts now.
    pub(super) fn new() -> ProcessCollector {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        ProcessCollector { start_seconds: since.as_secs_f64() }
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, encoder: DescriptorEncoder) -> std::fmt::Result {
        let mut write = Writer(encoder);
        write.gauge(
            "process_start_time_seconds",
            "Start of the server in seconds since the epoch.",
            self.start_seconds,
        )?;
        if let Some(bytes) = resident_bytes() {
            let help = "Resident memory in bytes.";
            write.gauge("process_resident_memory_bytes", help, bytes as f64)?;
        }
        if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
            let files = files.count() as f64;
            write.gauge("process_open_fds", "Open file descriptors.", files)?;
        }
        Ok(())
    }
}

/// Bytes of resident memory.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
