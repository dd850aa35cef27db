//! The live page at `/`: plain files in the binary. They show nothing by themselves: what they ask for needs the
//! admin's key where there is one.

use std::sync::OnceLock;

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;

/// A file of the page.
struct File {
    bytes: &'static str,
    content_type: &'static str,
    tag: OnceLock<HeaderValue>,
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

static PAGE: File = File::new(include_str!("index.html"), "text/html; charset=utf-8");
static STYLE: File = File::new(include_str!("style.css"), "text/css; charset=utf-8");
/// By name under `/page/`.
static SCRIPTS: [(&str, File); 5] = [
    ("app.js", File::new(include_str!("app.js"), SCRIPT)),
    ("ask.js", File::new(include_str!("ask.js"), SCRIPT)),
    ("chart.js", File::new(include_str!("chart.js"), SCRIPT)),
    ("map.js", File::new(include_str!("map.js"), SCRIPT)),
    ("text.js", File::new(include_str!("text.js"), SCRIPT)),
];

/// Nothing from elsewhere, nothing inline, in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// The page's routes.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let mut router = Router::new()
        .route("/", get(|headers: HeaderMap| async move { PAGE.answer(&headers) }))
        .route("/page/style.css", get(|headers: HeaderMap| async move { STYLE.answer(&headers) }));
    for (name, file) in &SCRIPTS {
        let answer = move |headers: HeaderMap| async move { file.answer(&headers) };
        router = router.route(&format!("/page/{name}"), get(answer));
    }
    router
}

impl File {
    const fn new(bytes: &'static str, content_type: &'static str) -> File {
        File { bytes, content_type, tag: OnceLock::new() }
    }

    /// A tag of its content: a new version is fetched, the same is not.
    fn tag(&self) -> &HeaderValue {
        self.tag.get_or_init(|| {
            let hash = blake3::hash(self.bytes.as_bytes()).to_hex();
            // Hexadecimal digits are a header's value.
            let tag = HeaderValue::from_str(&format!("\"{}\"", &hash[..32]));
            tag.unwrap_or_else(|_| HeaderValue::from_static("\"\""))
        })
    }

    /// The file, or that the client has it.
    fn answer(&self, asked: &HeaderMap) -> Response {
        let mut headers = HeaderMap::new();
        headers.insert(header::ETAG, self.tag().clone());
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        let known = asked.get_all(header::IF_NONE_MATCH).iter().any(|tags| {
            let tags = tags.to_str().unwrap_or("");
            tags.split(',').any(|tag| tag.trim().trim_start_matches("W/").as_bytes() == self.tag())
        });
        if known {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        (headers, self.bytes).into_response()
    }
}
