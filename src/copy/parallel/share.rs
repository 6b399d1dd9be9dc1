//! How a copy is divided among threads: pure arithmetic.

use std::ops::Range;

use super::super::plan::LINE_BYTES;

/// Lines that a core has in flight at a time, and so the unit of work: fewer take as long, on a bus that is waited for.
const GRANULE_LINES: usize = 16;
pub(super) const GRANULE_BYTES: usize = GRANULE_LINES * LINE_BYTES;

/// `len` bytes at device address `addr` in shares that meet on line boundaries, so that no line is touched by two
/// threads. A share is a whole number of granules, but for where the range begins and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Bytes of the first line in front of the range.
    skew: usize,
    len: usize,
    granules: usize,
    count: usize,
}

impl Shares {
    /// At most `threads` shares, and none that is empty.
    pub(super) fn new(addr: usize, len: usize, threads: usize) -> Self {
        let skew = addr % LINE_BYTES;
        let granules = if len == 0 { 0 } else { (skew + len).div_ceil(GRANULE_BYTES) };
        Self { skew, len, granules, count: threads.min(granules) }
    }

    /// How many there are.
    pub(super) fn count(self) -> usize {
        self.count
    }

    /// The bytes of share `n`, as offsets from the start of the range. The first shares are the larger ones.
    pub(super) fn range(self, n: usize) -> Range<usize> {
        let (each, more) = (self.granules / self.count, self.granules % self.count);
        let granule = |n: usize| n * each + n.min(more);
        let byte = |granule: usize| (granule * GRANULE_BYTES).saturating_sub(self.skew).min(self.len);
        byte(granule(n))..byte(granule(n + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_range_and_meet_on_lines() {
        let lens = (0..300).chain((300..9000).step_by(61)).chain([65_536, 1 << 20]);
        for len in lens {
            for skew in (0..64).step_by(7).chain([63]) {
                for threads in [1, 2, 3, 7, 8, 17] {
                    let shares = Shares::new(4096 + skew, len, threads);
                    assert!(shares.count() <= threads);
                    let mut next = 0;
                    for n in 0..shares.count() {
                        let range = shares.range(n);
                        assert_eq!(range.start, next, "{shares:?}");
                        assert!(!range.is_empty(), "{shares:?} {n}");
                        assert!(n == 0 || (skew + range.start).is_multiple_of(LINE_BYTES), "{shares:?} {n}");
                        next = range.end;
                    }
                    assert_eq!(next, len, "{shares:?}");
                }
            }
        }
    }

    #[test]
    fn shares_are_whole_granules_and_even() {
        let sizes = |len, threads| {
            let shares = Shares::new(0, len, threads);
            (0..shares.count()).map(|n| shares.range(n).len()).collect::<Vec<_>>()
        };
        assert_eq!(sizes(64 << 10, 8), [8 << 10; 8]);
        assert_eq!(sizes(16 << 10, 4), [4 << 10; 4]);
        assert_eq!(sizes(1025, 8), [1024, 1]);
        assert_eq!(sizes(5 << 10, 4), [2048, 1024, 1024, 1024]);
        assert_eq!(sizes(1024, 8), [1024]);
        assert!(sizes(0, 8).is_empty());
    }
}
