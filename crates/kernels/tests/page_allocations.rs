//! Nothing in page encoding allocates: the engine re-encodes exactly when memory is short.

use half::f16;
use reef_kernels::dispatch::Tier;
use reef_kernels::page::store::{NewTokens, store_tokens};
use reef_kernels::page::{decode_page, key_distinctness, reencode, write_kv};
use reef_kernels::pool::BarrierPool;
use reef_kv::arena::Arena;
use reef_kv::page::{PAGE_ALIGN, PageFormat, PageRef, PageShape};

/// Allocations of `job` on this thread.
fn allocations(job: impl FnOnce()) -> u64 {
    allocation_counter::measure(job).count_total
}

#[test]
fn pages_are_written_encoded_scored_and_read_without_an_allocation() {
    let tiers = Tier::available();
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![0u8; 100]))), 1);
    for (head_dim, block_size) in [(64, 32), (48, 16), (80, 128)] {
        let shape = PageShape { kv_heads: 2, head_dim, block_size };
        let channels = shape.kv_heads * head_dim;
        let token: Vec<f32> = (0..channels).map(|c| (c as f32).sin()).collect();
        let mut pages = PageFormat::ALL.map(|format| vec![0u8; shape.page_bytes(format)]);
        let mut target = vec![0u8; shape.page_bytes(PageFormat::F16)];
        let mut bad = vec![0u8; shape.page_bytes(PageFormat::F16)];
        bad[..2].copy_from_slice(&f16::NAN.to_le_bytes());
        let mut anchor = vec![0f32; channels];
        let mut read = [vec![0f32; channels * block_size], vec![0f32; channels * block_size]];
        for tier in &tiers {
            let count = allocations(|| {
                for slot in 0..block_size {
                    write_kv(*tier, &shape, &mut pages[0], slot, &token, &token);
                }
                key_distinctness(*tier, &shape, &pages[0], &mut anchor);
                let (f16_page, smaller) = pages.split_at_mut(1);
                for (format, page) in PageFormat::ALL[1..].iter().zip(smaller) {
                    reencode(*tier, &shape, PageFormat::F16, *format, &f16_page[0], page).unwrap();
                    let refused =
                        reencode(*tier, &shape, PageFormat::F16, *format, &bad, &mut target);
                    assert!(refused.is_err());
                }
                for (from, page) in PageFormat::ALL.iter().zip(&pages) {
                    let [keys, values] = &mut read;
                    decode_page(&shape, *from, page, keys, values);
                    for to in PageFormat::ALL.iter().filter(|to| from.can_become(**to)) {
                        reencode(*tier, &shape, *from, *to, page, &mut target).unwrap();
                    }
                }
            });
            assert_eq!(count, 0, "{} {shape:?}", tier.name());
        }
    }
    stored_tokens_allocate_nothing(&tiers);
}

fn stored_tokens_allocate_nothing(tiers: &[Tier]) {
    let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: 16 };
    let bytes = shape.page_bytes(PageFormat::F16);
    let arena = Arena::new(2 * bytes, false).unwrap();
    let page = |index: usize| PageRef {
        offset: (index * bytes / PAGE_ALIGN) as u32,
        first: 16 * index as u32,
        format: PageFormat::F16,
        run: 0,
    };
    let (pages, pool, rows) = ([page(0), page(1)], BarrierPool::new(1), [0.5f32; 20 * 16]);
    let tokens = NewTokens { first_position: 5, rows: 20, stride: 16, keys: &rows, values: &rows };
    for tier in tiers {
        let count = allocations(|| store_tokens(*tier, &pool, &shape, &arena, &pages, &tokens));
        assert_eq!(count, 0, "{}: storing tokens", tier.name());
    }
}
