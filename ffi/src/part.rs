//! A part of an object for one thread at a time: whose it is, and how another thread takes it over. See `table`.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::marks;

/// Who may use a part.
#[derive(Default)]
pub(crate) struct Part {
    /// The thread whose it is, as marks call it; 0 for none.
    pub(crate) owner: AtomicU64,
    /// Whether the owner is in a call: one from a signal handler would be the second. Used by the owner alone.
    pub(crate) inside: AtomicBool,
    /// Whether a thread is taking it over.
    moving: AtomicBool,
}

/// Clears `inside`, also when the call panics.
pub(crate) struct Leave<'a>(pub(crate) &'a AtomicBool);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// What marks call a place or a part of it: none of them moves.
pub(crate) fn name<T>(place: &T) -> usize {
    ptr::from_ref(place).addr()
}

impl Part {
    pub(crate) fn reset(&self) {
        self.owner.store(0, Ordering::Relaxed);
        self.inside.store(false, Ordering::Relaxed);
    }

    /// Makes it this thread's, unless a call is at work on it.
    #[cold]
    pub(crate) fn take_over(&self, me: u64) -> bool {
        if self.moving.swap(true, Ordering::AcqRel) {
            return false;
        }
        let before = self.owner.swap(0, Ordering::AcqRel);
        // Either a call's mark is seen here, or the call no longer finds itself to be the owner.
        let unused = marks::unused(name(self));
        self.owner.store(if unused { me } else { before }, Ordering::Release);
        self.moving.store(false, Ordering::Release);
        unused
    }
}
