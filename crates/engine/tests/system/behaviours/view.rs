//! What people are shown of the memory is what there is, and why a request would not be let in is the reason.

use reef_engine::pool_view::{MOST_ROWS, Obstacle, RequestRow, RequestState};
use reef_engine::{Probe, Tenant};
use reef_kv::PageState;

use super::*;

/// The view's sums are the accounts, to the byte, and its rows the requests. Runs in every test of these,
/// every few turns.
pub fn assert_adds_up(engine: &Engine) {
    let view = engine.pool_view(&Probe::default());
    let (accounts, map) = (engine.pool().accounts(), &view.map);
    assert_eq!((view.stats.accounts, map.accounts), (accounts, accounts));
    let held = |states: &[PageState], format| -> usize {
        states.iter().map(|state| map.held[*state as usize][format]).sum()
    };
    for (format, used) in accounts.used.iter() {
        assert_eq!(held(&PageState::ALL, format), *used, "{}", format.name());
    }
    assert_eq!(map.held[PageState::Cached as usize].total(), accounts.cached_bytes);
    let mut cells = BTreeMap::new();
    for span in &map.spans {
        for run in &span.runs {
            let page_bytes = if span.page_bytes == 0 { map.span_bytes } else { span.page_bytes };
            *cells.entry(map.kinds[run.kind].state).or_insert(0) += run.cells * page_bytes;
        }
    }
    let of = |state| cells.get(&state).copied().unwrap_or(0);
    assert_eq!((map.pages_a_cell, map.spans_a_cell), (1, 1), "a small pool is shown page by page");
    assert_eq!(of(PageState::Free), accounts.free_bytes);
    assert_eq!(of(PageState::Fenced), accounts.fenced_bytes);
    assert_eq!(of(PageState::Reserved), accounts.reserved_bytes);
    assert_eq!(
        cells.values().sum::<usize>() + accounts.fragmentation_bytes + accounts.table_bytes,
        accounts.budget_bytes
    );
    // Each byte that sequences hold is somebody's, or on its way from the spill store.
    let alone = view.requests.iter().map(|row| row.bytes.total() - row.shared_bytes);
    let shared = view.requests.iter().map(|row| row.shared_bytes);
    assert!(alone.clone().sum::<usize>() <= accounts.held_bytes());
    let pinned = map.held[PageState::Pinned as usize].total();
    assert!(alone.chain(shared).sum::<usize>() + pinned >= accounts.held_bytes());
    let of_tenants: usize = view.tenants.iter().map(|tenant| tenant.held_bytes).sum();
    assert_eq!(of_tenants, view.requests.iter().map(|row| row.bytes.total()).sum::<usize>());
    let stands = |row: &&RequestRow| matches!(row.state, RequestState::Paused(_));
    assert!(view.requests.iter().filter(stands).all(|row| row.paused_since_us.is_some()));
    assert!(!view.why_not.is_empty() && view.why_not.ends_with('.'));
}

fn obstacle(server: &Server, probe: &Probe) -> (Obstacle, String) {
    let view = server.engine.pool_view(probe);
    (view.obstacle, view.why_not)
}

fn of_tokens(tokens: usize, fidelity: Fidelity) -> Probe {
    Probe { tokens, fidelity, ..Probe::default() }
}

/// Whoever is told that nothing, or only what gives way, stands in the way is let in at the next turn; whoever
/// is told of the budget, the slots or a refusal is not. Asked at random moments of busy pools.
#[test]
fn what_a_probe_is_told_comes_true() {
    let model = plain();
    let mut told = BTreeMap::new();
    for seed in 0..12 {
        let mut random = Random(seed + 900);
        let mut config = engine_config(budget_of(&model, 16));
        config.scheduling.max_running = 3 + seed as usize % 5;
        config.scheduling.max_waiting = 4;
        if seed % 3 == 0 {
            config = with_prefix(IndexKind::Radix, config);
        }
        let mut server = Server::of(&model, config).with_good_spill();
        let mut key = 0;
        for _ in 0..80 {
            for _ in 0..random.below(4) {
                server.turn();
            }
            let fidelity = Fidelity::ALL[random.below(4)];
            let tokens = 2 + random.below(20 * BLOCK);
            let (obstacle, sentence) = obstacle(&server, &of_tokens(tokens, fidelity));
            *told.entry(format!("{obstacle:?}")).or_insert(0) += 1;
            let prompt = random.tokens(tokens - 1, VOCABULARY);
            let request = Request { fidelity, ..exact(prompt, 1) };
            if let Err(refusal) = server.engine.submit(key, request) {
                assert_eq!(obstacle, Obstacle::Refused, "{sentence}: {refusal}");
                continue;
            }
            assert_ne!(obstacle, Obstacle::Refused, "{sentence}");
            server.open += 1;
            key += 1;
            let waits = |server: &Server| {
                let view = server.engine.pool_view(&Probe::default());
                let row = view.requests.iter().find(|row| row.key == key - 1);
                row.is_some_and(|row| row.state == RequestState::Waiting)
            };
            // Nobody is let in while a step is in flight, and its end may make room.
            let before = server.outcomes.len();
            server.turn();
            server.turn();
            let nobody_left = server.outcomes.len() == before;
            match obstacle {
                Obstacle::Budget | Obstacle::Slots if nobody_left => {
                    assert!(waits(&server), "{sentence}");
                }
                Obstacle::None | Obstacle::Prefixes | Obstacle::Relief => {
                    assert!(!waits(&server), "{sentence}");
                }
                _ => {}
            }
        }
        server.finish();
    }
    let seen: Vec<&str> = told.keys().map(String::as_str).collect();
    for wanted in ["Budget", "None", "Queue", "Refused", "Relief", "Slots"] {
        assert!(seen.contains(&wanted), "{told:?}");
    }
}

