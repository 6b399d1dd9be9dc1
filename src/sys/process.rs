//! Which process made a handle, checked without a system call.
//!
//! A page that the kernel wipes in every forked child (`MADV_WIPEONFORK`, madvise(2)) holds a value unique to this
//! process. A handle remembers the value; one relaxed load tells a child apart, also after a raw `clone`.

use std::num::NonZeroUsize;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous};

use crate::error::{Error, ErrorKind, Result};

const PAGE: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// 0 in a child that has made no handle of its own.
static MARK: OnceLock<&'static AtomicU64> = OnceLock::new();

extern "C" fn forget_in_child() {
    if let Some(mark) = MARK.get() {
        mark.store(0, Ordering::Relaxed);
    }
}

fn mark() -> &'static AtomicU64 {
    /// Stands in where the page cannot be had; the fork handler resets it.
    static PLAIN: AtomicU64 = AtomicU64::new(0);

    MARK.get_or_init(|| {
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice replaces nothing.
        let page = unsafe { mmap_anonymous(None, PAGE, prot, MapFlags::MAP_PRIVATE) };
        let wiped = page.and_then(|page| {
            // SAFETY: `page` is the whole mapping just made; the advice changes only what a child sees.
            unsafe { madvise(page, PAGE.get(), MmapAdvise::MADV_WIPEONFORK) }.map(|()| page)
        });
        match wiped {
            // SAFETY: the page is mapped read-write, zeroed, aligned, used as this atomic alone, and never unmapped.
            Ok(page) => unsafe { page.cast::<AtomicU64>().as_ref() },
            Err(_) => {
                // Kernels before 4.14: at least fork(3) is seen.
                // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
                let _ = unsafe { libc::pthread_atfork(None, None, Some(forget_in_child)) };
                &PLAIN
            }
        }
    })
}

/// The process that made a handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    mark: &'static AtomicU64,
    id: u64,
}

impl Owner {
    /// The calling process.
    pub(crate) fn here() -> Self {
        let mark = mark();
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
        // The clock keeps a recycled pid from looking like an ancestor.
        let fresh = u64::from(std::process::id()) << 32 | u64::from(clock | 1);
        let id = match mark.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => fresh,
            Err(present) => present,
        };
        Self { mark, id }
    }

    /// Whether the caller runs in that process. One load and a comparison.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.mark.load(Ordering::Relaxed) == self.id
    }

    #[inline]
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(wrong_process(op)) }
    }
}

#[cold]
pub(crate) fn wrong_process(op: &'static str) -> Error {
    Error::new(op, ErrorKind::WrongProcess, "the handle was made by another process; windows are not inherited on fork")
        .remedy("open a session of its own in this process")
}

/// Fork support for tests: runs `child` in a forked process and returns its exit status.
#[cfg(test)]
pub(crate) fn in_forked_child(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only runs `child` and leaves by _exit, so no destructor of the parent's runs twice.
    match unsafe { libc::fork() } {
        0 => {
            let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: ends the child without running exit handlers.
            unsafe { libc::_exit(i32::from(!fine)) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `status` outlives the call.
            let waited = unsafe { libc::waitpid(pid, &mut status, 0) };
            waited == pid && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_told_apart_and_can_own_handles() {
        let parent = Owner::here();
        assert!(parent.is_here());
        assert!(in_forked_child(|| {
            let before = !parent.is_here() && parent.check("test").is_err();
            let own = Owner::here();
            before && own.is_here() && !parent.is_here()
        }));
        assert!(parent.is_here());
    }
}
