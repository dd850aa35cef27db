//! The live page in a real browser: a real server with an engine that recites markup. Without Chromium (PATH, or
//! `REEF_CHROMIUM`) it is skipped, and says so.

mod browser;
mod pool;
mod reciter;
#[path = "../system/support/tokenizer.rs"]
mod tokenizer;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use reef_engine::{EngineHandle, Event, Request};
use reef_kv::Fidelity;
use reef_server::access::{Access, AccessSettings, Key};
use reef_server::grammar::Grammars;
use reef_server::lifecycle::{Limits, Stop, Stopper, bind, serve};
use reef_server::metrics::{self, ModelMetrics};
use reef_server::{App, Model, Settings, http};

use browser::Browser;
use reciter::{TENANT, TEXT};

const BUDGET_BYTES: usize = 3 << 20;
const KEY: &str = "sk-admin-of-this-test";

/// A server on a thread of its own, until it is dropped.
struct Served {
    url: String,
    engine: Arc<EngineHandle>,
    _stopper: Stopper,
}

fn start(access: Access) -> Served {
    let engine = reciter::engine(BUDGET_BYTES);
    let metrics = ModelMetrics::new(metrics::Served::new("tiny", &engine));
    let engine = Arc::new(EngineHandle::spawn(engine).unwrap());
    let tokenizer = Arc::new(tokenizer::byte_tokenizer());
    let app = Arc::new(App::guarded(Settings::new("<b>tiny</b>"), access, Limits::default()));
    app.set_model(Model {
        root: "tiny.gguf".into(),
        created: 1,
        context: 8192,
        budget_bytes: BUDGET_BYTES,
        block_size: 32,
        grammars: Arc::new(Grammars::new(tokenizer.clone(), &[tokenizer::END])),
        tokenizer,
        template: None,
        metrics,
        door: engine.clone(),
    });
    let (stopper, stop) = Stop::told();
    let (sender, address) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
            sender.send(listener.local_addr().unwrap()).unwrap();
            let router = http::router(app.clone());
            serve(listener, router, app.lifecycle.clone(), stop).await
        })
    });
    let url = format!("http://{}/", address.recv().unwrap());
    Served { url, engine, _stopper: stopper }
}

/// Gives the engine more than fits: relief, waiting and both tenants are on the page.
fn load(engine: &EngineHandle) {
    for index in 0..24_u32 {
        let prompt = (0..150).map(|token| (index + token) % 250).collect();
        let fidelity = Fidelity::ALL[index as usize % 4];
        // What is exact fits, and is soon done.
        let max_tokens = if fidelity == Fidelity::Exact { 300 } else { 1500 };
        let request = Request {
            max_tokens: Some(max_tokens),
            tenant: index as usize % 2,
            ..Request::new(prompt, fidelity)
        };
        engine.submit(request, Box::new(|_: Event| true)).unwrap();
    }
}

/// A browser, or a line that says why there is none.
fn browser() -> Option<Browser> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let Some(chromium) = browser::find() else {
        eprintln!("skipped: no Chromium in PATH or REEF_CHROMIUM");
        return None;
    };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let profile = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let profile = profile.join(format!("chromium-{}-{number}", std::process::id()));
    Some(Browser::start(&chromium, profile))
}

/// Colors in the map beside those of nothing.
const COLORS: &str = "(() => { const map = document.getElementById('map'); \
    const pixels = map.getContext('2d').getImageData(0, 0, map.width, map.height).data; \
    const colors = new Map(); for (let at = 0; at < pixels.length; at += 4) { \
    if (pixels[at + 3] === 0) continue; \
    const color = pixels[at] << 16 | pixels[at + 1] << 8 | pixels[at + 2]; \
    colors.set(color, (colors.get(color) ?? 0) + 1); } \
    return [...colors.values()].filter((count) => count > 60).length; })()";

const NO_SCROLL: &str =
    "document.documentElement.scrollWidth <= document.documentElement.clientWidth";

#[test]
fn the_page_shows_the_pool_and_streams_an_answer() {
    let Some(mut browser) = browser() else { return };
    let served = start(Access::default());
    browser.window(1280, 900, "light", "no-preference");
    browser.open(&served.url);
    browser.until("document.body.dataset.state === 'live'");
    browser.until("document.getElementById('why-text').textContent.includes('at once')");
    assert_eq!(browser.value("document.getElementById('requests-empty').hidden"), false);
    let idle = browser.value(COLORS);
    browser.picture("idle", true);
    // While nobody else waits.
    browser.value("document.querySelector('input[value=completion]').click()");
    browser.value("document.getElementById('prompt').value = 'Say it'");
    browser.value("document.getElementById('ask-tokens').value = 200");
    browser.value("document.getElementById('ask-fidelity').value = 'int4'");
    browser.value("document.getElementById('ask-temperature').value = 0");
    browser.value("document.getElementById('ask-go').click()");
    browser.until("!document.getElementById('ask-kv').hidden");
    let answer = browser.text("answer");
    let twice = TEXT.repeat(4);
    assert_eq!(answer.len(), 200);
    assert!(twice.contains(&answer), "{answer}");
    assert!(browser.text("ask-kv-text").starts_with("Contract int4"));
    // Its latencies come from what the server measured.
    browser.until("Number(document.getElementById('ttft').textContent) > 0");
    load(&served.engine);
    browser.until("document.querySelectorAll('#rows tr').length >= 10");
    browser.until("document.querySelectorAll('#relief li').length > 3");
    browser.until("Number(document.getElementById('rate').textContent.replace(',', '')) > 0");
    assert!(browser.value(COLORS).as_u64() > idle.as_u64().max(Some(2)), "more than nothing");
    assert!(browser.text("why-text").starts_with("One more request of 512 tokens (exact) would "));
    for mode in ["owner", "state", "format"] {
        browser.value(&format!("document.querySelector('input[value={mode}]').click()"));
        assert!(
            browser.value("document.querySelectorAll('#legend li').length").as_u64() >= Some(3)
        );
        browser.picture(&format!("map-{mode}"), false);
    }
    browser.picture("loaded", true);
    assert_only_text(&mut browser);
    assert_quiet(&browser, &served.url);
}

