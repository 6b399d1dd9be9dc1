//! One row of a table: copies of one size at one offset, timed and then compared byte by byte.

use std::ops::Range;
use std::time::Duration;

use memmap2::MmapMut;

use super::cpu::flush_lines;
use super::fail::Failure;
use super::interrupt;
use super::measure::{Amount, Sampler};
use super::method::Method;
use super::pattern;
use super::report::{Direction, Entry, Metric, Place};
use crate::buffer::DeviceBuffer;
use crate::sys::num::u64_of;

/// Bytes on either side of a copy that must not change.
const GUARD: usize = 64;
/// Where the data lies in host memory: a page boundary, with room for the guard before it.
const DATA_AT: usize = 4096;
/// Seed of the bytes around the data.
const GUARD_SEED: u64 = u64::MAX;

/// Copies per loop where neither a count nor the time says otherwise.
pub const DEFAULT_WRITES: u64 = 100_000;
/// As [`DEFAULT_WRITES`].
pub const DEFAULT_READS: u64 = 10_000;

/// What a row is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loops {
    /// Back to back, then one at a time.
    All,
    /// Back to back only.
    Sustained,
    /// One at a time only, each after the host's lines were flushed from the caches.
    Cold,
    /// One at a time only, and no longer than the time allows, whatever count was asked for.
    Single,
}

/// How many copies are made, and how.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Exactly so many writes; 0 for none.
    pub writes: Option<u64>,
    /// Exactly so many reads; 0 for none.
    pub reads: Option<u64>,
    /// Which loops.
    pub loops: Loops,
    /// Compare the bytes afterwards.
    pub verify: bool,
    /// The largest copy.
    pub largest: usize,
}

impl Terms {
    /// Refuses what leaves nothing to measure.
    ///
    /// # Errors
    ///
    /// Both counts are 0.
    pub fn check(&self) -> Result<(), Failure> {
        if self.directions().next().is_none() {
            return Err(Failure::usage("-w 0 and -r 0 leave nothing to measure; give one of them a count"));
        }
        Ok(())
    }

    /// The directions to measure: a count of 0 leaves one out.
    pub fn directions(&self) -> impl Iterator<Item = Direction> + use<> {
        let (writes, reads) = (self.writes != Some(0), self.reads != Some(0));
        [(Direction::HostToDevice, writes), (Direction::DeviceToHost, reads)]
            .into_iter()
            .filter_map(|(direction, wanted)| wanted.then_some(direction))
    }

    /// How many copies to make in one of a row's loops, which may take `time`.
    #[must_use]
    pub fn amount(&self, direction: Direction, time: Duration) -> Amount {
        let (exact, usual) = match direction {
            Direction::HostToDevice => (self.writes, DEFAULT_WRITES),
            Direction::DeviceToHost => (self.reads, DEFAULT_READS),
        };
        exact.map_or(Amount::UpTo(usual, time), Amount::Exactly)
    }

    /// What a row is made of, in words; it may take `row`.
    #[must_use]
    pub fn in_words(&self, row: Duration) -> String {
        let mut is_timed = false;
        let counts = self.directions().map(|direction| {
            let what = match direction {
                Direction::HostToDevice => "writes",
                Direction::DeviceToHost => "reads",
            };
            match self.amount(direction, row) {
                Amount::Exactly(n) => format!("exactly {n} {what}"),
                Amount::UpTo(n, _) => {
                    is_timed = true;
                    format!("up to {n} {what}")
                }
            }
        });
        let counts = counts.collect::<Vec<_>>().join(" or ");
        let limit = if is_timed { format!(" in {} (20 at least)", time_in_words(row)) } else { String::new() };
        let verified = if self.verify { "data compared" } else { "data NOT compared" };
        format!("{counts}{limit}; {verified}")
    }
}

fn time_in_words(time: Duration) -> String {
    match time.as_micros() {
        us if us < 10_000 => format!("{us} us"),
        _ => format!("{} ms", time.as_millis()),
    }
}

/// Bytes of host memory that cells of up to `largest` bytes need.
#[must_use]
pub fn arena_bytes(largest: usize) -> usize {
    DATA_AT + largest + GUARD
}

/// Page-aligned host memory, present and private.
///
/// # Errors
///
/// There is not enough.
pub fn host_memory(bytes: usize) -> Result<MmapMut, Failure> {
    let mut memory = MmapMut::map_anon(bytes).map_err(|error| {
        Failure::run(format!("no host memory for copies of that size ({error}); name smaller sizes"))
    })?;
    memory.fill(0);
    Ok(memory)
}

/// Measures cells one after the other.
#[derive(Debug)]
pub struct Bench<'a> {
    terms: Terms,
    buffer: &'a DeviceBuffer,
    /// Runs the loops.
    pub sampler: Sampler<'a>,
    /// What a stretch of memory should hold: guard, data, guard.
    expected: MmapMut,
    scratch: MmapMut,
}

