//! Who may do what: keys, tenants, and what needs the admin's.
//!
//! | started with | generation | `/v1/pool`, `/metrics`, KV events |
//! |---|---|---|
//! | no key | anyone who reaches the port | anyone who reaches the port |
//! | `--admin-key` only | anyone who reaches the port | the admin |
//! | `--api-key` or `--tenants` | their keys, and the admin's | the admin, or nobody where there is none |
//!
//! `/health`, `/version` and the page's frame at `/`, which has no data in it, are always open.

mod asker;
mod browser;
mod exposure;
mod headers;
mod key;
mod layers;
mod tenants;

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode};
use reef_kv::Fidelity;

use crate::error::ApiError;

pub use asker::Asker;
pub use browser::{Origins, OriginsError};
pub use exposure::{ExposureError, check_exposure};
pub use headers::kv_headers;
pub use key::{Key, KeyError};
pub use layers::{Routes, protect};
pub use tenants::{TenantRules, TenantsError, parse_tenants};

/// Somebody who asks, after their key was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Index among the engine's tenants.
    pub tenant: usize,
    /// Its name.
    pub tenant_name: Arc<str>,
    /// May see everything, and act for any tenant.
    pub admin: bool,
    /// Presented a key. A browser does not do that for a foreign page.
    pub keyed: bool,
}

/// What the server was started with.
#[derive(Debug, Default)]
pub struct AccessSettings {
    /// Keys of the default tenant.
    pub api_keys: Vec<Key>,
    /// The administrator's.
    pub admin_key: Option<Key>,
    /// The file of `--tenants`.
    pub tenants: Vec<TenantRules>,
    /// Other origins whose pages may use the server.
    pub origins: Origins,
    /// Listens on a loopback address only.
    pub is_loopback: bool,
}

/// Who may do what.
#[derive(Debug)]
pub struct Access {
    keys: Vec<(Key, Holder)>,
    /// The default tenant first.
    tenants: Vec<(Arc<str>, TenantRules)>,
    has_admin_key: bool,
    /// No key is needed to generate.
    is_open: bool,
    is_loopback: bool,
    origins: Origins,
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    tenant: usize,
    admin: bool,
}

impl Default for Access {
    /// Everything is open, on a loopback address.
    fn default() -> Access {
        match Access::new(AccessSettings { is_loopback: true, ..AccessSettings::default() }) {
            Ok(access) => access,
            Err(_) => unreachable!("no keys, so none twice"),
        }
    }
}

impl Access {
    /// The default tenant is the file's of that name, else one without limits; it comes first.
    ///
    /// # Errors
    /// The same key, or the same name, twice.
    pub fn new(settings: AccessSettings) -> Result<Access, TenantsError> {
        let AccessSettings { api_keys, admin_key, tenants, origins, is_loopback } = settings;
        let mut rules = vec![TenantRules::named(tenants::DEFAULT_TENANT)];
        for tenant in tenants {
            match tenant.name == tenants::DEFAULT_TENANT {
                true => rules[0] = tenant,
                false => rules.push(tenant),
            }
        }
        let mut keys = Vec::new();
        let mut add = |key: Key, tenant: usize, admin: bool, whose: &str| {
            if let Some((_, other)) = keys.iter().find(|(known, _): &&(Key, Holder)| *known == key)
            {
                let other: &Holder = other;
                let holder = if other.admin { "the admin" } else { &rules[other.tenant].name };
                return Err(TenantsError::Wrong(format!(
                    "the key of {whose} is also that of `{holder}`: give each its own"
                )));
            }
            keys.push((key, Holder { tenant, admin }));
            Ok(())
        };
        let is_open = api_keys.is_empty() && rules.iter().all(|rules| rules.keys.is_empty());
        let has_admin_key = admin_key.is_some();
        admin_key.into_iter().try_for_each(|key| add(key, 0, true, "--admin-key"))?;
        api_keys.into_iter().try_for_each(|key| add(key, 0, false, "--api-key"))?;
        for (index, tenant) in rules.iter().enumerate() {
            let whose = format!("tenant `{}`", tenant.name);
            tenant.keys.iter().try_for_each(|key| add(*key, index, false, &whose))?;
        }
        let tenants = rules.into_iter().map(|rules| (rules.name.as_str().into(), rules)).collect();
        Ok(Access { keys, tenants, has_admin_key, is_open, is_loopback, origins })
    }

    /// What the engine is to know of the tenants; [`Caller::tenant`] is an index here.
    pub fn engine_tenants(&self) -> Vec<reef_engine::Tenant> {
        self.tenants.iter().map(|(_, rules)| rules.engine_tenant()).collect()
    }

