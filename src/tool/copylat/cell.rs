//! One row of a table: copies of one size at one offset, timed and then compared byte by byte.

use std::ops::Range;
use std::time::Duration;

use memmap2::MmapMut;

use super::args::Plan;
use super::method::Method;
use crate::buffer::DeviceBuffer;
use crate::sys::num::u64_of;
use crate::tool::cpu::flush_lines;
use crate::tool::fail::Failure;
use crate::tool::measure::Sampler;
use crate::tool::pattern;
use crate::tool::report::{Direction, Entry, Metric, Place};

/// Bytes on either side of a copy that must not change.
const GUARD: usize = 64;
/// Where the data lies in host memory: a page boundary, with room for the guard before it.
const DATA_AT: usize = 4096;
/// Seed of the bytes around the data.
const GUARD_SEED: u64 = u64::MAX;

/// Bytes of host memory that cells of up to `largest` bytes need.
pub(super) fn arena_bytes(largest: usize) -> usize {
    DATA_AT + largest + GUARD
}

/// Page-aligned host memory, present and private.
pub(super) fn host_memory(bytes: usize) -> Result<MmapMut, Failure> {
    let mut memory = MmapMut::map_anon(bytes).map_err(|error| {
        Failure::run(format!("no host memory for copies of that size ({error}); name smaller --sizes"))
    })?;
    memory.fill(0);
    Ok(memory)
}

/// Measures cells one after the other.
#[derive(Debug)]
pub(super) struct Bench<'a> {
    plan: &'a Plan,
    buffer: &'a DeviceBuffer,
    pub(super) sampler: Sampler<'a>,
    /// What a stretch of memory should hold: guard, data, guard.
    expected: MmapMut,
    scratch: MmapMut,
}

/// Offset and size of the copies of one cell, and how long each of its loops may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cell {
    pub(super) offset: usize,
    pub(super) bytes: usize,
    pub(super) time: Duration,
}

impl<'a> Bench<'a> {
    pub(super) fn new(plan: &'a Plan, buffer: &'a DeviceBuffer, sampler: Sampler<'a>) -> Result<Self, Failure> {
        let len = if plan.verify { plan.largest() + 2 * GUARD } else { 1 };
        Ok(Self { plan, buffer, sampler, expected: host_memory(len)?, scratch: host_memory(len)? })
    }

    /// Times and compares one cell. `arena` is host memory of [`arena_bytes`], page aligned.
    pub(super) fn cell<M: Method>(
        &mut self,
        method: &M,
        direction: Direction,
        cell: Cell,
        arena: &mut [u8],
    ) -> Result<Vec<Entry>, Failure> {
        match direction {
            Direction::HostToDevice => self.time_writes(method, cell, arena),
            Direction::DeviceToHost => self.time_reads(method, cell, arena),
        }
    }

    fn time_writes<M: Method>(&mut self, method: &M, cell: Cell, arena: &mut [u8]) -> Result<Vec<Entry>, Failure> {
        let Cell { offset, bytes, .. } = cell;
        let place = place::<M>(Direction::HostToDevice, cell);
        let source = &mut arena[DATA_AT..DATA_AT + bytes];
        pattern::fill(source, seed(place));
        let source = &*source;

        // The device's side: guard, something else than the data in every byte, guard.
        let stretch = offset.saturating_sub(GUARD)..(offset + bytes + GUARD).min(self.buffer.len());
        let data = offset - stretch.start..offset - stretch.start + bytes;
        if self.plan.verify {
            let expected = &mut self.expected[..stretch.len()];
            pattern::fill(expected, GUARD_SEED);
            pattern::fill_complement(&mut expected[data.clone()], source);
            self.buffer.upload(stretch.start, expected)?;
            expected[data.clone()].copy_from_slice(source);
        }

        let amount = self.plan.amount(Direction::HostToDevice, cell.time);
        let per_call = self.sampler.warm_up(amount, || method.write(offset, source))?;
        let mut entries = Vec::with_capacity(2);
        if self.plan.cold {
            let flush = |(): &mut ()| flush_lines(source);
            let single = self.sampler.single(amount, &mut (), flush, |()| method.write(offset, source))?;
            entries.push(Entry::new(place, Metric::Single, &single, self.plan.verify));
        } else {
            let sustained = self.sampler.sustained(amount, per_call, || method.write(offset, source))?;
            let single = self.sampler.single(amount, &mut (), |()| (), |()| method.write(offset, source))?;
            entries.push(Entry::new(place, Metric::Sustained, &sustained, self.plan.verify));
            entries.push(Entry::new(place, Metric::Single, &single, self.plan.verify));
        }

        if self.plan.verify {
            method.settle()?;
            let found = &mut self.scratch[..stretch.len()];
            self.buffer.download(stretch.start, found)?;
            compare(place, found, &self.expected[..stretch.len()], data)?;
        }
        Ok(entries)
    }

