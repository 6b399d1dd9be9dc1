//! How a copy is cut up: pure arithmetic.

use std::num::NonZeroUsize;
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

/// The most threads that a copy of this size has something for.
pub(super) fn most_threads(addr: usize, len: usize, direction: CopyDirection) -> usize {
    match direction {
        // A unit each, at least.
        CopyDirection::HostToDevice => len / WRITE_BYTES,
        CopyDirection::DeviceToHost => (addr % LINE_BYTES + len).div_ceil(GRANULE_BYTES),
    }
}

/// Bytes of the smallest piece that a thread asks for.
fn unit(len: usize, threads: usize, direction: CopyDirection) -> usize {
    match direction {
        // Asking for a piece is a locked instruction, which waits until this core's stores have left it: a write has few and
        // large ones.
        CopyDirection::HostToDevice => (len / (16 * threads)).next_multiple_of(WRITE_BYTES).max(WRITE_BYTES),
        CopyDirection::DeviceToHost => GRANULE_BYTES,
    }
}

/// Eighths of a copy that threads have for themselves, as shares or as a first round of pieces. The rest goes to whoever is
/// free, for cores differ: in a virtual machine beside an H200 they read 0.75 to 0.97 GB/s, depending on the moment.
///
/// Medians in us there, all threads awake, by eighths in shares. The bare loop is threads with even shares, and nothing else:
///
/// | copy                 | bare loop |   8   |   7   |   6   |   4   |
/// |----------------------|-----------|-------|-------|-------|-------|
/// | read, 16 KiB on 2    |      10.8 |  10.9 |  10.9 |  11.3 |  11.9 |
/// | read, 16 KiB on 4    |       9.4 |   9.8 |   7.9 |   7.9 |   7.8 |
/// | read, 64 KiB on 4    |      33.8 |  34.2 |  30.3 |  27.7 |  28.3 |
/// | read, 64 KiB on 8    |      15.8 |  16.1 |  15.0 |  14.0 |  13.6 |
/// | read, 64 KiB on 16   |      11.7 |  13.0 |  10.6 |  10.4 |  11.1 |
/// | read, 1 MiB on 8     |     209.9 | 210.4 | 191.5 | 180.2 | 179.2 |
/// | write, 1 MiB on 2    |      35.5 |  35.7 |  35.9 |  36.1 |  36.4 |
fn most_of_it(direction: CopyDirection) -> usize {
    match direction {
        CopyDirection::HostToDevice => 7,
        CopyDirection::DeviceToHost => 6,
    }
}

/// All of it, as eighths.
const ALL: usize = 8;

/// Units for each thread up to which a copy is cut into even shares, and nothing is left to ask for.
const FEW: usize = 3;

/// `len` bytes of device memory, and the whole lines around them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Bytes of the first line in front of the range.
    skew: usize,
    len: usize,
}

impl Span {
    #[inline]
    pub(super) fn new(addr: usize, len: usize) -> Self {
        Self { skew: addr % LINE_BYTES, len }
    }

    #[inline]
    fn lines(self) -> usize {
        if self.len == 0 { 0 } else { (self.skew + self.len).div_ceil(LINE_BYTES) }
    }

    /// The bytes of some lines, as offsets from the start of the range.
    #[inline]
    fn bytes(self, lines: Range<usize>) -> Range<usize> {
        let byte = |line: usize| (line * LINE_BYTES).saturating_sub(self.skew).min(self.len);
        byte(lines.start)..byte(lines.end)
    }
}

/// The first lines of a copy as one share for each thread, which is that thread's and need not be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Lines of a share.
    each: NonZeroUsize,
    /// So many shares, the first, are a line longer.
    longer: u32,
}

impl Shares {
    /// Shares of all of a short copy, and of most of a longer one: the rest makes up for cores that differ. `None` where there
    /// is not a line for each thread.
    ///
    /// Nothing is lost at the end of shares that are no whole number of granules: a core has so many lines in flight at a
    /// time, whichever they are. Where they leave something they are whole granules.
    pub(super) fn new(span: Span, threads: usize, direction: CopyDirection) -> Option<Self> {
        let lines = span.lines();
        let (each, longer) = if span.len <= FEW * unit(span.len, threads, direction) * threads {
            (lines / threads, lines % threads)
        } else {
            let each = lines * most_of_it(direction) / ALL / threads;
            (each - each % GRANULE_LINES, 0)
        };
        Some(Self { each: NonZeroUsize::new(each)?, longer: u32::try_from(longer).ok()? })
    }

    /// The bytes of share `n`.
    #[inline]
    pub(super) fn range(self, span: Span, n: usize) -> Range<usize> {
        span.bytes(self.start(n)..self.start(n + 1))
    }

    /// The first line of share `n`.
    #[inline]
    fn start(self, n: usize) -> usize {
        n * self.each.get() + n.min(usize_of(u64::from(self.longer)))
    }

