//! How many more requests stay resident in the same bytes when their blocks shrink: 2,048 tokens each, the
//! first block and the last 128 tokens in f16, pages as SmolLM2-135M has them.

use reef_kv::page::{PageFormat, PageShape};
use reef_kv::{
    BlockPool, Fidelity, GroupConfig, Ladder, PoolConfig, Sequence, SequenceConfig, TAIL_TOKENS,
    apply_relief, plan_format_at_seal,
};

const TOKENS: usize = 2048;

/// Sequences that fit in a pool at once, each brought to `format` as soon as it is there.
fn residents(format: PageFormat) -> usize {
    let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };
    let groups = vec![GroupConfig { layers: 30, shape, window: None, pinned: vec![] }];
    let ladder = Ladder::default();
    let config = PoolConfig { groups, budget_bytes: 768 << 20, prefault: false, ladder };
    let pool = BlockPool::new(config).unwrap();
    let mut held = Vec::new();
    loop {
        let config = SequenceConfig {
            request: held.len() as u64,
            contract: Fidelity::Int4,
            priority: 0,
            trained_context: 8192,
            max_tokens: Some(TOKENS),
        };
        let mut sequence = Sequence::new(&pool, config);
        // In chunks, as a prompt is computed: only what is open or new is f16.
        while sequence.next_position() < TOKENS {
            if sequence.grow(128).is_err() {
                return held.len();
            }
            sequence.commit(128);
            let plan = plan_format_at_seal(&sequence, format, 32, TAIL_TOKENS);
            let mut encode = |jobs: &mut [reef_kv::EncodeJob<'_>]| {
                jobs.iter_mut().for_each(|job| job.target.fill(0));
            };
            apply_relief(&pool, &mut [&mut sequence], &plan, 0, &mut encode).unwrap();
        }
        held.push(sequence);
    }
}

#[test]
fn shrunk_requests_leave_room_for_others() {
    let [f16, int8, int4] = [PageFormat::F16, PageFormat::Int8, PageFormat::Int4].map(residents);
    println!("{f16} in f16, {int8} in int8, {int4} in int4");
    let times = |more: usize| more as f64 / f16 as f64;
    assert!(times(int8) >= 1.6 && times(int4) >= 2.6, "{f16} {int8} {int4}");
}