    /// Whether anyone who reaches the port may generate.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Who sent a request with `headers`. A server without keys ignores the ones it is given: clients
    /// insist on sending some.
    ///
    /// # Errors
    /// 401: no key where one is needed, or an unknown one.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        let key = key::presented(headers);
        let holder = key.and_then(|key| self.holder(&key));
        match (holder, key) {
            (Some(Holder { tenant, admin }), _) => Ok(self.caller_of(tenant, admin, true)),
            (None, _) if self.is_open => Ok(self.caller_of(0, !self.has_admin_key, false)),
            (None, None) => Err(unauthorized(
                "no API key was given: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            )),
            (None, Some(_)) => Err(unauthorized("the API key is not known to this server")),
        }
    }

    /// As [`caller`](Access::caller), for what only an administrator may see.
    ///
    /// # Errors
    /// 401 without a known key; 403 with one that is not the admin's.
    pub fn admin(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        let caller = self.caller(headers)?;
        if caller.admin {
            return Ok(caller);
        }
        if !caller.keyed {
            return Err(unauthorized(
                "this needs the admin key: send it as `Authorization: Bearer KEY`",
            ));
        }
        Err(forbidden(match self.has_admin_key {
            true => "this needs the admin key",
            false => {
                "this needs an admin key, and the server was started without one (--admin-key)"
            }
        }))
    }

    fn holder(&self, key: &Key) -> Option<Holder> {
        // All are compared, so that the time does not tell which one was close.
        let matching = |found, (known, holder): &(Key, Holder)| {
            if known == key { Some(*holder) } else { found }
        };
        self.keys.iter().fold(None, matching)
    }

    fn caller_of(&self, tenant: usize, admin: bool, keyed: bool) -> Caller {
        Caller { tenant, tenant_name: self.tenants[tenant].0.clone(), admin, keyed }
    }

    /// The tenant on whose account `caller` asks, where the request names one (`kv.tenant`,
    /// `X-Reef-Tenant`).
    ///
    /// # Errors
    /// 403 for a foreign one unless the caller is the admin or no keys are used; 400 for one that is unknown.
    pub fn tenant(&self, caller: &Caller, named: Option<&str>) -> Result<usize, ApiError> {
        let Some(name) = named.filter(|name| *name != &*caller.tenant_name) else {
            return Ok(caller.tenant);
        };
        if !caller.admin && !self.is_open {
            return Err(ApiError {
                param: Some("kv.tenant".into()),
                ..forbidden("kv.tenant: only the admin may act for another tenant: leave it out")
            });
        }
        let found = self.tenants.iter().position(|(known, _)| **known == *name);
        found.ok_or_else(|| {
            let shown: String = name.chars().take(64).collect();
            ApiError::invalid("kv.tenant", format!("kv.tenant: no tenant is called `{shown}`"))
        })
    }

    /// The contract and the priority of a request of `tenant`, which asks for `fidelity` and `priority` or
    /// leaves them to the server, whose contract is `default`. What is left open is kept within the
    /// tenant's bounds; what is asked for outside of them is refused, for it would not be what was asked for.
    ///
    /// # Errors
    /// 403 naming the field and the bound.
    pub fn permit(
        &self,
        tenant: usize,
        fidelity: Option<Fidelity>,
        default: Fidelity,
        priority: Option<i32>,
    ) -> Result<(Fidelity, i32), ApiError> {
        let rules = &self.tenants[tenant].1;
        let (strictest, loosest) = (rules.strictest_fidelity, rules.loosest_fidelity);
        let within = fidelity.unwrap_or(default).clamp(strictest, loosest);
        if let Some(asked) = fidelity.filter(|&asked| asked != within) {
            return Err(outside("kv.fidelity", rules, asked.name(), within.name()));
        }
        let most = rules.max_priority;
        match priority {
            Some(asked) if asked > most => {
                Err(outside("kv.priority", rules, &asked.to_string(), &most.to_string()))
            }
            asked => Ok((within, asked.unwrap_or(0).min(most))),
        }
    }
}

fn outside(field: &'static str, rules: &TenantRules, asked: &str, bound: &str) -> ApiError {
    let name = &rules.name;
    let message =
        format!("{field} is {asked}, which tenant `{name}` may not ask for: its bound is {bound}");
    ApiError { param: Some(field.into()), ..forbidden(message) }
}

fn unauthorized(message: &str) -> ApiError {
    let error = ApiError::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message);
    ApiError { code: Some("invalid_api_key"), ..error }
}

fn forbidden(message: impl Into<String>) -> ApiError {
    let error = ApiError::new(StatusCode::FORBIDDEN, "permission_error", message);
    ApiError { code: Some("forbidden"), ..error }
}

#[cfg(test)]
mod tests;
