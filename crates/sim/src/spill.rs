//! The spill store of a world: the real slots over memory, with faults drawn from the world's seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reef_engine::store::{Fault, Operation, SimulatedSpill, SpillClock, SpillSize, SpillTiming};
use reef_kv::PoolConfig;

use crate::random::Random;
use crate::world::SpillPlan;

/// Small slots, so that a record has several.
const SLOT_BYTES: usize = 16 << 10;

/// A world's handle on its spill store.
#[derive(Clone, Debug)]
pub struct SpillHandle {
    /// Its time: to be moved along with the world's.
    pub clock: SpillClock,
    faults: Arc<AtomicU64>,
}

impl SpillHandle {
    /// Operations that went wrong on purpose.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }
}

/// A store of `plan` for a pool of `pool`.
///
/// # Errors
/// A size out of range.
pub fn spill(
    plan: SpillPlan,
    pool: &PoolConfig,
    seed: u64,
) -> Result<(SimulatedSpill, SpillHandle), String> {
    let wanted_bytes = pool.budget_bytes * plan.capacity_percent / 100;
    let file_bytes = (wanted_bytes + 4 * SLOT_BYTES) as u64;
    let size = SpillSize { file_bytes, slot_bytes: SLOT_BYTES };
    let mut random = Random::new(seed, "spill");
    let (latency_us, slot_us) = (random.between(10, 2000), random.between(10, 300));
    let faults = Arc::new(AtomicU64::new(0));
    let counted = faults.clone();
    let script = Box::new(move |_: Operation| {
        let fault = random.percent(plan.fail).then(|| fault(&mut random))?;
        counted.fetch_add(1, Ordering::Relaxed);
        Some(fault)
    });
    let timing = SpillTiming { latency_us, slot_us };
    let (store, clock) =
        SimulatedSpill::new(size, timing, script).map_err(|error| error.to_string())?;
    Ok((store, SpillHandle { clock, faults }))
}

fn fault(random: &mut Random) -> Fault {
    match random.between(0, 9) {
        0 => Fault::NoSpace,
        1 => Fault::Broken,
        2 => Fault::Partial,
        3 => Fault::Nothing,
        4..=5 => Fault::Flip(random.draw()),
        6 => Fault::Lost,
        7 => Fault::Misplaced,
        8 => Fault::Wiped,
        _ => Fault::Slow(random.between(100, 20_000)),
    }
}
