//! One fetch of a thing at a time on this machine.

use std::fs::{File, TryLockError};
use std::path::Path;

use anyhow::Context as _;

use crate::output;

/// Waits until this process alone holds the lock file; it is let go when the returned file is dropped,
/// or when the process dies. The file stays: removing it would let a third process lock another one.
pub fn acquire(path: &Path, thing: &str) -> anyhow::Result<File> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            output::note(&format!("another reef is fetching {thing}; waiting for it"));
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        locked => locked.with_context(|| format!("cannot lock {}", path.display()))?,
    }
    Ok(file)
}