/// Offset and size of the copies of one cell, and how long it may take.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    /// From the start of the device buffer.
    pub offset: usize,
    /// Of one copy.
    pub bytes: usize,
    /// For all loops together.
    pub time: Duration,
}

impl<'a> Bench<'a> {
    /// For copies into and out of `buffer`.
    ///
    /// # Errors
    ///
    /// No host memory.
    pub fn new(terms: Terms, buffer: &'a DeviceBuffer, sampler: Sampler<'a>) -> Result<Self, Failure> {
        let len = if terms.verify { terms.largest + 2 * GUARD } else { 1 };
        Ok(Self { terms, buffer, sampler, expected: host_memory(len)?, scratch: host_memory(len)? })
    }

    /// Makes other loops from now on.
    pub fn set_loops(&mut self, loops: Loops) {
        self.terms.loops = loops;
    }

    /// Times and compares one cell. `arena` is host memory of [`arena_bytes`], page aligned.
    ///
    /// # Errors
    ///
    /// A copy failed, or the data is wrong; [`Failure::Interrupted`] after Ctrl-C.
    pub fn cell<M: Method>(
        &mut self,
        method: &M,
        direction: Direction,
        cell: Cell,
        arena: &mut [u8],
    ) -> Result<Vec<Entry>, Failure> {
        let entries = match direction {
            Direction::HostToDevice => self.time_writes(method, cell, arena),
            Direction::DeviceToHost => self.time_reads(method, cell, arena),
        }?;
        // What the loops found until Ctrl-C is no whole row.
        interrupt::check()?;
        Ok(entries)
    }

    /// The copies of each loop of a cell.
    fn amount<M: Method>(&self, method: &M, direction: Direction, cell: Cell) -> Amount {
        let loops = match self.terms.loops {
            Loops::All => 1 + method.singles(direction).len(),
            Loops::Sustained => 1,
            Loops::Cold | Loops::Single => method.singles(direction).len(),
        };
        let time = cell.time / u32::try_from(loops).unwrap_or(u32::MAX);
        match self.terms.amount(direction, time) {
            Amount::Exactly(n) if self.terms.loops == Loops::Single => Amount::UpTo(n, time),
            amount => amount,
        }
    }

    fn time_writes<M: Method>(&mut self, method: &M, cell: Cell, arena: &mut [u8]) -> Result<Vec<Entry>, Failure> {
        let Cell { offset, bytes, .. } = cell;
        let place = place(method, Direction::HostToDevice, cell);
        let Terms { loops, verify, .. } = self.terms;
        let source = &mut arena[DATA_AT..DATA_AT + bytes];
        pattern::fill(source, seed(place));
        let source = &*source;

        // The device's side: guard, something else than the data in every byte, guard.
        let stretch = offset.saturating_sub(GUARD)..(offset + bytes + GUARD).min(self.buffer.len());
        let data = offset - stretch.start..offset - stretch.start + bytes;
        if verify {
            let expected = &mut self.expected[..stretch.len()];
            pattern::fill(expected, GUARD_SEED);
            pattern::fill_complement(&mut expected[data.clone()], source);
            self.buffer.upload(stretch.start, expected)?;
            expected[data.clone()].copy_from_slice(source);
        }

        let amount = self.amount(method, Direction::HostToDevice, cell);
        let per_call = self.sampler.warm_up(amount, || method.write(offset, source))?;
        let mut entries = Vec::with_capacity(3);
        if matches!(loops, Loops::All | Loops::Sustained) {
            let write = || method.write(offset, source);
            let sustained = self.sampler.batched(amount, per_call, write, || method.close())?;
            entries.push(Entry::new(place, Metric::Sustained, &sustained, verify));
        }
        if loops != Loops::Sustained {
            for &metric in method.singles(Direction::HostToDevice) {
                let write = |(): &mut ()| method.single_write(metric, offset, source);
                let single = match loops {
                    Loops::Cold => self.sampler.single(amount, &mut (), |()| flush_lines(source), write)?,
                    _ => self.sampler.single(amount, &mut (), |()| (), write)?,
                };
                let mut entry = Entry::new(place, metric, &single, verify);
                entry.figures.deduct(method.deducted_ns());
                entries.push(entry);
            }
        }

        if verify {
            method.settle()?;
            let found = &mut self.scratch[..stretch.len()];
            self.buffer.download(stretch.start, found)?;
            compare(place, found, &self.expected[..stretch.len()], data)?;
        }
        Ok(entries)
    }

