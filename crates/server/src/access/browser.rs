//! What pages of other origins may do: nothing, unless they are listed.
//!
//! A server without keys on a loopback address is reached by every page that its user's browser shows. Such a
//! page cannot read answers (no CORS), but it could send; and with a name of its own that it lets point
//! to 127.0.0.1 (DNS rebinding) it could read too. Browsers tell both: `Origin` says which page asks, `Host`
//! which name it asked for. Where a key was presented neither matters: browsers add none by themselves.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::{Access, exposure, forbidden};
use crate::error::ApiError;

/// How long browsers may remember what they were allowed.
const REMEMBER: Duration = Duration::from_secs(600);

/// What is wrong with `--allowed-origins`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no origin: give scheme://host or scheme://host:port without a path, `null`, or `*` for all"
)]
pub struct OriginsError(String);

/// Origins whose pages may use the server from a browser.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins {
    all: bool,
    listed: Arc<[String]>,
}

impl Origins {
    /// Reads the values of `--allowed-origins`.
    ///
    /// # Errors
    /// One that is no origin.
    pub fn new<'t>(origins: impl IntoIterator<Item = &'t str>) -> Result<Origins, OriginsError> {
        let mut all = false;
        let mut listed = Vec::new();
        for origin in origins {
            match origin {
                "*" => all = true,
                _ if origin == "null" || is_origin(origin) => {
                    listed.push(origin.to_ascii_lowercase());
                }
                _ => return Err(OriginsError(origin.into())),
            }
        }
        Ok(Origins { all, listed: listed.into() })
    }

    fn has(&self, origin: &str) -> bool {
        self.all || self.listed.iter().any(|listed| listed.eq_ignore_ascii_case(origin))
    }

    /// Whether one of them is served under `host`: a proxy before the server keeps the name.
    fn has_host(&self, host: &str) -> bool {
        let hosts = self.listed.iter().filter_map(|origin| origin.split_once("://"));
        self.all || hosts.into_iter().any(|(_, listed)| name_of(listed) == name_of(host))
    }

    /// The layer that answers preflights and lets listed pages read; `None`: no page may.
    pub(super) fn cors(&self) -> Option<CorsLayer> {
        if !self.all && self.listed.is_empty() {
            return None;
        }
        let origins = self.clone();
        let allowed = move |origin: &HeaderValue, _: &axum::http::request::Parts| {
            origin.to_str().is_ok_and(|origin| origins.has(origin))
        };
        let layer = CorsLayer::new()
            .allow_origin(AllowOrigin::predicate(allowed))
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([header::RETRY_AFTER, HeaderName::from_static("x-request-id")])
            .max_age(REMEMBER);
        Some(layer)
    }
}

/// `scheme://authority`, nothing more.
fn is_origin(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, host)| {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || b"+-._:[]~%".contains(&byte);
        !scheme.is_empty() && !host.is_empty() && scheme.bytes().chain(host.bytes()).all(good)
    })
}

