//! Who holds which bytes of KV memory, and what gives way when it runs short.
//!
//! Does no I/O, reads no clock, spawns no thread, knows no model and no arithmetic: kernels write and
//! re-encode the pages that this crate hands out.
//!
//! - [`BlockPool`]: a byte budget, its arena, its accounts; static questions (`fits_at_f16`,
//!   `capacity_tokens`, `bytes_for_tokens`, [`minimum_budget_bytes`]).
//! - [`Sequence`]: `grow` → the model writes pages → `commit`; `view` for kernels; `usage` at the end.
//! - [`plan_relief`] (pure) → [`apply_relief`] between steps, with the caller's encode kernel.
//!   Plan for a horizon first; on a shortage plan for the next step alone, then for a smaller chunk;
//!   a shortage for a single token means that no permitted rung is left.
//! - [`plan_quota`]: the same for the bytes that one tenant's sequences may hold.
//! - [`plan_format_at_seal`], [`plan_token_budget`]: what `eval` forces, carried out the same way.
//! - [`check_invariants`]: what must hold at any time.
//!
//! One step of an engine:
//!
//! ```
//! use reef_kv::page::{PageFormat, PageShape};
//! use reef_kv::policy::Sinks;
//! use reef_kv::*;
//!
//! let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };
//! let pool = BlockPool::new(PoolConfig {
//!     groups: vec![GroupConfig { layers: 30, shape, window: None, pinned: vec![] }],
//!     budget_bytes: 24 << 20,
//!     prefault: false,
//!     ladder: Ladder::default(),
//! })?;
//! assert!(pool.fits_at_f16(1024, 1) && !pool.fits_at_f16(2000, 1));
//! let mut sequence = Sequence::new(&pool, SequenceConfig {
//!     request: 0,
//!     contract: Fidelity::Evict,
//!     priority: 0,
//!     trained_context: 8192,
//!     max_tokens: Some(2000), // prompt + generated
//! });
//! let policy = Sinks { tail_tokens: TAIL_TOKENS };
//! let (mut step, chunk) = (0, 128);
//! while sequence.next_position() < 2000 {
//!     let tokens = sequence.remaining(chunk);
//!     let demand = Demand { sequence: &sequence, tokens, step_tokens: tokens, stretch_tokens: tokens };
//!     let plan = plan_relief(&pool, &[demand], &policy);
//!     assert_eq!(plan.shortage, None); // else: a smaller chunk, or wait
//!     if !plan.is_empty() {
//!         apply_relief(&pool, &mut [&mut sequence], &plan, step, &mut |jobs| {
//!             for job in jobs {
//!                 job.target.fill(0); // kernels::page::encode(job...), `job.refused` on NaN
//!             }
//!         })?;
//!     }
//!     sequence.grow(tokens)?;
//!     let fence = pool.begin_step();
//!     let _pages = &sequence.view().groups[0].layers[0]; // run the model: it writes and reads pages
//!     fence.pass();
//!     sequence.commit(tokens);
//!     step += 1;
//! }
//! let usage = sequence.usage();
//! // Four bits for V sufficed: nothing was dropped.
//! assert!(usage.tokens_by_format[PageFormat::K8V4] > 0.0 && usage.dropped_tokens == 0.0);
//! drop(sequence);
//! assert_eq!(pool.accounts().used_bytes(), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod account;
pub mod admission;
pub mod arena;
pub mod block;
pub mod cache;
pub mod config;
pub mod harm;
pub mod invariant;
pub mod keep;
pub mod ladder;
pub mod ledger;
#[cfg(feature = "mutants")]
pub mod mutant;
pub mod page;
pub mod page_map;
pub mod policy;
pub mod pool;
pub mod prefix;
pub mod relief;
mod runs;
mod scores;
mod span;
pub mod table;
pub mod transfer;

pub use account::{Accounts, ByFormat};
pub use admission::minimum_budget_bytes;
pub use block::BlockGuard;
pub use cache::{CacheChange, CachedBlock, CachedState};
pub use config::{ConfigError, GroupConfig, PoolConfig, TAIL_TOKENS};
pub use harm::HarmTable;
pub use invariant::check_invariants;
pub use ladder::{Fidelity, Ladder, LadderError, Rung};
pub use ledger::{LedgerEntry, Reason};
pub use page_map::{Holder, PageMap, PageState};
pub use pool::{BlockPool, Shortage, StepFence};
pub use relief::{
    Demand, EncodeJob, ReliefPlan, apply_relief, plan_format_at_seal, plan_quota, plan_relief,
    plan_token_budget, relief_needed_bytes,
};
pub use table::{AttachedBlock, KvUsage, Sequence, SequenceConfig};
pub use transfer::{EmptyPages, PinnedPages, SequenceImage};