    fn time_reads<M: Method>(&mut self, method: &M, cell: Cell, arena: &mut [u8]) -> Result<Vec<Entry>, Failure> {
        let Cell { offset, bytes, .. } = cell;
        let place = place(method, Direction::DeviceToHost, cell);
        let Terms { loops, verify, .. } = self.terms;
        let stretch = DATA_AT - GUARD..DATA_AT + bytes + GUARD;
        let data = GUARD..GUARD + bytes;
        if verify {
            let expected = &mut self.expected[..stretch.len()];
            pattern::fill(expected, GUARD_SEED);
            pattern::fill(&mut expected[data.clone()], seed(place));
            self.buffer.upload(offset, &expected[data.clone()])?;
            // The host's side: guard, something else than the data in every byte, guard.
            let host = &mut arena[stretch.clone()];
            host.copy_from_slice(expected);
            pattern::fill_complement(&mut host[data.clone()], &expected[data.clone()]);
        }

        let amount = self.amount(method, Direction::DeviceToHost, cell);
        let target = &mut arena[DATA_AT..DATA_AT + bytes];
        let per_call = self.sampler.warm_up(amount, || method.read(offset, target))?;
        let mut entries = Vec::with_capacity(2);
        if matches!(loops, Loops::All | Loops::Sustained) {
            let sustained = self.sampler.sustained(amount, per_call, || method.read(offset, target))?;
            entries.push(Entry::new(place, Metric::Sustained, &sustained, verify));
        }
        if loops != Loops::Sustained {
            for &metric in method.singles(Direction::DeviceToHost) {
                let read = |target: &mut [u8]| method.read(offset, target);
                let single = match loops {
                    Loops::Cold => self.sampler.single(amount, target, |target| flush_lines(target), read)?,
                    _ => self.sampler.single(amount, target, |_| (), read)?,
                };
                let mut entry = Entry::new(place, metric, &single, verify);
                entry.figures.deduct(method.deducted_ns());
                entries.push(entry);
            }
        }

        if verify {
            compare(place, &arena[stretch.clone()], &self.expected[..stretch.len()], data)?;
        }
        Ok(entries)
    }
}

fn place<M: Method>(method: &M, direction: Direction, cell: Cell) -> Place {
    Place {
        direction,
        method: method.name(),
        bytes: u64_of(cell.bytes),
        offset: u64_of(cell.offset),
        threads: method.threads(),
    }
}

