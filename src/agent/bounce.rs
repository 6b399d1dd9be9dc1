//! Reads into memory that the kernel does not reach: in pieces through memory inside the agent, which the CPU copies out while
//! the kernel pushes the next.

/// The most that one piece is, and how many are under way at once.
pub(super) const MOST: usize = 128 << 10;
pub(super) const SLOTS: usize = 8;
/// A piece keeps its source's place in a line of 64 bytes, so that the kernel has nothing to shift.
pub(super) const SLOT: usize = MOST + LINE;

const LINE: usize = 64;

/// How such reads are cut up. `memcpy` copies the pieces out: on an H200's host neither wider loads nor prefetches did better.
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
}

/// Measured on an H200: 64 KiB 7.2 us and 100 KB 9.2 us, in one piece of up to 128 KiB 8.1 and 11.0; 256 KiB 18.0 and 20.3.
impl Default for Bounce {
    fn default() -> Self {
        Self { first: 16 << 10, growth: 150 }
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
            let bounce = Bounce { first: first << 10, growth };
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
            sizes(Bounce { first: usize::MAX / 2, growth: 1000 }, len);
        }
    }
}
