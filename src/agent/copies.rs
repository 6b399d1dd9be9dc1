//! Reads and writes of any host memory.

use super::bounce::{SLOT, SLOTS};
use super::link::Link;
use super::memory::HostMemory;
use super::push::PushAgent;
use super::wire::{MAX_BYTES, Order, index, low};
use crate::error::Result;
use crate::sys::num::u64_of;

/// What one doorbell brings of a write from memory that the kernel does not reach: little, for nothing is under way while the
/// first is copied.
const PIECE: usize = 32 << 10;

impl PushAgent<'_> {
    /// Reads `to.len()` bytes from byte `offset` of registered range `range` into any memory.
    ///
    /// Up to [`AgentOptions::packet_bytes`](super::AgentOptions::packet_bytes) come as packets with sequence numbers. More
    /// are written by the kernel itself where it [reaches](Self::reaches) the memory: a [host buffer](Self::host_buffer), or
    /// memory that was [registered](Self::register_host). Otherwise they come in pieces through page-locked memory inside
    /// the agent, each copied out while the kernel pushes the next.
    ///
    /// # Errors
    ///
    /// `OutOfBounds`, `WrongProcess`: nothing was read. `Busy` if the kernel neither answered nor started within
    /// [`AgentOptions::deadline`](super::AgentOptions::deadline), or what CUDA reports. Where the kernel was asked to write the
    /// memory itself, that is taken back then, and the call waits, for another deadline at most, until the kernel is not at
    /// work on it any more. (If it does not stop, which a GPU that hangs would not, a host buffer is given up: its length
    /// is 0.)
    #[inline]
    pub fn read(&mut self, range: usize, offset: usize, to: &mut [u8]) -> Result<()> {
        let source = self.device(range, offset, to.len())?;
        if to.is_empty() {
            return Ok(());
        }
        if to.len() > self.packet_bytes {
            // The kernel's address stands for this slice from here on.
            let host = to.as_mut_ptr().expose_provenance();
            return match self.parts.reach.find(host, to.len()) {
                Some(target) => self.carry(Order::Copy, source, target, to.len(), host),
                None => self.read_pieces(source, to),
            };
        }
        let bytes = u32::try_from(to.len()).unwrap_or(u32::MAX);
        let link = &mut self.parts.link;
        let number = link.ring(Order::Send, source, 0, bytes)?;
        link.take_packets(number, to)
    }

    /// As [`PushAgent::read`], as if the kernel did not reach the memory.
    pub(crate) fn read_by_bounce(&mut self, range: usize, offset: usize, to: &mut [u8]) -> Result<()> {
        let source = self.device(range, offset, to.len())?;
        if to.len() > self.packet_bytes { self.read_pieces(source, to) } else { self.read(range, offset, to) }
    }

    /// Lets the kernel copy between two places that it reaches, one of them at `host` for the CPU, and waits.
    #[inline]
    fn carry(&mut self, order: Order, source: u64, target: u64, bytes: usize, host: usize) -> Result<()> {
        let link = &mut self.parts.link;
        link.check()?;
        let outcome = ring_for(link, order, source, target, bytes).and_then(|number| link.wait(number));
        if outcome.is_err() {
            self.withdraw(host);
        }
        outcome
    }

    /// After an error: sees to it that the kernel leaves the host memory alone, or gives that up.
    #[cold]
    fn withdraw(&mut self, host: usize) {
        if !self.parts.link.retract() {
            let is_in = |memory: &HostMemory| memory.ptr().addr() <= host && host - memory.ptr().addr() < memory.len();
            self.parts.buffers.iter().filter(|memory| is_in(memory)).for_each(|memory| memory.abandon());
        }
    }

    fn read_pieces(&mut self, source: u64, to: &mut [u8]) -> Result<()> {
        let parts = &mut *self.parts;
        // Pieces begin at multiples of 64: all have the first one's place in a line.
        let skip = index(low(source & 63));
        let place = |piece: usize| SLOT * (piece % SLOTS) + skip;
        let pieces = self.bounce.pieces(to.len());
        let (mut ahead, mut numbers, mut rung) = (pieces, [0; SLOTS], 0);
        for (taken, (start, bytes)) in pieces.enumerate() {
            while rung < taken + SLOTS {
                let Some((start, bytes)) = ahead.next() else { break };
                let target = parts.bounce.addr() + u64_of(place(rung));
                let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
                numbers[rung % SLOTS] = parts.link.ring(Order::CopyAndAnswer, source + u64_of(start), target, bytes)?;
                rung += 1;
            }
            parts.link.wait(numbers[taken % SLOTS])?;
            let from = parts.bounce.ptr().wrapping_add(place(taken)).cast_const();
            // SAFETY: a piece inside the bounce memory, which the kernel wrote and, until it is rung for again, leaves alone; `to`
            // is a slice of its own.
            unsafe { to[start..start + bytes].as_mut_ptr().copy_from_nonoverlapping(from, bytes) };
        }
        Ok(())
    }

    /// Writes `from` at byte `offset` of registered range `range`, from any memory. Where the kernel
    /// [reaches](Self::reaches) it, it fetches the bytes itself. Otherwise they are copied to page-locked memory inside the
    /// agent, and fetched from there while the rest is copied.
    ///
    /// # Errors
    ///
    /// As [`PushAgent::read`].
    #[inline]
    pub fn write(&mut self, range: usize, offset: usize, from: &[u8]) -> Result<()> {
        let target = self.device(range, offset, from.len())?;
        if from.is_empty() {
            return Ok(());
        }
        let host = from.as_ptr().expose_provenance();
        match self.parts.reach.find(host, from.len()) {
            Some(source) => self.carry(Order::Bulk, source, target, from.len(), host),
            None => self.write_pieces(target, from),
        }
    }

    /// As [`PushAgent::write`], as if the kernel did not reach the memory.
    pub(crate) fn write_by_bounce(&mut self, range: usize, offset: usize, from: &[u8]) -> Result<()> {
        let target = self.device(range, offset, from.len())?;
        self.write_pieces(target, from)
    }

    fn write_pieces(&mut self, target: u64, from: &[u8]) -> Result<()> {
        let parts = &mut *self.parts;
        let skip = index(low(target & 63));
        let mut numbers = [0; SLOTS];
        let mut last = None;
        for (n, piece) in from.chunks(PIECE).enumerate() {
            if n >= SLOTS {
                parts.link.wait(numbers[n % SLOTS])?;
            }
            let place = SLOT * (n % SLOTS) + skip;
            // SAFETY: a piece inside the bounce memory, which the kernel does not use: what was rung for it is answered.
            unsafe { parts.bounce.ptr().wrapping_add(place).copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
            let (source, target) = (parts.bounce.addr() + u64_of(place), target + u64_of(n * PIECE));
            let bytes = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            numbers[n % SLOTS] = parts.link.ring(Order::BulkAndAnswer, source, target, bytes)?;
            last = Some(numbers[n % SLOTS]);
        }
        last.map_or(Ok(()), |number| parts.link.wait(number))
    }
}

/// Rings for bytes between two places that the kernel reaches; the request with the number returned is answered after all.
#[inline]
fn ring_for(link: &mut Link<'_>, order: Order, source: u64, target: u64, bytes: usize) -> Result<u32> {
    let mut start = 0;
    loop {
        let left = bytes - start;
        let (order, piece) = if left > MAX_BYTES { (order, MAX_BYTES) } else { (order.answered(), left) };
        let (source, target) = (source + u64_of(start), target + u64_of(start));
        let number = link.ring(order, source, target, u32::try_from(piece).unwrap_or(u32::MAX))?;
        start += piece;
        if start == bytes {
            return Ok(number);
        }
    }
}
