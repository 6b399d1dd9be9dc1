//! How a copy is cut up: pure arithmetic.

use std::ops::Range;

use super::super::plan::LINE_BYTES;
use crate::policy::CopyDirection;
use crate::sys::num::usize_of;

/// Lines that a core has in flight at a time, and so the unit of work: fewer take as long, on a bus that is waited for.
const GRANULE_LINES: usize = 16;
pub(super) const GRANULE_BYTES: usize = GRANULE_LINES * LINE_BYTES;

/// Bytes below which a write is not worth another core: half a microsecond of one core's stores, against 0.15 to 0.25 us
/// for handing a share over.
pub(super) const WRITE_BYTES: usize = 8 << 10;

/// The largest copy that the calling thread makes alone, wherever it begins in a line.
pub(crate) fn largest_alone(direction: CopyDirection) -> usize {
    match direction {
        CopyDirection::HostToDevice => 2 * WRITE_BYTES - 1,
        CopyDirection::DeviceToHost => GRANULE_BYTES,
    }
}

/// Rounds of pieces, each for all threads: most of the whole, then halves of what is left, then units.
const ROUNDS: usize = 4;

/// Units for each thread up to which a copy is cut into even shares.
const FEW: usize = 4;

/// `len` bytes at device address `addr` in pieces that meet on line boundaries, so that no line is touched by two threads.
///
/// A piece is a whole number of units, but for where the range begins and ends. There is a round of large pieces, one for
/// each thread, then rounds of smaller ones. So each thread asks few times, and one that is slow, or late, leaves what it
/// does not get at to the others: they end within a unit of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pieces {
    /// Bytes of the first line in front of the range.
    skew: usize,
    len: usize,
    unit: usize,
    units: usize,
    threads: usize,
    /// Units of a piece in each round; of the last round there are as many as it takes.
    rounds: [usize; ROUNDS],
}

impl Pieces {
    /// For so many threads, fewer if there is not a unit for each.
    pub(super) fn new(addr: usize, len: usize, threads: usize, direction: CopyDirection) -> Self {
        // Asking for a piece is a locked instruction, which waits until this core's stores have left it: a write has few and
        // large ones.
        let (unit, first) = match direction {
            CopyDirection::HostToDevice => ((len / (16 * threads)).next_multiple_of(WRITE_BYTES).max(WRITE_BYTES), 7),
            CopyDirection::DeviceToHost => (GRANULE_BYTES, 6),
        };
        let skew = addr % LINE_BYTES;
        let units = if len == 0 { 0 } else { (skew + len).div_ceil(unit) };
        let threads = threads.clamp(1, units.max(1));
        let mut left = units;
        let mut rounds = [1; ROUNDS];
        for (n, round) in rounds.iter_mut().enumerate().take(ROUNDS - 1) {
            let share = if n == 0 { left * first / 8 } else { left / 2 } / threads;
            *round = share.max(1);
            left = left.saturating_sub(*round * threads);
        }
        // The last round has all the rest, in pieces that get no smaller: a few hundred of them for the largest copies.
        rounds[ROUNDS - 1] = (left / (8 * threads)).max(1);
        if units <= FEW * threads {
            // Too short to make up for asking more than once.
            rounds[0] = units.div_ceil(threads);
        }
        Self { skew, len, unit, units, threads, rounds }
    }

    /// Whether there is one piece for each thread and no more.
    pub(super) fn are_shares(self) -> bool {
        self.rounds[0] * self.threads >= self.units
    }

    /// The most threads that a copy of this size has something for.
    pub(super) fn most_threads(addr: usize, len: usize, direction: CopyDirection) -> usize {
        match direction {
            // A unit each, at least.
            CopyDirection::HostToDevice => len / WRITE_BYTES,
            CopyDirection::DeviceToHost => (addr % LINE_BYTES + len).div_ceil(GRANULE_BYTES),
        }
    }

    /// The bytes of piece `n`, as offsets from the start of the range; `None` behind the last.
    #[inline]
    pub(super) fn range(self, n: u32) -> Option<Range<usize>> {
        let mut n = usize_of(u64::from(n));
        let mut start = 0;
        for (round, &each) in self.rounds.iter().enumerate() {
            if n < self.threads || round == ROUNDS - 1 {
                start += n.saturating_mul(each);
                let byte = |unit: usize| (unit * self.unit).saturating_sub(self.skew).min(self.len);
                return (start < self.units).then(|| byte(start)..byte((start + each).min(self.units)));
            }
            n -= self.threads;
            start += self.threads * each;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pieces: Pieces) -> Vec<Range<usize>> {
        (0..).map_while(|n| pieces.range(n)).collect()
    }

    #[test]
    fn pieces_cover_the_range_and_meet_on_lines() {
        let lens = (0..300).chain((300..9000).step_by(61)).chain([65_536, 1 << 20, 3 << 20]);
        for len in lens {
            for skew in (0..64).step_by(7).chain([63]) {
                for threads in [1, 2, 3, 7, 8, 17] {
                    for direction in [CopyDirection::HostToDevice, CopyDirection::DeviceToHost] {
                        let pieces = Pieces::new(4096 + skew, len, threads, direction);
                        let mut next = 0;
                        for range in all(pieces) {
                            assert_eq!(range.start, next, "{pieces:?}");
                            assert!(!range.is_empty(), "{pieces:?} {range:?}");
                            assert!(next == 0 || (skew + next).is_multiple_of(LINE_BYTES), "{pieces:?} {range:?}");
                            next = range.end;
                        }
                        assert_eq!(next, len, "{pieces:?}");
                        assert_eq!(pieces.range(u32::MAX), None);
                    }
                }
            }
        }
    }

    #[test]
    fn large_pieces_come_first_and_there_are_few() {
        let sizes = |len, threads| {
            all(Pieces::new(0, len, threads, CopyDirection::DeviceToHost))
                .into_iter()
                .map(|range| range.len() >> 10)
                .collect::<Vec<_>>()
        };
        assert_eq!(sizes(64 << 10, 8), [[6; 8].as_slice(), &[1; 16]].concat());
        assert_eq!(sizes(16 << 10, 4), [4; 4]);
        assert_eq!(sizes(256 << 10, 8), [[24; 8].as_slice(), &[4; 8], &[2; 8], &[1; 16]].concat());
        assert_eq!(sizes(2 << 10, 8), [1, 1]);
        assert_eq!(sizes(33 << 10, 8), [[3; 8].as_slice(), &[1; 9]].concat());
        assert!(sizes(0, 8).is_empty());
        let write = |len, threads| all(Pieces::new(0, len, threads, CopyDirection::HostToDevice)).len();
        assert_eq!((write(1 << 20, 2), write(64 << 20, 4)), (6, 12));
        let count = all(Pieces::new(0, 64 << 20, 8, CopyDirection::DeviceToHost)).len();
        assert!(count < 150, "{count}");
    }
}
