//! Reads into memory that the kernel does not reach: in pieces through memory inside the agent, which the CPU copies out while
//! the kernel pushes the next.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use crate::copy;

/// The most that one piece is, and how many are under way at once.
pub(super) const MOST: usize = 128 << 10;
pub(super) const SLOTS: usize = 8;
/// A piece keeps its source's place in a line of 64 bytes, so that the kernel has nothing to shift.
pub(super) const SLOT: usize = MOST + LINE;

const LINE: usize = 64;
/// Bytes between two bursts of prefetches.
const STEP: usize = 1 << 10;

/// How such reads are cut up, and how pieces are copied out.
///
/// The first piece is small, for nothing is copied out before it is there. The following ones grow: each has an answer of its
/// own, which costs the kernel a fence, and the CPU copies more slowly than the kernel pushes, so that a larger piece arrives
/// while the one before is copied.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounce {
    /// Bytes of the first piece, 4 KiB to 128 KiB.
    pub first: usize,
    /// Each of the others in percent of the one before, at least 100.
    pub growth: usize,
    /// How the CPU copies.
    pub drain: Drain,
}

/// How the CPU copies bytes out that the GPU has just written.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drain {
    /// As `memcpy` does.
    Plain,
    /// With the widest loads and stores there are, a line at a time.
    Lines,
    /// As `memcpy` does, with lines asked for so many bytes ahead.
    Prefetch(usize),
}

impl Default for Bounce {
    fn default() -> Self {
        Self { first: 16 << 10, growth: 150, drain: Drain::Plain }
    }
}

impl Bounce {
    pub(super) fn pieces(self, len: usize) -> Pieces {
        let first = self.first.clamp(4 << 10, MOST).next_multiple_of(LINE);
        Pieces { start: 0, len, next: first, growth: self.growth.max(100), least: first / 2 }
    }
}

/// Pieces one after the other: where each begins, and its length. All begin at multiples of a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    start: usize,
    len: usize,
    next: usize,
    growth: usize,
    /// Less than this is no piece of its own.
    least: usize,
}

impl Iterator for Pieces {
    type Item = (usize, usize);

    #[inline]
    fn next(&mut self) -> Option<(usize, usize)> {
        let (start, left) = (self.start, self.len - self.start);
        if left == 0 {
            return None;
        }
        let is_last = left <= self.next || (left - self.next < self.least && left <= MOST);
        let bytes = if is_last { left } else { self.next };
        self.start += bytes;
        self.next = (self.next * self.growth / 100).next_multiple_of(LINE).min(MOST);
        Some((start, bytes))
    }
}

impl Drain {
    /// Copies out.
    ///
    /// # Safety
    ///
    /// Whole lines around as many bytes as `to` has are readable at `from`, which nobody writes meanwhile.
    #[inline]
    pub(super) unsafe fn run(self, to: &mut [u8], from: *const u8) {
        match self {
            // SAFETY: the caller's duty; `to` is a slice of its own.
            Self::Plain => unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) },
            // SAFETY: as above, and a preferred routine is available.
            Self::Lines => unsafe { copy::preferred().load(to, from) },
            // SAFETY: the caller's duty.
            Self::Prefetch(ahead) => unsafe { prefetched(to, from, ahead) },
        }
    }
}

/// # Safety
///
/// As [`Drain::run`].
unsafe fn prefetched(to: &mut [u8], from: *const u8, ahead: usize) {
    let len = to.len();
    let fetch = |start: usize, end: usize| {
        for at in (start..end.min(len)).step_by(LINE) {
            // SAFETY: a prefetch reads nothing that a program sees, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at).cast()) };
        }
    };
    fetch(0, ahead);
    for (n, step) in to.chunks_mut(STEP).enumerate() {
        let start = n * STEP;
        fetch(start + ahead, start + ahead + STEP);
        // SAFETY: the caller's duty; `step` is a slice of its own.
        unsafe { step.as_mut_ptr().copy_from_nonoverlapping(from.wrapping_add(start), step.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(bounce: Bounce, len: usize) -> Vec<usize> {
        let pieces: Vec<_> = bounce.pieces(len).collect();
        let mut next = 0;
        for &(start, bytes) in &pieces {
            assert!(start == next && start % LINE == 0 && (1..=MOST).contains(&bytes), "{pieces:?}");
            next += bytes;
        }
        assert_eq!(next, len);
        pieces.into_iter().map(|(_, bytes)| bytes).collect()
    }

    #[test]
    fn pieces_grow_and_leave_no_crumb() {
        let kib = |first: usize, growth, len: usize| {
            let bounce = Bounce { first: first << 10, growth, drain: Drain::Plain };
            sizes(bounce, len << 10).into_iter().map(|bytes| bytes >> 10).collect::<Vec<_>>()
        };
        assert_eq!(kib(16, 150, 64), [16, 24, 24]);
        assert_eq!(kib(16, 150, 16), [16]);
        assert_eq!(kib(16, 150, 23), [23], "7 more are no piece");
        assert_eq!(kib(16, 150, 24), [16, 8]);
        assert_eq!(kib(8, 100, 32), [8; 4]);
        assert_eq!(kib(32, 200, 512), [32, 64, 128, 128, 128, 32]);
        assert_eq!(kib(128, 100, 300), [128, 128, 44]);
        assert_eq!(kib(1, 0, 9), [4, 5]);
        for len in (1..5000).chain([131_071, 131_072, 131_073, 1 << 20, (1 << 20) + 1]) {
            sizes(Bounce::default(), len);
            sizes(Bounce { first: usize::MAX / 2, growth: 1000, drain: Drain::Plain }, len);
        }
    }

    #[test]
    fn every_drain_copies_right() {
        #[repr(align(64))]
        struct Lines([u8; 8192 + 64]);
        let mut from = Lines([0; 8192 + 64]);
        for (n, byte) in from.0.iter_mut().enumerate() {
            *byte = u8::try_from(n * 7 % 251).unwrap();
        }
        for drain in [Drain::Plain, Drain::Lines, Drain::Prefetch(0), Drain::Prefetch(2048), Drain::Prefetch(1 << 20)] {
            for (at, bytes) in [(0, 0), (0, 8192), (1, 8191), (63, 1), (17, 1024), (5, 1025), (40, 4097)] {
                let mut to = vec![0; bytes + 2];
                // SAFETY: whole lines around the bytes are in `from`.
                unsafe { drain.run(&mut to[1..=bytes], from.0.as_ptr().wrapping_add(at)) };
                assert!(
                    to[1..=bytes] == from.0[at..at + bytes] && to[0] == 0 && to[bytes + 1] == 0,
                    "{drain:?} {bytes}"
                );
            }
        }
    }
}
