//! The file of `--tenants`: who there is, and what each may take.

use std::collections::HashSet;
use std::fmt;

use reef_kv::Fidelity;
use serde::Deserialize;
use serde::de::{SeqAccess, Visitor};

use super::key::{Key, KeyError};
use crate::sizes;

/// Whom keyless callers, `--api-key` and the admin act for unless they say otherwise.
pub(super) const DEFAULT_TENANT: &str = "default";
/// Tenants at most: each takes room in metrics, and its key is compared with each request's.
const TENANTS_MAX: usize = 1024;
/// Characters of a name or a salt at most.
const TEXT_MAX: usize = 128;

/// What is wrong with the tenants.
#[derive(Debug, thiserror::Error)]
pub enum TenantsError {
    /// The file is no TOML, or has a key that means nothing, or a value of the wrong kind.
    #[error("line {line}: {message}")]
    Syntax {
        /// From 1.
        line: usize,
        /// Without the line itself, which may have a secret in it.
        message: String,
    },
    /// A value that cannot be.
    #[error("{0}")]
    Wrong(String),
}

/// A tenant: its keys and its bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantRules {
    /// Unique.
    pub name: String,
    /// Any of them will do: two while one is being replaced. None: only the admin can act for it.
    pub keys: Vec<Key>,
    /// Share of compute against the others'.
    pub weight: f64,
    /// Most bytes of KV pages that its requests hold.
    pub quota_bytes: Option<usize>,
    /// Those with equal salts find each other's prefixes.
    salt: Vec<u8>,
    /// Highest priority that it may ask for. Below 0: batch work only.
    pub max_priority: i32,
    /// The contract that it may ask for at most.
    pub strictest_fidelity: Fidelity,
    /// What is never undercut, whatever it asks for.
    pub loosest_fidelity: Fidelity,
}

impl TenantRules {
    /// A tenant without keys or bounds.
    pub fn named(name: &str) -> TenantRules {
        TenantRules {
            name: name.into(),
            keys: Vec::new(),
            weight: 1.0,
            quota_bytes: None,
            salt: salt_of_name(name),
            max_priority: i32::MAX,
            strictest_fidelity: Fidelity::Exact,
            loosest_fidelity: Fidelity::Evict,
        }
    }

    pub(super) fn engine_tenant(&self) -> reef_engine::Tenant {
        let (weight, quota_bytes) = (self.weight, self.quota_bytes);
        let (name, salt) = (self.name.clone(), self.salt.clone());
        reef_engine::Tenant { name, weight, quota_bytes, salt }
    }
}

/// By default each tenant has prefixes of its own. The salt keeps equal texts of two tenants apart; it is no
/// secret and need not be one, since block hashes are told to nobody but the admin: so it is derived
/// from the name and stays the same over restarts. The default tenant has none.
fn salt_of_name(name: &str) -> Vec<u8> {
    match name {
        DEFAULT_TENANT => Vec::new(),
        _ => blake3::derive_key("reef 2026 prefix salt of a tenant's name", name.as_bytes()).into(),
    }
}

/// Tenants that name the same salt share prefixes; no name's own salt equals a named one.
fn salt_of_text(salt: &str) -> Vec<u8> {
    blake3::derive_key("reef 2026 prefix salt given in a file", salt.as_bytes()).into()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenant: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(default)]
    key: Texts,
    #[serde(default)]
    key_env: Texts,
    #[serde(default)]
    key_sha256: Texts,
    weight: Option<f64>,
    kv_quota: Option<String>,
    salt: Option<String>,
    max_priority: Option<i32>,
    strictest_fidelity: Option<String>,
    loosest_fidelity: Option<String>,
}

/// One text or several.
#[derive(Default)]
struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Texts, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Texts;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or a list of strings")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts(vec![text.into()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut texts: A) -> Result<Texts, A::Error> {
                let mut all = Vec::new();
                while let Some(text) = texts.next_element()? {
                    all.push(text);
                }
                Ok(Texts(all))
            }
        }
        deserializer.deserialize_any(Read)
    }
}