/// A sentence names the numbers that it rests on.
#[test]
fn each_reason_has_its_sentence() {
    let model = plain();
    let tenant =
        |name: &str, quota_bytes| Tenant { name: name.into(), quota_bytes, ..Tenant::default() };
    let mut config = with_prefix(IndexKind::Radix, engine_config(budget_of(&model, 20)));
    config.tenants = vec![tenant("<b>one</b>", None), tenant("two", Some(64 << 10))];
    let mut server = Server::of(&model, config);
    let exact_of = |tokens| of_tokens(tokens, Fidelity::Exact);
    let says = |server: &Server, probe: &Probe, what: Obstacle, part: &str| {
        let (obstacle, sentence) = obstacle(server, probe);
        assert!(obstacle == what && sentence.contains(part), "{obstacle:?}: {sentence}");
        assert_eq!(sentence.matches(". ").count(), 0, "one sentence: {sentence}");
    };
    says(&server, &exact_of(256), Obstacle::None, "would get its 64 KiB at once");
    says(&server, &exact_of(4000), Obstacle::Refused, "4000 tokens (`exact`) would be refused: ");
    let mut random = Random(5);
    let holds = exact(random.tokens(6 * BLOCK, VOCABULARY), 6 * BLOCK);
    server.submit(0, &holds);
    server.submit(1, &Request { tenant: 1, ..exact(random.tokens(2 * BLOCK, VOCABULARY), BLOCK) });
    server.until(|server| server.tokens(0) > 0 && server.tokens(1) > 0);
    let of_two = Probe { tokens: 8 * BLOCK, tenant: 1, ..Probe::default() };
    says(&server, &of_two, Obstacle::Quota, "tenant `two`'s quota of 64 KiB");
    says(
        &server,
        &exact_of(10 * BLOCK),
        Obstacle::Budget,
        "(request 0 of tenant `<b>one</b>` holds most: ",
    );
    server.finish();
    server.assert_empty();
    // What they left is idle.
    says(&server, &exact_of(15 * BLOCK), Obstacle::Prefixes, "of idle prefixes");
    let int4 = Request { fidelity: Fidelity::Int4, ..holds };
    server.submit(2, &Request { max_tokens: Some(24 * BLOCK), ..int4 });
    server.until(|server| server.tokens(2) > 20 * BLOCK);
    let of_relief = (1..20)
        .map(|blocks| exact_of(blocks * BLOCK))
        .find(|probe| server.engine.pool_view(probe).obstacle == Obstacle::Relief);
    says(&server, &of_relief.unwrap(), Obstacle::Relief, "may shrink or be dropped");
    let view = server.engine.pool_view(&Probe::default());
    let row = &view.requests[0];
    assert_eq!((row.key, row.state, row.fidelity), (2, RequestState::Decode, Fidelity::Int4));
    assert_eq!((row.prompt_tokens, row.branches), (6 * BLOCK, 1));
    assert!(row.last_rung.is_some() && row.bytes[PageFormat::F16] < row.bytes.total(), "{row:?}");
    assert!(
        view.recent.iter().any(|entry| entry.request == Some(2) && entry.rung != "drop_prefix")
    );
    assert!(view.recent.iter().any(|entry| entry.request.is_none() && entry.rung == "drop_prefix"));
    assert!(view.recent.is_sorted_by_key(|entry| entry.at_us));
}

/// However many wait, a view is bounded, and those inside are in it.
#[test]
fn a_view_is_bounded() {
    let model = plain();
    let mut server = Server::of(&model, engine_config(budget_of(&model, 12)));
    let requests = unique(&mut Random(6), 2 * MOST_ROWS, 30, 40);
    for (key, request) in requests.iter().enumerate() {
        server.submit(key as u64, request);
    }
    server.until(|server| server.tokens(0) > 2);
    let view = server.engine.pool_view(&Probe::default());
    assert_eq!((view.requests.len(), view.requests_left_out), (MOST_ROWS, MOST_ROWS));
    let inside = view.requests.iter().take_while(|row| row.state != RequestState::Waiting);
    assert_eq!(inside.count(), server.engine.running());
    assert!(view.requests.iter().skip(server.engine.running()).is_sorted_by_key(|row| row.key));
}