/// A pattern of its own for every cell, so that what an earlier one left behind does not pass.
fn seed(place: Place) -> u64 {
    let direction = u64::from(place.direction == Direction::DeviceToHost);
    let method = place.method.bytes().fold(0, |hash: u64, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
    (place.bytes << 24) ^ (place.offset << 1) ^ direction ^ (method << 44)
}

fn compare(place: Place, found: &[u8], expected: &[u8], data: Range<usize>) -> Result<(), Failure> {
    let Some((at, got, want)) = pattern::first_difference(found, expected) else { return Ok(()) };
    let Place { direction, method, bytes, offset, .. } = place;
    let cell = format!("{} by {method}, {bytes} bytes at offset {offset}", direction.in_words());
    let what = if data.contains(&at) {
        format!("byte {} of the copy is {got:#04x} instead of {want:#04x}", at - data.start)
    } else if at < data.start {
        format!("the byte {} before the copy was overwritten with {got:#04x}", data.start - at)
    } else {
        format!("the byte {} past the end of the copy was overwritten with {got:#04x}", at - data.end + 1)
    };
    let remedy = "the figures are void; run again with another --copy routine to see whether it is at fault";
    Err(Failure::run(format!("wrong data: {cell}: {what}; {remedy}")))
}

#[cfg(test)]
mod tests {
    use super::super::clock::Clock;
    use super::super::method::{Bar1, CudaMemcpy, Posted};
    use super::*;
    use crate::backend::BackendKind;
    use crate::error::Result as LibraryResult;
    use crate::session::Session;

    /// What a broken copy routine may do.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fault {
        None,
        /// The last byte is not copied.
        Short,
        /// One byte too many.
        Long,
        /// One byte too early.
        Early,
        /// Nothing is copied at all.
        Nothing,
        /// A bit flips in the middle.
        Flip,
    }

    /// Copies through the buffer itself, with a fault.
    struct Faulty<'a>(&'a DeviceBuffer, Fault);

    impl Method for Faulty<'_> {
        fn name(&self) -> &'static str {
            "faulty"
        }

        fn describe(&self, _: Direction) -> &'static str {
            "a copy with a fault"
        }

        fn singles(&self, _: Direction) -> &'static [Metric] {
            &[Metric::Single]
        }

        fn write(&self, offset: usize, from: &[u8]) -> LibraryResult<()> {
            let mut bytes = from.to_vec();
            match self.1 {
                Fault::None => self.0.upload(offset, from),
                Fault::Short => self.0.upload(offset, &from[..from.len() - 1]),
                Fault::Long => {
                    bytes.push(0xa5);
                    self.0.upload(offset, &bytes)
                }
                Fault::Early => {
                    bytes.insert(0, 0xa5);
                    self.0.upload(offset - 1, &bytes)
                }
                Fault::Nothing => Ok(()),
                Fault::Flip => {
                    bytes[from.len() / 2] ^= 0x10;
                    self.0.upload(offset, &bytes)
                }
            }
        }

        fn read(&self, offset: usize, to: &mut [u8]) -> LibraryResult<()> {
            let last = to.len() - 1;
            match self.1 {
                Fault::Short => return self.0.download(offset, &mut to[..last]),
                Fault::Nothing => return Ok(()),
                _ => self.0.download(offset, to)?,
            }
            if self.1 == Fault::Flip {
                to[last / 2] ^= 0x10;
            }
            Ok(())
        }

        fn settle(&self) -> LibraryResult<()> {
            Ok(())
        }
    }

    const TERMS: Terms = Terms { writes: Some(3), reads: Some(3), loops: Loops::All, verify: true, largest: 100 };

    /// What a cell of 100 bytes at offset 1000 says about a fault.
    fn verdict(direction: Direction, fault: Fault, terms: Terms) -> Result<Vec<Entry>, String> {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let buffer = session.alloc(4096).unwrap();
        let clock = Clock::calibrate();
        let mut bench = Bench::new(terms, &buffer, Sampler::new(&clock, Duration::from_secs(1))).unwrap();
        let mut arena = vec![0; arena_bytes(terms.largest)];
        let cell = Cell { offset: 1000, bytes: 100, time: Duration::ZERO };
        bench.cell(&Faulty(&buffer, fault), direction, cell, &mut arena).map_err(|failure| failure.to_string())
    }

    #[test]
    fn right_data_passes_and_counts_as_verified() {
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            for (loops, count) in [(Loops::All, 2), (Loops::Cold, 1), (Loops::Sustained, 1)] {
                let entries = verdict(direction, Fault::None, Terms { loops, ..TERMS }).unwrap();
                assert_eq!(entries.len(), count);
                assert!(entries.iter().all(|entry| entry.verified && entry.bytes == 100 && entry.offset == 1000));
            }
        }
    }

    #[test]
    fn wrong_data_is_named_by_size_and_place() {
        use Direction::{DeviceToHost, HostToDevice};
        let table = [
            (HostToDevice, Fault::Short, "byte 99 of the copy is"),
            (HostToDevice, Fault::Long, "the byte 1 past the end of the copy was overwritten with 0xa5"),
            (HostToDevice, Fault::Early, "the byte 1 before the copy was overwritten with 0xa5"),
            (HostToDevice, Fault::Nothing, "byte 0 of the copy is"),
            (HostToDevice, Fault::Flip, "byte 50 of the copy is"),
            (DeviceToHost, Fault::Short, "byte 99 of the copy is"),
            (DeviceToHost, Fault::Nothing, "byte 0 of the copy is"),
            (DeviceToHost, Fault::Flip, "byte 49 of the copy is"),
        ];
        for (direction, fault, what) in table {
            let line = verdict(direction, fault, TERMS).unwrap_err();
            assert!(line.starts_with("wrong data: ") && line.contains(what), "{fault:?}: {line}");
            assert!(line.contains("100 bytes at offset 1000"), "{line}");
            let unchecked = verdict(direction, fault, Terms { verify: false, ..TERMS }).unwrap();
            assert!(unchecked.iter().all(|entry| !entry.verified));
        }
    }

    #[test]
    fn cells_do_not_share_patterns() {
        let mut seeds = std::collections::HashSet::new();
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            for method in [Bar1::NAME, Posted::NAME, CudaMemcpy::PINNED, CudaMemcpy::PAGEABLE] {
                for size in 0..=24 {
                    for offset in 0..64 {
                        let place = Place { direction, method, bytes: 1 << size, offset, threads: None };
                        assert!(seeds.insert(seed(place)), "{place:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_terms_in_words() {
        let row = Duration::from_millis(150);
        let terms = Terms { writes: None, reads: None, ..TERMS };
        assert_eq!(
            terms.in_words(row),
            "up to 100000 writes or up to 10000 reads in 150 ms (20 at least); data compared"
        );
        assert!(terms.in_words(row / 200).contains("in 750 us (20 at least)"));
        let exact = Terms { writes: Some(5), reads: Some(6), verify: false, ..TERMS };
        assert_eq!(exact.in_words(row), "exactly 5 writes or exactly 6 reads; data NOT compared");
        let one = Terms { writes: Some(5), reads: Some(0), ..TERMS };
        assert!(one.in_words(row).starts_with("exactly 5 writes; "));
        let mixed = Terms { writes: Some(5), reads: None, ..TERMS };
        assert!(mixed.in_words(row).starts_with("exactly 5 writes or up to 10000 reads in 150 ms"));
    }
}