/// Reads the file of `--tenants`; `environment` looks up the variables that `key_env` names.
///
/// # Errors
/// One line that names the tenant, the key and the mend; never a secret.
pub fn parse_tenants(
    text: &str,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<Vec<TenantRules>, TenantsError> {
    let file: File = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let message = error.message().replace('\n', "; ");
        TenantsError::Syntax { line: before.matches('\n').count() + 1, message }
    })?;
    if file.tenant.is_empty() || file.tenant.len() > TENANTS_MAX {
        let tenants = file.tenant.len();
        return Err(TenantsError::Wrong(format!(
            "the file has {tenants} tenants: give 1 to {TENANTS_MAX}, each as [[tenant]]"
        )));
    }
    let mut names = HashSet::new();
    let mut tenants = Vec::new();
    for entry in file.tenant {
        let rules = entry.rules(&environment)?;
        if !names.insert(rules.name.clone()) {
            let name = rules.name;
            return Err(TenantsError::Wrong(format!(
                "two tenants are called `{name}`: rename one"
            )));
        }
        tenants.push(rules);
    }
    Ok(tenants)
}

impl Entry {
    fn rules(
        self,
        environment: &impl Fn(&str) -> Option<String>,
    ) -> Result<TenantRules, TenantsError> {
        let shown: String = self.name.chars().take(TEXT_MAX).collect();
        let wrong = |what: String| TenantsError::Wrong(format!("tenant `{shown}`: {what}"));
        check_text("name", &self.name).map_err(wrong)?;
        let keys = self.keys(environment).map_err(wrong)?;
        let weight = self.weight.unwrap_or(1.0);
        if !(1e-3..=1e6).contains(&weight) {
            return Err(wrong(format!("weight is {weight}: give 0.001 to 1000000")));
        }
        let quota = self.kv_quota.as_deref().map(quota).transpose().map_err(wrong)?;
        if let Some(salt) = &self.salt {
            check_text("salt", salt).map_err(wrong)?;
        }
        let strictest = contract("strictest_fidelity", &self.strictest_fidelity).map_err(wrong)?;
        let loosest = contract("loosest_fidelity", &self.loosest_fidelity).map_err(wrong)?;
        let strictest_fidelity = strictest.unwrap_or(Fidelity::Exact);
        let loosest_fidelity = loosest.unwrap_or(Fidelity::Evict);
        if strictest_fidelity > loosest_fidelity {
            let (strictest, loosest) = (strictest_fidelity.name(), loosest_fidelity.name());
            return Err(wrong(format!(
                "strictest_fidelity is {strictest} and loosest_fidelity {loosest}: nothing is between \
                 them; the order is exact, int8, int4, evict"
            )));
        }
        let name = TenantRules::named(&self.name);
        let salt = self.salt.map_or(name.salt.clone(), |salt| salt_of_text(&salt));
        let max_priority = self.max_priority.unwrap_or(i32::MAX);
        let (quota_bytes, rest) = (quota, name);
        Ok(TenantRules {
            keys,
            weight,
            quota_bytes,
            salt,
            max_priority,
            strictest_fidelity,
            loosest_fidelity,
            ..rest
        })
    }

    fn keys(&self, environment: impl Fn(&str) -> Option<String>) -> Result<Vec<Key>, String> {
        let named = |field: &'static str| move |error: KeyError| format!("{field}: {error}");
        let mut keys = Vec::new();
        for key in &self.key.0 {
            keys.push(Key::new(key).map_err(named("key"))?);
        }
        for variable in &self.key_env.0 {
            let key = environment(variable)
                .ok_or_else(|| format!("key_env: the variable `{variable}` is not set: set it"))?;
            keys.push(Key::new(&key).map_err(named("key_env"))?);
        }
        for hash in &self.key_sha256.0 {
            keys.push(Key::from_sha256(hash).map_err(named("key_sha256"))?);
        }
        Ok(keys)
    }
}

fn quota(text: &str) -> Result<usize, String> {
    let bytes = sizes::parse(text).map_err(|error| format!("kv_quota: {error}"))?;
    match usize::try_from(bytes) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(format!("kv_quota is {text}: give more than 0 that fits in memory")),
    }
}

fn contract(field: &str, name: &Option<String>) -> Result<Option<Fidelity>, String> {
    let parsed = name.as_deref().map(str::parse::<Fidelity>).transpose();
    parsed.map_err(|error| format!("{field}: {error}"))
}