/// A host's name without its port.
fn name_of(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

fn is_loopback_name(host: &str) -> bool {
    let name = name_of(host).trim_end_matches('.').to_ascii_lowercase();
    name == "localhost"
        || name.ends_with(".localhost")
        || name.parse::<IpAddr>().is_ok_and(exposure::is_loopback)
}

impl Access {
    /// Refuses what a browser sends for a page that is neither ours nor listed.
    ///
    /// # Errors
    /// 403 naming the header; 400 for several hosts.
    pub fn check_browser(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().map(|host| host.to_str().unwrap_or_default());
        if hosts.next().is_some() {
            let message = "there are several Host headers: send one";
            return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message));
        }
        if self.caller(headers).is_ok_and(|caller| caller.keyed) {
            return Ok(());
        }
        let foreign_host = host.filter(|host| {
            self.is_loopback && !is_loopback_name(host) && !self.origins.has_host(host)
        });
        if foreign_host.is_some() {
            return Err(forbidden(
                "the Host header is not a name of this machine's loopback: use localhost, or list the \
                 proxy's origin in --allowed-origins",
            ));
        }
        for origin in headers.get_all(header::ORIGIN) {
            let origin = origin.to_str().unwrap_or_default();
            let own = origin.split_once("://").map(|(_, host)| host);
            let is_own = own.is_some_and(|own| host.is_some_and(|h| h.eq_ignore_ascii_case(own)));
            if !is_own && !self.origins.has(origin) {
                return Err(forbidden(
                    "pages of this origin may not use the server: list it in --allowed-origins",
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AccessSettings, Key};
    use super::*;

    fn access(origins: &[&str], is_loopback: bool, key: Option<&str>) -> Access {
        let api_keys = key.map(|key| Key::new(key).unwrap()).into_iter().collect();
        let origins = Origins::new(origins.iter().copied()).unwrap();
        let settings = AccessSettings { api_keys, origins, is_loopback, ..Default::default() };
        Access::new(settings).unwrap()
    }

    fn verdict(access: &Access, pairs: &[(&'static str, &str)]) -> u16 {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        access.check_browser(&headers).map_or_else(|error| error.status.as_u16(), |()| 200)
    }

    #[test]
    fn names_that_were_rebound_are_refused_on_loopback() {
        let local = access(&[], true, None);
        for host in [
            "localhost:8080",
            "LOCALHOST",
            "127.0.0.1:8080",
            "127.9.9.9",
            "[::1]:8080",
            "localhost.",
            "reef.localhost:1",
            "[::ffff:127.0.0.1]",
        ] {
            assert_eq!(verdict(&local, &[("host", host)]), 200, "{host}");
        }
        for host in [
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "",
            "notlocalhost",
            "::2",
            "[::2]:80",
        ] {
            assert_eq!(verdict(&local, &[("host", host)]), 403, "{host}");
        }
        assert_eq!(verdict(&local, &[]), 200, "HTTP/1.0 without a host is no browser");
        assert_eq!(verdict(&local, &[("host", "localhost"), ("host", "evil.example")]), 400);
        // Elsewhere the names are not known.
        assert_eq!(verdict(&access(&[], false, None), &[("host", "reef.example")]), 200);
    }

    #[test]
    fn pages_of_other_origins_are_refused_unless_listed() {
        let host = ("host", "localhost:8080");
        let local = access(&[], true, None);
        assert_eq!(verdict(&local, &[host, ("origin", "http://localhost:8080")]), 200);
        for origin in ["http://localhost:3000", "https://evil.example", "null", "", "http://"] {
            assert_eq!(verdict(&local, &[host, ("origin", origin)]), 403, "{origin}");
        }
        let own = ("origin", "http://localhost:8080");
        assert_eq!(verdict(&local, &[host, own, ("origin", "http://evil.example")]), 403);
        let listed = access(&["https://chat.example", "app://x"], true, None);
        assert_eq!(verdict(&listed, &[host, ("origin", "https://chat.example")]), 200);
        assert_eq!(verdict(&listed, &[host, ("origin", "https://chat.example.evil")]), 403);
        assert_eq!(verdict(&listed, &[("host", "chat.example")]), 200, "a proxy keeps the name");
        assert_eq!(verdict(&listed, &[("host", "chat.example.evil")]), 403);
        let all = access(&["*"], true, None);
        assert_eq!(verdict(&all, &[host, ("origin", "https://evil.example")]), 200);
    }

    #[test]
    fn a_key_proves_that_no_foreign_page_asks() {
        let keyed = access(&[], true, Some("k"));
        let foreign = ("origin", "https://evil.example");
        let key = ("authorization", "Bearer k");
        assert_eq!(verdict(&keyed, &[("host", "reef.example"), foreign, key]), 200);
        assert_eq!(verdict(&keyed, &[("host", "localhost"), foreign]), 403);
        let wrong = ("authorization", "Bearer x");
        assert_eq!(verdict(&keyed, &[("host", "localhost"), foreign, wrong]), 403);
        // A keyless server ignores keys, so they prove nothing there.
        assert_eq!(verdict(&access(&[], true, None), &[("host", "localhost"), foreign, key]), 403);
    }

    #[test]
    fn only_origins_are_listed() {
        for wrong in
            ["", "chat.example", "https://", "://x", "https://a/", "https://a/b", "https://a b"]
        {
            assert_eq!(Origins::new([wrong]), Err(OriginsError(wrong.into())), "{wrong}");
        }
        assert!(Origins::new([]).unwrap().cors().is_none());
        assert!(Origins::new(["null"]).unwrap().cors().is_some());
    }
}
