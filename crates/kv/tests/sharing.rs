//! Sharing of blocks: fork and copy-on-write, trim, clear, the prefix index's names, partial blocks, and
//! sequences that leave and come back.

mod world;

use std::sync::Arc;

use reef_kv::page::PageShape;
use reef_kv::*;
use world::*;

const BLOCK: usize = 16;

fn pool(window: Option<usize>, budget_bytes: usize) -> BlockPool {
    let shape = |head_dim| PageShape { kv_heads: 2, head_dim, block_size: BLOCK };
    let group = |layers, head_dim, window| GroupConfig {
        layers,
        shape: shape(head_dim),
        window,
        pinned: vec![],
    };
    let mut groups = vec![group(3, 16, None)];
    groups.extend(window.map(|window| group(2, 32, Some(window))));
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: false, ladder: Ladder::default() })
        .unwrap()
}

#[test]
fn smoke() {
    let pool = pool(Some(40), 1 << 20);
    let mut parent = Sequence::new(&pool, request(0, Fidelity::Evict));
    extend(&mut parent, 70);
    let view = parent.shared_view();
    let mut child = parent.fork(1);
    assert!(Arc::ptr_eq(&view, &child.shared_view()));
    child.grow(1).unwrap();
    parent.grow(1).unwrap();
    assert_eq!(check_invariants(&pool, &[&parent, &child]), []);
    let (image, pinned) = child.pin();
    let mut bytes = vec![0; pinned.bytes()];
    assert_eq!(pinned.copy_to(0, &mut bytes), bytes.len());
    drop(pinned);
    child.clear();
    let mut pages = child.restore(&image).unwrap();
    pages.copy_from(0, &bytes);
    child.adopt(image, pages);
    assert_eq!(check_invariants(&pool, &[&parent, &child]), []);
}
