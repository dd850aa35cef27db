//! Whether the server may listen where it is told to.

use std::net::IpAddr;

use super::Access;

/// A server that others can reach has no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--host {host} can be reached by others and no key is needed: give --api-key or --tenants, or \
     --insecure where something else guards the port"
)]
pub struct ExposureError {
    /// The address it was to listen on.
    pub host: IpAddr,
}

/// Whether `host` is this machine's own loopback.
pub(super) fn is_loopback(host: IpAddr) -> bool {
    host.to_canonical().is_loopback()
}

/// Refuses a `host` that others can reach where no key is needed to generate, unless `insecure`.
///
/// # Errors
/// It is so.
pub fn check_exposure(host: IpAddr, access: &Access, insecure: bool) -> Result<(), ExposureError> {
    match insecure || is_loopback(host) || !access.is_open() {
        true => Ok(()),
        false => Err(ExposureError { host }),
    }
}