    /// The line behind the last of so many shares, unless that is the end.
    #[inline]
    pub(super) fn rest(self, span: Span, threads: usize) -> Option<usize> {
        Some(self.start(threads)).filter(|&line| line < span.lines())
    }
}

/// Rounds of pieces, each for all threads: most of the whole, then halves of what is left, then units.
const ROUNDS: usize = 4;

/// A copy, or what is left of it, in pieces for whoever is free. They meet on line boundaries, so that no line is touched
/// by two threads.
///
/// A piece is a whole number of units, but for where the range begins and ends. They get smaller: so each thread asks few
/// times, and one that is slow, or late, leaves what it does not get at to the others: they end within a unit of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pieces {
    span: Span,
    /// The line that the first piece begins at.
    from: usize,
    /// Lines.
    unit: usize,
    units: usize,
    threads: usize,
    /// Units of a piece in each round; of the last round there are as many as it takes.
    rounds: [usize; ROUNDS],
}

impl Pieces {
    /// All of a copy, in large pieces first, for so many threads, fewer if there is not a unit for each.
    pub(super) fn whole(span: Span, threads: usize, direction: CopyDirection) -> Self {
        Self::new(span, 0, threads, direction, Some(most_of_it(direction)))
    }

    /// What shares leave from line `from` on.
    pub(super) fn rest(span: Span, from: usize, threads: usize, direction: CopyDirection) -> Self {
        Self::new(span, from, threads, direction, None)
    }

    fn new(span: Span, from: usize, threads: usize, direction: CopyDirection, first: Option<usize>) -> Self {
        let unit = unit(span.len, threads, direction) / LINE_BYTES;
        let units = (span.lines() - from).div_ceil(unit);
        let threads = threads.clamp(1, units.max(1));
        let mut left = units;
        let mut rounds = [1; ROUNDS];
        for (n, round) in rounds.iter_mut().enumerate().take(ROUNDS - 1) {
            let share = first.filter(|_| n == 0).map_or(left / 2, |eighths| left * eighths / ALL) / threads;
            *round = share.max(1);
            left = left.saturating_sub(*round * threads);
        }
        // The last round has all the rest, in pieces that get no smaller: a few hundred of them for the largest copies.
        rounds[ROUNDS - 1] = (left / (8 * threads)).max(1);
        if first.is_some() && units <= FEW * threads {
            // Too short to make up for asking more than once.
            rounds[0] = units.div_ceil(threads);
        }
        Self { span, from, unit, units, threads, rounds }
    }

    /// Whether there is one piece for each thread and no more.
    pub(super) fn are_shares(self) -> bool {
        self.rounds[0] * self.threads >= self.units
    }

