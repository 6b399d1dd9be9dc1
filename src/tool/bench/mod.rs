//! One row of a table: copies of one size at one offset, timed and then compared byte by byte.

mod terms;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::time::Duration;

use memmap2::MmapMut;

pub use terms::{Loops, Terms};

use super::fail::Failure;
use super::interrupt;
use super::measure::{Amount, Measured, Sampler};
use super::method::Method;
use super::pattern;
use super::report::{Direction, Entry, Metric, Place};
use crate::buffer::DeviceBuffer;
use crate::error::Result as LibraryResult;
use crate::sys::num::u64_of;

/// Bytes on either side of a copy that must not change.
const GUARD: usize = 64;
/// Where the data lies in a cell's host memory: a page boundary, with room for the guard before it.
pub const DATA_AT: usize = 4096;
/// Seed of the bytes around the data.
const GUARD_SEED: u64 = u64::MAX;

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

    /// Whether a row of this method has a loop of calls back to back, and loops of single calls.
    fn loops<M: Method>(&self, method: &M) -> (bool, bool) {
        let is_sustained = matches!(self.terms.loops, Loops::All | Loops::Sustained) && method.sustains();
        (is_sustained, self.terms.loops != Loops::Sustained || !method.sustains())
    }

    /// The copies of each loop of a cell.
    fn amount<M: Method>(&self, method: &M, direction: Direction, cell: Cell) -> Amount {
        let (is_sustained, has_singles) = self.loops(method);
        let singles = if has_singles { method.singles(direction).len() } else { 0 };
        let time = cell.time / u32::try_from(usize::from(is_sustained) + singles).unwrap_or(u32::MAX);
        match self.terms.amount(direction, time) {
            Amount::Exactly(n) if self.terms.loops == Loops::Single => Amount::UpTo(n, time),
            amount => amount,
        }
    }

    /// Single calls of `op`, each after `chill` where caches are to be cold.
    fn single<S: ?Sized>(
        &mut self,
        amount: Amount,
        subject: &mut S,
        mut chill: impl FnMut(&S),
        op: impl FnMut(&mut S) -> LibraryResult<()>,
    ) -> LibraryResult<Measured> {
        match self.terms.loops {
            Loops::Cold => self.sampler.single(amount, subject, |subject| chill(subject), op),
            _ => self.sampler.single(amount, subject, |_| (), op),
        }
    }

    fn time_writes<M: Method>(&mut self, method: &M, cell: Cell, arena: &mut [u8]) -> Result<Vec<Entry>, Failure> {
        let Cell { offset, bytes, .. } = cell;
        let place = place(method, Direction::HostToDevice, cell);
        let verify = self.terms.verify;
        pattern::fill(&mut arena[DATA_AT..DATA_AT + bytes], seed(place));
        method.lend(&arena[..DATA_AT + bytes]);
        let source = &arena[DATA_AT..DATA_AT + bytes];

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
        let (is_sustained, has_singles) = self.loops(method);
        let per_call = self.sampler.warm_up(amount, || method.write(offset, source))?;
        let mut entries = Vec::with_capacity(3);
        if is_sustained {
            let write = || method.write(offset, source);
            let sustained = self.sampler.batched(amount, per_call, write, || method.close())?;
            entries.push(Entry::new(place, Metric::Sustained, &sustained, verify));
        }
        if has_singles {
            for &metric in method.singles(Direction::HostToDevice) {
                let write = |(): &mut ()| method.single_write(metric, offset, source);
                let single = self.single(amount, &mut (), |()| method.chill(source), write)?;
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
        let verify = self.terms.verify;
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
            method.lend(&arena[..stretch.end]);
        }

        let amount = self.amount(method, Direction::DeviceToHost, cell);
        let (is_sustained, has_singles) = self.loops(method);
        let target = &mut arena[DATA_AT..DATA_AT + bytes];
        let per_call = self.sampler.warm_up(amount, || method.read(offset, target))?;
        let mut entries = Vec::with_capacity(2);
        if is_sustained {
            let sustained = self.sampler.sustained(amount, per_call, || method.read(offset, target))?;
            entries.push(Entry::new(place, Metric::Sustained, &sustained, verify));
        }
        if has_singles {
            for &metric in method.singles(Direction::DeviceToHost) {
                let read = |target: &mut [u8]| method.read(offset, target);
                let single = self.single(amount, target, |target| method.chill(target), read)?;
                let mut entry = Entry::new(place, metric, &single, verify);
                entry.figures.deduct(method.deducted_ns());
                entries.push(entry);
            }
        }

        if verify {
            method.give_back(&mut arena[..stretch.end]);
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
