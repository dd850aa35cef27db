//! Reef's request headers, for clients that cannot add fields to bodies.

use axum::http::HeaderMap;

use crate::error::ApiError;
use crate::types::kv::KvFields;

/// Reads `X-Reef-Fidelity`, `X-Reef-Priority`, `X-Reef-Deadline-Ms` and `X-Reef-Tenant`; what is absent is
/// `None`. The body's `kv` wins.
///
/// # Errors
/// 400 naming the header and what it may be.
pub fn kv_headers(headers: &HeaderMap) -> Result<KvFields, ApiError> {
    Ok(KvFields {
        fidelity: text(headers, "x-reef-fidelity")?.map(str::to_string),
        priority: number(headers, "x-reef-priority")?,
        deadline_ms: number(headers, "x-reef-deadline-ms")?,
        tenant: text(headers, "x-reef-tenant")?.map(str::to_string),
        ..KvFields::default()
    })
}

/// The header's only value; an empty one is as good as none.
fn text<'h>(headers: &'h HeaderMap, name: &'static str) -> Result<Option<&'h str>, ApiError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(ApiError::invalid(name, format!("{name} is given twice: give it once")));
    }
    let text = value.to_str().map_err(|_| {
        ApiError::invalid(name, format!("{name} has characters that are not visible ASCII"))
    })?;
    Ok(Some(text.trim()).filter(|text| !text.is_empty()))
}

fn number<T: std::str::FromStr>(
    headers: &HeaderMap,
    name: &'static str,
) -> Result<Option<T>, ApiError> {
    let Some(text) = text(headers, name)? else { return Ok(None) };
    let number = text.parse().map_err(|_| {
        let shown: String = text.chars().take(32).collect();
        ApiError::invalid(name, format!("{name} is `{shown}`: give a whole number"))
    })?;
    Ok(Some(number))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn read(pairs: &[(&'static str, &[u8])]) -> Result<KvFields, ApiError> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_bytes(value).unwrap());
        }
        kv_headers(&headers)
    }

    #[test]
    fn headers_say_what_the_field_says() {
        let fields = read(&[
            ("x-reef-fidelity", b" int8 "),
            ("x-reef-priority", b"-3"),
            ("x-reef-deadline-ms", b"1500"),
            ("x-reef-tenant", b"alice"),
        ])
        .unwrap();
        assert_eq!(fields.fidelity.as_deref(), Some("int8"));
        assert_eq!((fields.priority, fields.deadline_ms), (Some(-3), Some(1500)));
        assert_eq!(fields.tenant.as_deref(), Some("alice"));
        assert!(fields.keep.is_none());
        let none = read(&[("x-reef-priority", b"")]).unwrap();
        assert_eq!((none.priority, none.tenant), (None, None));
    }

    #[test]
    fn nonsense_names_its_header() {
        for (name, value) in [
            ("x-reef-priority", &b"high"[..]),
            ("x-reef-priority", b"1e9"),
            ("x-reef-priority", b"99999999999"),
            ("x-reef-deadline-ms", b"-1"),
            ("x-reef-fidelity", b"int8\xff"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert_eq!(error.status.as_u16(), 400);
            assert!(error.message.starts_with(name), "{}", error.message);
        }
        let error = read(&[("x-reef-tenant", b"a"), ("x-reef-tenant", b"b")]).unwrap_err();
        assert!(error.message.contains("twice"));
    }
}