    /// The bytes of piece `n`, as offsets from the start of the range; `None` behind the last.
    #[inline]
    pub(super) fn range(self, n: u32) -> Option<Range<usize>> {
        let mut n = usize_of(u64::from(n));
        let mut start = 0;
        for (round, &each) in self.rounds.iter().enumerate() {
            if n < self.threads || round == ROUNDS - 1 {
                start += n.saturating_mul(each);
                let line = |unit: usize| self.from + unit * self.unit;
                let lines = || line(start)..line((start + each).min(self.units));
                return (start < self.units).then(|| self.span.bytes(lines()));
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

    type Ranges = Vec<Range<usize>>;

    const BOTH: [CopyDirection; 2] = [CopyDirection::HostToDevice, CopyDirection::DeviceToHost];

    fn all(pieces: Pieces) -> Ranges {
        (0..).map_while(|n| pieces.range(n)).collect()
    }

    /// The shares of all threads, and the pieces behind them.
    fn shared(span: Span, threads: usize, direction: CopyDirection) -> Option<(Ranges, Ranges)> {
        let shares = Shares::new(span, threads, direction)?;
        let rest = shares.rest(span, threads).map(|from| all(Pieces::rest(span, from, threads, direction)));
        Some(((0..threads).map(|n| shares.range(span, n)).collect(), rest.unwrap_or_default()))
    }

    #[track_caller]
    fn assert_once(span: Span, ranges: &[Range<usize>], what: &str) {
        let mut next = 0;
        for range in ranges {
            assert_eq!(range.start, next, "{span:?} {what} {ranges:?}");
            assert!(!range.is_empty(), "{span:?} {what} {ranges:?}");
            assert!(next == 0 || (span.skew + next).is_multiple_of(LINE_BYTES), "{span:?} {what} {ranges:?}");
            next = range.end;
        }
        assert_eq!(next, span.len, "{span:?} {what}");
    }

    #[test]
    fn every_byte_is_in_one_piece_and_they_meet_on_lines() {
        let lens = (0..300).chain((300..9000).step_by(61)).chain([65_536, 1 << 20, 3 << 20]);
        for len in lens {
            for skew in (0..64).step_by(7).chain([63]) {
                let span = Span::new(4096 + skew, len);
                for threads in [1, 2, 3, 7, 8, 12, 17, 64] {
                    for direction in BOTH {
                        let pieces = Pieces::whole(span, threads, direction);
                        assert_once(span, &all(pieces), "pieces");
                        assert_eq!(pieces.range(u32::MAX), None);
                        match shared(span, threads, direction) {
                            Some((shares, rest)) => assert_once(span, &[shares, rest].concat(), "shares and rest"),
                            None => assert!(span.lines() < threads, "{span:?} {threads}"),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn whoever_has_a_unit_each_has_a_share_each() {
        for len in (1025..20_000).chain((20_000..9_000_000).step_by(4999)) {
            for skew in [0, 1, 63] {
                let span = Span::new(skew, len);
                for direction in BOTH {
                    for threads in 2..=64.min(most_threads(skew, len, direction)) {
                        let (shares, rest) = shared(span, threads, direction).expect("enough for all");
                        assert_eq!(shares.len(), threads, "{span:?}");
                        if rest.is_empty() {
                            // Even to a line, and what the ends are short of theirs.
                            let longest = shares.iter().map(Range::len).max();
                            let shortest = shares[1..threads - 1].iter().map(Range::len).min();
                            assert!(
                                shortest.is_none_or(|len| len + LINE_BYTES >= longest.unwrap()),
                                "{span:?} {threads}"
                            );
                        }
                    }
                }
            }
        }
    }

    fn kib(ranges: &[Range<usize>]) -> Vec<usize> {
        ranges.iter().map(|range| range.len() >> 10).collect()
    }

    #[test]
    fn short_copies_are_even_and_others_leave_a_rest() {
        let read = |len, threads| {
            let (shares, rest) = shared(Span::new(0, len), threads, CopyDirection::DeviceToHost).unwrap();
            (kib(&shares), kib(&rest))
        };
        assert_eq!(read(12 << 10, 4), (vec![3; 4], vec![]));
        assert_eq!(read(16 << 10, 4), (vec![3; 4], vec![1; 4]));
        assert_eq!(read(40 << 10, 8), (vec![3; 8], vec![1; 16]));
        assert_eq!(read(64 << 10, 8), (vec![6; 8], vec![1; 16]));
        assert_eq!(read(64 << 10, 4), (vec![12; 4], [[2; 4], [1; 4], [1; 4]].concat()));
        assert_eq!(read(256 << 10, 8), (vec![24; 8], [[4; 8], [2; 8], [1; 8], [1; 8]].concat()));
        // 512 lines by 12.
        let twelve = shared(Span::new(0, 32 << 10), 12, CopyDirection::DeviceToHost).unwrap().0;
        let lines: Vec<usize> = twelve.iter().map(|range| range.len() / LINE_BYTES).collect();
        assert_eq!(lines, [[43; 8].as_slice(), &[42; 4]].concat());
        // A start within a line makes no other shape of it.
        assert!(shared(Span::new(13, 12 << 10), 4, CopyDirection::DeviceToHost).unwrap().1.is_empty());
        let write = |len| shared(Span::new(0, len), 2, CopyDirection::HostToDevice).unwrap();
        let (short, long) = (write(48 << 10), write(1 << 20));
        assert_eq!((kib(&short.0), kib(&short.1)), (vec![24; 2], vec![]));
        assert_eq!((kib(&long.0), kib(&long.1)), (vec![448; 2], vec![32; 4]));
    }

    #[test]
    fn large_pieces_come_first_and_there_are_few() {
        let sizes = |len, threads| kib(&all(Pieces::whole(Span::new(0, len), threads, CopyDirection::DeviceToHost)));
        assert_eq!(sizes(64 << 10, 8), [[6; 8].as_slice(), &[1; 16]].concat());
        assert_eq!(sizes(12 << 10, 4), [3; 4]);
        assert_eq!(sizes(16 << 10, 4), [[3; 4], [1; 4]].concat());
        assert_eq!(sizes(256 << 10, 8), [[24; 8].as_slice(), &[4; 8], &[2; 8], &[1; 16]].concat());
        assert_eq!(sizes(2 << 10, 8), [1, 1]);
        assert_eq!(sizes(33 << 10, 8), [[3; 8].as_slice(), &[1; 9]].concat());
        assert!(sizes(0, 8).is_empty());
        let write = |len, threads| all(Pieces::whole(Span::new(0, len), threads, CopyDirection::HostToDevice)).len();
        assert_eq!((write(1 << 20, 2), write(64 << 20, 4)), (6, 12));
        let count = all(Pieces::whole(Span::new(0, 64 << 20), 8, CopyDirection::DeviceToHost)).len();
        assert!(count < 150, "{count}");
        let (_, rest) = shared(Span::new(0, 64 << 20), 8, CopyDirection::DeviceToHost).unwrap();
        assert!(rest.len() < 150, "{}", rest.len());
    }
}
