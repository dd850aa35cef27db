//! What must hold of Reef after a load.

use serde_json::{Value, json};

use crate::hold::Run;

/// Resident memory may grow by so much behind the warm-up: pages of the allocator that fill late.
const GROWTH_BYTES: f64 = (8 << 20) as f64;

/// One thing that must hold.
pub struct Check {
    /// What.
    pub name: &'static str,
    /// Whether it does.
    pub holds: bool,
    /// What was found.
    pub found: String,
}

impl Check {
    /// As a JSON object.
    pub fn json(&self) -> Value {
        json!({ "name": self.name, "holds": self.holds, "found": self.found })
    }
}

/// All checks of a run of Reef.
pub fn judge(run: &Run) -> Vec<Check> {
    let check = |name, holds, found| Check { name, holds, found };
    let tally = &run.tally;
    let mut checks = vec![
        check("requests were answered", tally.answered > 0, tally.answered.to_string()),
        check("no errors, no truncated streams", tally.faults() == 0, tally.examples.join("; ")),
        check(
            "exact requests get the text that they get alone",
            tally.compared > 0 && tally.equal == tally.compared,
            format!("{} of {}", tally.equal, tally.compared),
        ),
        check("no panic", run.panics.is_empty(), run.panics.join("; ")),
        check("the server ends by itself when asked", run.has_ended_well, String::new()),
        resident(run),
    ];
    if let Some(rest) = &run.rest {
        checks.push(check(
            "nothing runs or waits",
            rest.requests == 0.0,
            rest.requests.to_string(),
        ));
        let counter = |name: &str| rest.pool["counters"][name].as_u64();
        checks.push(short(&rest.pool));
        let intact = rest.violations.is_empty() && counter("violations") == Some(0);
        checks.push(check("no invariant was broken", intact, rest.violations.join("; ")));
        checks.push(blocks_back(&rest.pool));
    }
    checks
}

fn resident(run: &Run) -> Check {
    let (all, steady) = (run.memory.growth_bytes(), run.memory.steady_growth_bytes());
    let mib = |bytes: f64| bytes / (1 << 20) as f64;
    let found = match all.zip(steady) {
        Some((all, steady)) => {
            format!("{:+.1} MiB behind the warm-up, {:+.1} of it steadily", mib(all), mib(steady))
        }
        None => "unknown: too few samples".into(),
    };
    let holds = all.is_none_or(|bytes| bytes < GROWTH_BYTES);
    Check { name: "resident memory is flat", holds, found }
}

/// Somebody's blocks had to give way: else the load has proven nothing of that. (Idle prefixes go first.)
fn short(pool: &Value) -> Check {
    let count = |name: &str| pool["counters"][name].as_u64().unwrap_or(0);
    let [encoded, dropped, prefixes] =
        ["encoded_blocks", "dropped_blocks", "evicted_prefix_bytes"].map(count);
    let found = format!(
        "{encoded} blocks re-encoded, {dropped} dropped, {} MiB of idle prefixes dropped",
        prefixes >> 20
    );
    Check { name: "memory was short", holds: encoded + dropped > 0, found }
}

/// Sequences hold nothing: what is not free, or free for the asking (only cached), is overhead that does not depend
/// on requests, and it all adds up to the budget.
fn blocks_back(pool: &Value) -> Check {
    let accounts = &pool["accounts"];
    let bytes = |name: &str| accounts[name].as_u64().unwrap_or(u64::MAX / 16);
    let held = bytes("used_bytes").saturating_sub(bytes("cached_bytes"));
    let parts = ["used", "free", "reserved", "fragmentation", "table", "fenced"];
    let sum: u64 = parts.iter().map(|part| bytes(&format!("{part}_bytes"))).sum();
    let adds_up = sum == bytes("budget_bytes");
    let holds = accounts.is_object() && held == 0 && bytes("fenced_bytes") == 0 && adds_up;
    Check { name: "all memory is back, and accounted for", holds, found: accounts.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_held_or_lost_is_seen() {
        let pool = |used: u64, cached: u64, fenced: u64| {
            json!({ "accounts": {
                "budget_bytes": 100, "used_bytes": used, "cached_bytes": cached, "fenced_bytes": fenced,
                "free_bytes": 50, "reserved_bytes": 10, "fragmentation_bytes": 5, "table_bytes": 5,
            } })
        };
        assert!(blocks_back(&pool(30, 30, 0)).holds);
        assert!(!blocks_back(&pool(30, 20, 0)).holds, "held");
        assert!(!blocks_back(&pool(20, 20, 0)).holds, "lost");
        assert!(!blocks_back(&pool(20, 20, 10)).holds, "fenced");
        assert!(!blocks_back(&json!({})).holds, "unknown");
    }
}
