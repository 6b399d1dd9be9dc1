//! Ctrl-C: the run stops after the call in progress and reports what it has. A second one ends the process at once.

#![allow(unsafe_code, reason = "installs a signal handler")]

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use super::fail::Failure;

static REQUESTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: libc::c_int) {
    REQUESTED.store(true, Ordering::Relaxed);
}

#[allow(clippy::as_conversions, reason = "sigaction takes a handler's address as an integer")]
fn handler() -> usize {
    note as extern "C" fn(libc::c_int) as usize
}

/// From now on SIGINT and SIGTERM are noted once each; the next one has its usual effect. A signal that is ignored, as
/// SIGINT is in a shell's background job, stays ignored.
pub fn catch() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: sigaction is plain data; all zeros is the default action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `action` is live; a null new action only asks for the present one.
        if unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) } != 0 || action.sa_sigaction == libc::SIG_IGN
        {
            continue;
        }
        action.sa_sigaction = handler();
        // No SA_RESTART: a write that hangs on a full pipe is to end, too.
        action.sa_flags = libc::SA_RESETHAND;
        // SAFETY: `action` is live and its handler stores one atomic flag, which a signal handler may.
        unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
    }
}

/// Gives both signals their usual effect again: for work of which no part is of use.
pub fn release() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: as in `catch`; the default action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: as in `catch`.
        if unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) } != 0 || action.sa_sigaction != handler() {
            continue;
        }
        action.sa_sigaction = libc::SIG_DFL;
        // SAFETY: as in `catch`.
        unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
    }
}

/// Whether the user asked for an end.
#[inline]
#[must_use]
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// For the `?` between two measurements.
///
/// # Errors
///
/// [`Failure::Interrupted`] once the user asked for an end.
pub fn check() -> Result<(), Failure> {
    if requested() { Err(Failure::Interrupted) } else { Ok(()) }
}