/// Nothing of what was said, nor a name, became an element.
fn assert_only_text(browser: &mut Browser) {
    assert_eq!(browser.value("document.querySelectorAll('img, b > b, main script').length"), 0);
    assert_eq!(browser.value("document.title"), "Reef · <b>tiny</b>");
    assert_eq!(browser.text("model"), "<b>tiny</b>");
    let names =
        browser.value("[...document.querySelectorAll('#rows th')].map((e) => e.textContent)");
    let has_tenant = |name: &serde_json::Value| name.as_str().is_some_and(|n| n.contains(TENANT));
    assert!(names.as_array().unwrap().iter().any(has_tenant), "{names}");
}

/// Nothing went wrong, and nobody else was asked.
fn assert_quiet(browser: &Browser, url: &str) {
    assert!(browser.complaints.is_empty(), "{:#?}", browser.complaints);
    let own = |asked: &&String| !asked.starts_with(url) && !asked.starts_with("data:");
    let others: Vec<&String> = browser.asked.iter().filter(own).collect();
    assert!(others.iter().all(|asked| *asked == "about:blank"), "{others:?}");
}

#[test]
fn the_page_is_readable_dark_and_on_a_phone() {
    let Some(mut browser) = browser() else { return };
    let served = start(Access::default());
    load(&served.engine);
    let ground = "getComputedStyle(document.documentElement).backgroundColor";
    browser.window(1280, 900, "dark", "reduce");
    browser.open(&served.url);
    browser.until("document.querySelectorAll('#rows tr').length >= 10");
    let dark = browser.value(ground);
    browser.until("document.querySelectorAll('#relief li').length > 3");
    browser.picture("dark", true);
    browser.value("document.getElementById('theme').click()");
    let light = browser.value(ground);
    assert_eq!(
        (dark.as_str(), light.as_str()),
        (Some("rgb(13, 16, 21)"), Some("rgb(246, 246, 244)"))
    );
    for (width, scheme) in [(390, "light"), (390, "dark"), (768, "light"), (1920, "light")] {
        browser.window(width, 844, scheme, "reduce");
        browser.value("localStorage.clear()");
        browser.open(&served.url);
        browser.until("document.querySelectorAll('#rows tr').length >= 10");
        assert_eq!(browser.value(NO_SCROLL), true, "{width} pixels");
        assert!(browser.value(COLORS).as_u64() > Some(2), "{width} pixels");
        browser.picture(&format!("{scheme}-{width}"), true);
    }
    // By keyboard: the map's pages, one after the other.
    browser.value("document.getElementById('map').focus()");
    browser.press("ArrowRight");
    let first = browser.text("cell");
    browser.press("ArrowDown");
    assert!(first.starts_with("Span 0, ") && browser.text("cell") != first, "{first}");
    assert_quiet(&browser, &served.url);
}

#[test]
fn the_page_asks_for_a_key_and_says_what_is_wrong() {
    let Some(mut browser) = browser() else { return };
    let access = Access::new(AccessSettings {
        admin_key: Some(Key::new(KEY).unwrap()),
        is_loopback: true,
        ..AccessSettings::default()
    });
    let served = start(access.unwrap());
    browser.window(390, 844, "light", "reduce");
    browser.open(&served.url);
    browser.until("document.getElementById('key').open");
    browser.picture("key", false);
    let enter = |browser: &mut Browser, key: &str| {
        browser.value(&format!("document.getElementById('key-value').value = '{key}'"));
        browser.value("document.querySelector('#key-form button').click()");
    };
    enter(&mut browser, "wrong");
    browser.until(
        "document.getElementById('key').open && !document.getElementById('key-wrong').hidden",
    );
    enter(&mut browser, KEY);
    browser.until("document.body.dataset.state === 'live'");
    assert_eq!(browser.value("document.getElementById('key').open"), false);
    assert_eq!(browser.value("document.cookie + JSON.stringify(localStorage)"), "{}");
    drop(served);
    browser.until("document.body.dataset.state === 'stale'");
    browser.until("document.getElementById('trouble').textContent.includes('Trying again')");
    browser.picture("gone", false);
}
