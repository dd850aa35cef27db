//! Engines for a world: the crowded one that is tested, and one that a request has to itself.

use reef_engine::event::{Event, Outcome};
use reef_engine::request::Request;
use reef_engine::speculate::Ngram;
use reef_engine::{
    AdmissionPolicy, Engine, EngineConfig, PrefixSettings, Progress, Rules, Scheduling, Tenant,
};
use reef_kv::page::PageFormat;
use reef_kv::policy::{self, PolicyOptions};
use reef_kv::{BlockPool, PoolConfig};

use crate::executor::{Clock, FakeExecutor};
use crate::fault::FaultRates;
use crate::spill::{SpillHandle, spill};
use crate::world::{Arrival, World};

/// What a course needs.
pub struct Parts {
    /// The world's time.
    pub clock: Clock,
    /// The pool of executor and engine.
    pub pool: BlockPool,
    /// A handle on the executor.
    pub executor: FakeExecutor,
    /// A handle on the spill store, if there is one.
    pub spill: Option<SpillHandle>,
    /// The engine.
    pub engine: Engine,
}

/// Link before the first token of a tenant's texts.
pub fn root(tenant: usize) -> u32 {
    tenant as u32 + 1000
}

/// Turns after which a request alone is taken for one that never ends.
const TURNS_ALONE: usize = 20_000;

/// The world's own engine.
///
/// # Errors
/// A configuration that the engine or the pool refuses.
pub fn crowded(world: &World) -> Result<Parts, String> {
    let clock = Clock::default();
    let pool = BlockPool::new(world.pool.clone()).map_err(|error| error.to_string())?;
    let executor =
        FakeExecutor::new(&pool, world.trained_context, clock.clone(), world.faults, world.seed);
    let mut config = config(world, &world.pool)?;
    let settings = &world.settings;
    config.scheduling = Scheduling {
        admission: match settings.utilize {
            true => AdmissionPolicy::Utilize,
            false => AdmissionPolicy::Reserve,
        },
        max_running: settings.max_running,
        max_waiting: settings.max_waiting,
        chunk_tokens: settings.chunk_tokens,
        step_limit_us: settings.step_limit_us,
        latency_target_us: settings.latency_target_us,
        batch_share: settings.batch_share,
        spill_bytes_per_second: settings.spill_bytes_per_second,
        ..Scheduling::default()
    };
    let fingerprint = b"fake".to_vec();
    config.prefix =
        world.prefix.map(|kind| PrefixSettings { kind, fingerprint, rotation: String::new() });
    let quota = |percent| world.pool.budget_bytes * percent / 100;
    let tenants = world.tenants.iter().enumerate().map(|(number, plan)| Tenant {
        name: number.to_string(),
        weight: plan.weight,
        quota_bytes: plan.quota_percent.map(quota),
        salt: plan.salt.clone(),
    });
    config.tenants = tenants.collect();
    let mut engine = Engine::with_executor(Box::new(executor.clone()), pool.clone(), config)
        .map_err(|error| error.to_string())?;
    let mut handle = None;
    if let Some(plan) = world.spill {
        let (store, of_store) = spill(plan, &world.pool, world.seed)?;
        engine.set_spill(Box::new(store));
        handle = Some(of_store);
    }
    if world.drafts {
        engine.set_drafter(Box::new(Ngram::new(1, 3)), 5.0);
    }
    Ok(Parts { clock, pool, executor, spill: handle, engine })
}

fn config(world: &World, pool: &PoolConfig) -> Result<EngineConfig, String> {
    let options = PolicyOptions { tail_tokens: world.settings.tail_tokens, seed: world.seed };
    let policy =
        policy::by_name(world.settings.policy, &options).map_err(|error| error.to_string())?;
    let mut config = EngineConfig::new(pool.budget_bytes);
    config.block_size = pool.block_size();
    config.rules = Rules { policy, ..Rules::default() };
    config.ladder = pool.ladder.clone();
    config.prefix = None;
    Ok(config)
}

/// What `arrival` gives alone in a pool that holds it whole, with `limit` as its limit of tokens.
///
/// # Errors
/// It ends otherwise than by itself.
pub fn alone(world: &World, arrival: &Arrival, limit: usize) -> Result<Outcome, String> {
    let request = Request {
        max_tokens: Some(limit),
        priority: 0,
        tenant: 0,
        deadline_us: None,
        speculate: false,
        use_prefix_cache: false,
        ..arrival.request.clone()
    };
    let tokens = (request.prompt.len() + limit + 600) * (1 + request.branches.width());
    let mut pool_config = world.pool.clone();
    pool_config.budget_bytes =
        2 * tokens * pool_config.bytes_per_token(PageFormat::F16) + (64 << 10);
    let config = config(world, &pool_config)?;
    let pool = BlockPool::new(pool_config).map_err(|error| error.to_string())?;
    let clock = Clock::default();
    let faults = FaultRates::default();
    let executor = FakeExecutor::new(&pool, world.trained_context, clock.clone(), faults, 0);
    executor.name_root(arrival.key, root(arrival.request.tenant));
    let mut engine = Engine::with_executor(Box::new(executor.clone()), pool, config)
        .map_err(|error| error.to_string())?;
    engine.submit(arrival.key, request).map_err(|error| error.to_string())?;
    for _ in 0..TURNS_ALONE {
        let progress = engine.turn(clock.now_us()).map_err(|error| error.to_string())?;
        for told in engine.take_events() {
            match told.event {
                Event::Finished(outcome) => return Ok(*outcome),
                Event::Failed(error) => return Err(error.to_string()),
                _ => {}
            }
        }
        if progress == Progress::Waiting {
            let due = executor.next_due_us().unwrap_or(0);
            clock.set(due.max(clock.now_us() + 1));
        }
    }
    Err("it does not end".into())
}
