//! Who may use the server, and how much of it a client may take.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use reef_server::access::{
    Access, AccessSettings, Key, Origins, TenantRules, check_exposure, parse_tenants,
};
use reef_server::lifecycle::Limits;

use crate::output::{WrongArguments, note};

/// Keys, tenants, origins, connections.
#[derive(clap::Args, Clone, Debug)]
pub struct AccessArgs {
    /// Key that requests need; may be given several times. Better as REEF_API_KEY: arguments can be seen by
    /// other users of the machine
    #[arg(
        long,
        value_name = "KEY",
        env = "REEF_API_KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    api_key: Vec<String>,
    /// Key for the page's data, /v1/pool, /metrics and KV events; without one they are closed where
    /// requests need a key
    #[arg(long, value_name = "KEY", env = "REEF_ADMIN_KEY", hide_env_values = true)]
    admin_key: Option<String>,
    /// A TOML file of tenants: keys, weights, quotas (see docs/deploy.md)
    #[arg(long, value_name = "FILE", env = "REEF_TENANTS")]
    tenants: Option<PathBuf>,
    /// Listen where others can reach, although no key is needed
    #[arg(long)]
    insecure: bool,
    /// Origins whose pages may use the server from a browser, such as `https://chat.example`; `*`: all
    #[arg(long, value_name = "ORIGIN", env = "REEF_ALLOWED_ORIGINS", value_delimiter = ',')]
    allowed_origins: Vec<String>,
    /// Connections at once at most
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections)]
    max_connections: usize,
    /// How long requests in flight may go on after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().drain_timeout.as_secs())]
    drain_timeout: u64,
}

impl AccessArgs {
    /// Whether something else guards the ports.
    pub fn is_insecure(&self) -> bool {
        self.insecure
    }

    /// Who may do what, of a server that listens on `host`.
    pub fn access(&self, host: IpAddr) -> anyhow::Result<Access> {
        let key = |flag: &'static str| {
            move |key: &String| {
                Key::new(key).map_err(|error| WrongArguments(format!("{flag}: {error}")))
            }
        };
        let api_keys = self.api_key.iter().map(key("--api-key")).collect::<Result<_, _>>()?;
        let admin_key = self.admin_key.as_ref().map(key("--admin-key")).transpose()?;
        let origins = Origins::new(self.allowed_origins.iter().map(String::as_str))
            .map_err(|error| WrongArguments(format!("--allowed-origins: {error}")))?;
        let tenants = self.tenants.as_deref().map_or(Ok(Vec::new()), read_tenants)?;
        let is_loopback = host.to_canonical().is_loopback();
        let settings = AccessSettings { api_keys, admin_key, tenants, origins, is_loopback };
        let access = Access::new(settings).map_err(|error| WrongArguments(error.to_string()))?;
        check_exposure(host, &access, self.insecure)
            .map_err(|error| WrongArguments(error.to_string()))?;
        Ok(access)
    }

    /// What clients may take.
    pub fn limits(&self) -> Limits {
        let drain_timeout = Duration::from_secs(self.drain_timeout.min(86_400));
        Limits { connections: self.max_connections.max(1), drain_timeout, ..Limits::default() }
    }
}

fn read_tenants(path: &Path) -> anyhow::Result<Vec<TenantRules>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read --tenants {}", path.display()))?;
    warn_if_others_read(path);
    let tenants = parse_tenants(&text, |name| std::env::var(name).ok());
    Ok(tenants.map_err(|error| WrongArguments(format!("--tenants {}: {error}", path.display())))?)
}

/// A file with keys is nobody else's.
fn warn_if_others_read(path: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let shown = path.display();
        if std::fs::metadata(path).is_ok_and(|file| file.mode() & 0o007 != 0) {
            note(&format!("warning: every user of this machine may read {shown}: chmod o-rwx it"));
        }
    }
    #[cfg(not(unix))]
    let _ = path;
}
