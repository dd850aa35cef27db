//! Keys, as their hashes.

use std::fmt;

use axum::http::{HeaderMap, header};
use constant_time_eq::constant_time_eq_32;
use sha2::{Digest, Sha256};

/// Characters of a key at most.
const KEY_CHARS_MAX: usize = 512;

/// A key's SHA-256: what is compared, in constant time, and all that is kept. SHA-256 because people have
/// `sha256sum`; a slow hash is for passwords, and keys are to be random.
#[derive(Clone, Copy)]
pub struct Key([u8; 32]);

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        constant_time_eq_32(&self.0, &other.0)
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key(..)")
    }
}

/// Why a text is no key. It does not repeat the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Nothing in it.
    #[error("the key is empty: give one, for example of `openssl rand -hex 32`")]
    Empty,
    /// Too long to be sent in a header with everything else.
    #[error("the key has {0} characters: give at most {KEY_CHARS_MAX}")]
    Long(usize),
    /// Not what a header can carry.
    #[error("the key has a space, a control or a non-ASCII character: give visible ASCII only")]
    Characters,
    /// Not a SHA-256.
    #[error(
        "the hash is not 64 hexadecimal digits: give the output of `printf %s KEY | sha256sum`"
    )]
    Hash,
}

impl Key {
    /// From the key itself.
    ///
    /// # Errors
    /// No client could send it.
    pub fn new(key: &str) -> Result<Key, KeyError> {
        match key.len() {
            0 => Err(KeyError::Empty),
            _ if !key.bytes().all(|byte| byte.is_ascii_graphic()) => Err(KeyError::Characters),
            characters if characters > KEY_CHARS_MAX => Err(KeyError::Long(characters)),
            _ => Ok(Key::of(key.as_bytes())),
        }
    }

    /// From its SHA-256 in hexadecimal.
    ///
    /// # Errors
    /// It is none.
    pub fn from_sha256(hash: &str) -> Result<Key, KeyError> {
        if hash.len() != 64 || !hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(KeyError::Hash);
        }
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(hash.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| KeyError::Hash)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| KeyError::Hash)?;
        }
        Ok(Key(bytes))
    }

    fn of(bytes: &[u8]) -> Key {
        Key(Sha256::digest(bytes).into())
    }
}

/// The key in `Authorization: Bearer` or, where there is no such header, in `x-api-key`. Several values are
/// as good as none: which one counts would depend on who reads it.
pub(super) fn presented(headers: &HeaderMap) -> Option<Key> {
    let only = |name: &str| {
        let mut values = headers.get_all(name).iter();
        values.next().filter(|_| values.next().is_none())
    };
    let bearer = only(header::AUTHORIZATION.as_str()).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
    });
    let key = bearer.or_else(|| only("x-api-key").map(|value| value.as_bytes().trim_ascii()))?;
    (!key.is_empty()).then(|| Key::of(key))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn a_key_is_its_hash() {
        let key = Key::new("secret").unwrap();
        let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
        assert_eq!(Key::from_sha256(hash), Ok(key));
        assert_eq!(Key::from_sha256(&hash.to_uppercase()), Ok(key));
        assert_ne!(Key::new("secres").unwrap(), key);
        assert_eq!(format!("{key:?}"), "Key(..)");
    }

    #[test]
    fn what_no_header_can_carry_is_refused() {
        assert_eq!(Key::new(""), Err(KeyError::Empty));
        assert_eq!(Key::new(&"k".repeat(513)), Err(KeyError::Long(513)));
        for wrong in ["a b", "a\n", "kéy", "a\u{7f}"] {
            assert_eq!(Key::new(wrong), Err(KeyError::Characters), "{wrong:?}");
        }
        let digits = "é".repeat(32);
        for wrong in ["", "abc", &"g".repeat(64), &"+".repeat(64), &digits] {
            assert_eq!(Key::from_sha256(wrong), Err(KeyError::Hash), "{wrong:?}");
        }
    }

    #[test]
    fn both_headers_are_read_and_doubt_is_none() {
        let key = Key::new("k1").ok();
        assert_eq!(presented(&headers(&[("authorization", "Bearer k1")])), key);
        assert_eq!(presented(&headers(&[("authorization", "bearer  k1 ")])), key);
        assert_eq!(presented(&headers(&[("x-api-key", "k1")])), key);
        // A proxy's own authorization does not hide ours.
        let both = [("authorization", "Basic dTpw"), ("x-api-key", "k1")];
        assert_eq!(presented(&headers(&both)), key);
        let both = [("authorization", "Bearer k1"), ("x-api-key", "k2")];
        assert_eq!(presented(&headers(&both)), key);
        let twice = [("authorization", "Bearer k1"), ("authorization", "Bearer k2")];
        assert_eq!(presented(&headers(&twice)), None);
        for none in [("authorization", "Bearer "), ("authorization", "Bearer"), ("x-api-key", " ")]
        {
            assert_eq!(presented(&headers(&[none])), None, "{none:?}");
        }
        assert_eq!(presented(&HeaderMap::new()), None);
    }
}
