//! How many files, and so connections, the system lets us have open.

/// Descriptors kept for the model, the spill file, KV events and the like.
const KEPT: u64 = 64;

/// Raises the soft limit of open files to the hard one, as Go programs do: a shell's 1,024 is a leftover
/// of `select`. Returns how many connections fit, where the system tells.
#[cfg(unix)]
pub(super) fn connections() -> Option<usize> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let soft = limit.current;
        limit.current = limit.maximum;
        if setrlimit(Resource::Nofile, limit).is_err() {
            limit.current = soft;
        }
    }
    let files = limit.current?;
    usize::try_from(files.saturating_sub(KEPT).max(1)).ok()
}

/// Unknown here.
#[cfg(not(unix))]
pub(super) fn connections() -> Option<usize> {
    None
}
