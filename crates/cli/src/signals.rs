//! Ctrl-C asks a generation to end; a second one, or one while none is running, ends the process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;

use crate::output;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static RUNNING: AtomicBool = AtomicBool::new(false);
static INSTALLED: OnceLock<Result<(), String>> = OnceLock::new();

/// What shells report for a process that Ctrl-C ended: 128 + SIGINT.
pub const INTERRUPTED_STATUS: i32 = 130;

/// Takes over Ctrl-C and returns the flag that the first one sets while a generation is
/// [`running`]; look at it between two steps and end with what there is. The second Ctrl-C, or one
/// between two generations, exits at once with [`INTERRUPTED_STATUS`].
/// Calling it again is harmless. Commands that never call it are ended by the first Ctrl-C.
pub fn install() -> anyhow::Result<&'static AtomicBool> {
    let installed =
        INSTALLED.get_or_init(|| ctrlc::set_handler(on_interrupt).map_err(|e| e.to_string()));
    installed.clone().map_err(anyhow::Error::msg).context("cannot take over Ctrl-C")?;
    Ok(&INTERRUPTED)
}

/// While it lives, the first Ctrl-C asks instead of ending the process.
pub struct Running;

/// A generation begins that nobody has asked to end yet.
pub fn running() -> Running {
    INTERRUPTED.store(false, Ordering::SeqCst);
    RUNNING.store(true, Ordering::SeqCst);
    Running
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.store(false, Ordering::SeqCst);
    }
}

fn on_interrupt() {
    if !RUNNING.load(Ordering::SeqCst) || INTERRUPTED.swap(true, Ordering::SeqCst) {
        std::process::exit(INTERRUPTED_STATUS);
    }
    output::note("\nstopping after this step (Ctrl-C again: at once)");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installing_twice_gives_the_same_flag() {
        let first = install().unwrap();
        assert!(std::ptr::eq(first, install().unwrap()));
        assert!(!first.load(Ordering::SeqCst));
    }
}
