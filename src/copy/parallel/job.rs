//! What one thread does of a copy: its share, and pieces of the rest.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use super::super::{Routine, fence};
use super::pieces::{Pieces, Shares, Span};
use crate::policy::CopyDirection;
use crate::sys::num::usize_of;

/// A copy. The pointers are the caller's, who waits until it is done.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) routine: &'static Routine,
    pub(super) device: *mut u8,
    pub(super) host: *mut u8,
    pub(super) len: usize,
    /// What each thread has for itself, the caller the first; only where all of them are awake.
    pub(super) shares: Option<Shares>,
    /// For how many threads it is cut up, the caller among them.
    pub(super) threads: u32,
    pub(super) direction: CopyDirection,
    /// Those whom it is cut up for are all awake.
    pub(super) is_prompt: bool,
}

impl Job {
    /// The part of thread `n`, the caller being 0, and then pieces of what is left until there are none.
    ///
    /// # Safety
    ///
    /// The routine is available; the device bytes, and the whole lines around them, are mapped; the host bytes are
    /// readable, for a load writable and no other thread's; and all of that until this returns. No other thread is `n`.
    #[inline]
    pub(super) unsafe fn run(&self, n: usize, next: &AtomicU32) {
        let threads = usize_of(u64::from(self.threads));
        let span = Span::new(self.device.addr(), self.len);
        let pieces = match self.shares {
            Some(shares) => {
                // SAFETY: the caller's duty, and shares do not overlap.
                unsafe { self.copy(shares.range(span, n)) };
                let Some(line) = shares.rest(span, threads) else { return };
                Pieces::rest(span, line, threads, self.direction)
            }
            None => Pieces::whole(span, threads, self.direction),
        };
        // Where there is one for each thread, and all are there, a worker takes no second.
        let is_once = n > 0 && self.is_prompt && self.shares.is_none() && pieces.are_shares();
        // What the pieces hold is ordered by the opening and the end of the copy.
        while let Some(range) = pieces.range(next.fetch_add(1, Ordering::Relaxed)) {
            let is_last = range.end == self.len;
            // SAFETY: the caller's duty; this thread alone took the piece, and pieces do not overlap.
            unsafe { self.copy(range) };
            if is_last || is_once {
                return;
            }
        }
    }

    /// The share that another thread did not come for.
    ///
    /// # Safety
    ///
    /// As for [`run`](Self::run).
    #[cold]
    pub(super) unsafe fn stand_in(&self, n: usize) {
        if let Some(shares) = self.shares {
            let span = Span::new(self.device.addr(), self.len);
            // SAFETY: the caller's duty, and shares do not overlap.
            unsafe { self.copy(shares.range(span, n)) };
        }
    }

    /// Copies a part.
    ///
    /// # Safety
    ///
    /// As for [`run`](Self::run); no other thread copies these bytes.
    #[inline]
    unsafe fn copy(&self, range: Range<usize>) {
        let (device, host) = (self.device.wrapping_add(range.start), self.host.wrapping_add(range.start));
        match self.direction {
            CopyDirection::HostToDevice => {
                // SAFETY: a part of the range that the caller vouches for.
                let from = unsafe { std::slice::from_raw_parts(host, range.len()) };
                // SAFETY: as above.
                unsafe { self.routine.store(device, from) };
            }
            CopyDirection::DeviceToHost => {
                // SAFETY: as above; these bytes are this thread's alone.
                let to = unsafe { std::slice::from_raw_parts_mut(host, range.len()) };
                // SAFETY: as above.
                unsafe { self.routine.load(to, device) };
            }
        }
    }

    /// What makes this core's part a part of the copy when it says that it is done.
    #[inline]
    pub(super) fn fence(&self) {
        match self.direction {
            // What the caller writes then is seen after these bytes.
            CopyDirection::HostToDevice => fence::store(),
            CopyDirection::DeviceToHost => fence::load(),
        }
    }
}