    fn time_reads<M: Method>(&mut self, method: &M, cell: Cell, arena: &mut [u8]) -> Result<Vec<Entry>, Failure> {
        let Cell { offset, bytes, .. } = cell;
        let place = place::<M>(Direction::DeviceToHost, cell);
        let stretch = DATA_AT - GUARD..DATA_AT + bytes + GUARD;
        let data = GUARD..GUARD + bytes;
        if self.plan.verify {
            let expected = &mut self.expected[..stretch.len()];
            pattern::fill(expected, GUARD_SEED);
            pattern::fill(&mut expected[data.clone()], seed(place));
            self.buffer.upload(offset, &expected[data.clone()])?;
            // The host's side: guard, something else than the data in every byte, guard.
            let host = &mut arena[stretch.clone()];
            host.copy_from_slice(expected);
            pattern::fill_complement(&mut host[data.clone()], &expected[data.clone()]);
        }

        let amount = self.plan.amount(Direction::DeviceToHost, cell.time);
        let target = &mut arena[DATA_AT..DATA_AT + bytes];
        let per_call = self.sampler.warm_up(amount, || method.read(offset, target))?;
        let mut entries = Vec::with_capacity(2);
        if self.plan.cold {
            let flush = |target: &mut [u8]| flush_lines(target);
            let single = self.sampler.single(amount, target, flush, |target| method.read(offset, target))?;
            entries.push(Entry::new(place, Metric::Single, &single, self.plan.verify));
        } else {
            let sustained = self.sampler.sustained(amount, per_call, || method.read(offset, target))?;
            let single = self.sampler.single(amount, target, |_| (), |target| method.read(offset, target))?;
            entries.push(Entry::new(place, Metric::Sustained, &sustained, self.plan.verify));
            entries.push(Entry::new(place, Metric::Single, &single, self.plan.verify));
        }

        if self.plan.verify {
            compare(place, &arena[stretch.clone()], &self.expected[..stretch.len()], data)?;
        }
        Ok(entries)
    }
}

fn place<M: Method>(direction: Direction, cell: Cell) -> Place {
    Place { direction, method: M::NAME, bytes: u64_of(cell.bytes), offset: u64_of(cell.offset) }
}

/// A pattern of its own for every cell, so that what an earlier one left behind does not pass.
fn seed(place: Place) -> u64 {
    let direction = u64::from(place.direction == Direction::DeviceToHost);
    let method = place.method.bytes().fold(0, |hash: u64, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
    (place.bytes << 24) ^ (place.offset << 1) ^ direction ^ (method << 44)
}

fn compare(place: Place, found: &[u8], expected: &[u8], data: Range<usize>) -> Result<(), Failure> {
    let Some((at, got, want)) = pattern::first_difference(found, expected) else { return Ok(()) };
    let Place { direction, method, bytes, offset } = place;
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
    use clap::Parser;

    use super::super::args::Args;
    use super::super::method::{Bar1, CudaMemcpy};
    use super::*;
    use crate::backend::BackendKind;
    use crate::error::Result as LibraryResult;
    use crate::session::Session;
    use crate::tool::clock::Clock;

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
        const NAME: &'static str = "faulty";

        fn describe(_: Direction) -> &'static str {
            "a copy with a fault"
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

    /// What a cell of 100 bytes at offset 1000 says about a fault.
    fn verdict(direction: Direction, fault: Fault, flags: &[&str]) -> Result<Vec<Entry>, String> {
        let args = ["copylat", "--sizes", "100", "--offsets", "1000", "-s", "4K", "-w", "3", "-r", "3"];
        let plan = Plan::new(&Args::try_parse_from(args.iter().chain(flags)).unwrap()).unwrap();
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let buffer = session.alloc(plan.buffer).unwrap();
        let clock = Clock::calibrate();
        let mut bench = Bench::new(&plan, &buffer, Sampler::new(&clock, Duration::from_secs(1))).unwrap();
        let mut arena = vec![0; arena_bytes(plan.largest())];
        let cell = Cell { offset: 1000, bytes: 100, time: Duration::ZERO };
        bench.cell(&Faulty(&buffer, fault), direction, cell, &mut arena).map_err(|failure| failure.to_string())
    }

    #[test]
    fn right_data_passes_and_counts_as_verified() {
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            for flags in [&[][..], &["-C"]] {
                let entries = verdict(direction, Fault::None, flags).unwrap();
                assert_eq!(entries.len(), 2 - flags.len());
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
            let line = verdict(direction, fault, &[]).unwrap_err();
            assert!(line.starts_with("wrong data: ") && line.contains(what), "{fault:?}: {line}");
            assert!(line.contains("100 bytes at offset 1000"), "{line}");
            let unchecked = verdict(direction, fault, &["--no-verify"]).unwrap();
            assert!(unchecked.iter().all(|entry| !entry.verified));
        }
    }

    #[test]
    fn cells_do_not_share_patterns() {
        let mut seeds = std::collections::HashSet::new();
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            for method in [Bar1::NAME, CudaMemcpy::NAME] {
                for size in 0..=24 {
                    for offset in 0..64 {
                        let place = Place { direction, method, bytes: 1 << size, offset };
                        assert!(seeds.insert(seed(place)), "{place:?}");
                    }
                }
            }
        }
    }
}
