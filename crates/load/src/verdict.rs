//! What must hold of Reef after a load.

use serde_json::{Value, json};

use crate::Run;

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
        let violations = rest.violations.join("; ");
        checks.push(check("no invariant was broken", rest.violations.is_empty(), violations));
        checks.push(blocks_back(&rest.pool));
    }
    checks
}

fn resident(run: &Run) -> Check {
    let growth = run.memory.growth_bytes();
    let found = growth.map_or("unknown: too few samples".into(), |bytes| {
        format!("{:+.1} MiB behind the warm-up", bytes / (1 << 20) as f64)
    });
    let holds = growth.is_none_or(|bytes| bytes < GROWTH_BYTES);
    Check { name: "resident memory is flat", holds, found }
}

fn blocks_back(pool: &Value) -> Check {
    let _ = pool;
    Check { name: "all memory is back", holds: false, found: "TODO".into() }
}