/// Names stand in metrics and logs: short, visible, no quotes.
fn check_text(field: &str, text: &str) -> Result<(), String> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@/".contains(&byte);
    if (1..=TEXT_MAX).contains(&text.len()) && text.bytes().all(good) {
        return Ok(());
    }
    Err(format!("the {field} must have 1 to {TEXT_MAX} characters of a-z A-Z 0-9 - _ . : @ /"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<TenantRules>, String> {
        let environment = |name: &str| (name == "BOB_KEY").then(|| "bob-secret".to_string());
        parse_tenants(text, environment).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_is_read_whole() {
        let tenants = parse(
            r#"
            [[tenant]]
            name = "alice"
            key = ["alice-1", "alice-2"]
            weight = 2
            kv_quota = "64MiB"
            max_priority = 5
            strictest_fidelity = "int8"
            loosest_fidelity = "int4"
            [[tenant]]
            name = "bob"
            key_env = "BOB_KEY"
            key_sha256 = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
            salt = "shared"
            "#,
        );
        let [alice, bob] = <[TenantRules; 2]>::try_from(tenants.unwrap()).unwrap();
        let key = |text| Key::new(text).unwrap();
        assert_eq!(alice.keys, [key("alice-1"), key("alice-2")]);
        assert_eq!((alice.weight, alice.quota_bytes, alice.max_priority), (2.0, Some(64 << 20), 5));
        assert_eq!(alice.strictest_fidelity, Fidelity::Int8);
        assert_eq!(alice.loosest_fidelity, Fidelity::Int4);
        assert_eq!(bob.keys, [key("bob-secret"), key("secret")]);
        assert_eq!((bob.weight, bob.quota_bytes, bob.max_priority), (1.0, None, i32::MAX));
    }

    #[test]
    fn salts_differ_unless_they_are_named_alike() {
        let entry = |name, salt: &str| {
            let text = format!("[[tenant]]\nname = \"{name}\"\n{salt}");
            parse(&text).unwrap().remove(0).engine_tenant().salt
        };
        let (alice, bob) = (entry("alice", ""), entry("bob", ""));
        assert_ne!(alice, bob);
        assert_eq!(alice, entry("alice", ""), "stays over restarts");
        assert!(!alice.is_empty());
        // Nobody gets alice's prefixes by naming her.
        assert_ne!(entry("mallory", "salt = \"alice\""), alice);
        assert_eq!(entry("a", "salt = \"team\""), entry("b", "salt = \"team\""));
        assert_eq!(entry("default", ""), Vec::<u8>::new());
        // The engine's own default tenant is the same.
        assert_eq!(reef_engine::Tenant::default().salt, Vec::<u8>::new());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_tenant_and_without_secrets() {
        let secret = "topsecret";
        let cases = [
            ("", "0 tenants"),
            ("[[tenant]]\nname = \"a\"\nquota = \"1MiB\"", "unknown field `quota`"),
            ("[[tenants]]\nname = \"a\"", "unknown field `tenants`"),
            ("[[tenant]]\nkey = \"a\"", "missing field `name`"),
            ("[[tenant]]\nname = \"a\"\nkey = 1", "a string or a list of strings"),
            ("[[tenant]]\nname = \"a b\"", "the name must"),
            ("[[tenant]]\nname = \"a\"\nsalt = \"\"", "tenant `a`: the salt must"),
            ("[[tenant]]\nname = \"a\"\nweight = 0", "weight is 0"),
            ("[[tenant]]\nname = \"a\"\nweight = nan", "weight is NaN"),
            ("[[tenant]]\nname = \"a\"\nkv_quota = \"5\u{a0}MB\"", "kv_quota: `5"),
            ("[[tenant]]\nname = \"a\"\nkv_quota = \"0\"", "kv_quota is 0"),
            ("[[tenant]]\nname = \"a\"\nstrictest_fidelity = \"high\"", "strictest_fidelity: "),
            (
                "[[tenant]]\nname = \"a\"\nstrictest_fidelity = \"evict\"\nloosest_fidelity = \"int8\"",
                "nothing is between",
            ),
            ("[[tenant]]\nname = \"a\"\nkey_env = \"NOT_SET\"", "`NOT_SET` is not set"),
            ("[[tenant]]\nname = \"a\"\nkey_sha256 = \"abc\"", "key_sha256: the hash is not 64"),
            ("[[tenant]]\nname = \"a\"\nkey = \"topsecret\\u0001\"", "key: the key has a space"),
            ("[[tenant]]\nname = \"a\"\nkey = \"topsecret\u{1}\"", "line 3: "),
            ("[[tenant]]\nname = \"a\"\nkey = topsecret", "line 3: "),
            ("[[tenant]]\nname = \"a\"\n[[tenant]]\nname = \"a\"", "two tenants are called `a`"),
        ];
        for (text, expected) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n'), "{text:?}: {error}");
            assert!(!error.contains(secret), "{error}");
        }
    }
}
