//! What the system says about memory, and the KV budget that follows from it.

use std::fs;

use anyhow::bail;

use crate::sizes::display;

/// Left free beside weights and KV memory under a cgroup limit, in bytes: buffers, tokenizer, code.
const CGROUP_MARGIN_BYTES: u64 = 256 << 20;

/// Memory that is available without swapping, in bytes; `None` where the system does not say.
fn available_bytes() -> Option<u64> {
    field_kib(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// The memory limit of this process's cgroup, in bytes; `None` without one.
fn cgroup_limit_bytes() -> Option<u64> {
    let files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = files.iter().filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok());
    limits.min().filter(|limit| *limit < 1 << 60)
}

/// The most memory this process has had resident, in bytes; `None` where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    field_kib(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The memory this process has resident now, in bytes; `None` where the system does not say.
pub fn resident_bytes() -> Option<u64> {
    field_kib(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// The CPU's name, where the system says it.
pub fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

fn field_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// The KV budget in bytes: `asked`, checked against the cgroup's limit; else the smallest of what the
/// trained context needs at f16 (`context_bytes`), half of the available memory, and what the cgroup
/// leaves beside the weights.
pub fn kv_budget(asked: Option<u64>, context_bytes: u64, weight_bytes: u64) -> anyhow::Result<u64> {
    let limit = cgroup_limit_bytes()
        .map(|limit| limit.saturating_sub(weight_bytes).saturating_sub(CGROUP_MARGIN_BYTES));
    if let Some(asked) = asked {
        let most = limit.or_else(available_bytes);
        return match most.filter(|most| asked > *most) {
            Some(most) => bail!(
                "--kv-memory is {}, but only {} can be had beside the weights: ask for less",
                display(asked),
                display(most)
            ),
            None => Ok(asked),
        };
    }
    let half = available_bytes().map(|bytes| bytes / 2);
    Ok([Some(context_bytes), half, limit].into_iter().flatten().min().unwrap_or(context_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_files_are_read() {
        let text = "MemTotal:  100 kB\nMemAvailable:    24 kB\n";
        assert_eq!(field_kib(text, "MemAvailable:"), Some(24 << 10));
        assert_eq!(field_kib(text, "Swap:"), None);
    }

    #[test]
    fn the_default_is_what_the_context_needs_if_there_is_plenty() {
        assert_eq!(kv_budget(None, 1 << 20, 1 << 20).unwrap(), 1 << 20);
    }

    #[test]
    fn more_than_there_is_gets_refused_with_numbers() {
        let error = kv_budget(Some(1 << 60), 0, 0).unwrap_err().to_string();
        assert!(error.contains("--kv-memory is 1073741824.0 GiB"), "{error}");
    }
}
