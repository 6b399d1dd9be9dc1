//! The CPU's end of the ring to the GPU.

use std::sync::Arc;
use std::time::Duration;

use super::control::Control;
use super::error::ChannelError;
use super::layout::{DeviceChannel, LENGTH, LINE_PAYLOAD, message_lines, slot};
use super::memory::Shared;
use super::post::LineStore;
use super::wait;
use crate::copy::fence;
use crate::error::{Error, ErrorKind};
use crate::sys::num::usize_of;

/// Sends messages to a kernel. One thread at a time; lines are posted without a fence and without any call. The last ones
/// may stay in the processor's write-combining buffers until it stores more: [`Sender::commit`] sees them off.
#[derive(Debug)]
pub struct Sender {
    pub(super) shared: Arc<Shared>,
    ring: *mut u8,
    /// Whether the ring's place is settled, which it is with the first line.
    is_settled: bool,
    store: LineStore,
    lines: u32,
    /// Number of the next line.
    next: u32,
    /// Lines that are known to have room.
    free: u32,
}

// SAFETY: the pointer leads into the shared memory, which may be used from any thread; the value itself is used by one at
// a time.
unsafe impl Send for Sender {}

impl Sender {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let (ring, store) = (shared.in_ring(), shared.store);
        let (lines, next) = (shared.device.in_lines, shared.device.in_start);
        let is_settled = shared.device.places == 1;
        Self { shared, ring, is_settled, store, lines, next, free: 0 }
    }

    /// What the kernel gets.
    #[must_use]
    pub fn device(&self) -> DeviceChannel {
        self.shared.device
    }

    /// What other threads may do with the channel.
    #[must_use]
    pub fn control(&self) -> Control {
        Control::new(Arc::clone(&self.shared))
    }

    /// Asks the kernel to end. It notices within about a millisecond while it waits.
    pub fn stop(&self) {
        self.shared.stop();
    }

    /// Whether every reader in the kernel has reported that it runs (or, since then, that it ended).
    #[must_use]
    pub fn kernel_has_started(&self) -> bool {
        self.shared.has_started()
    }

    /// Whether every reader in the kernel has reported its end.
    #[must_use]
    pub fn kernel_has_ended(&self) -> bool {
        self.shared.is_gone()
    }

    /// How many lines there is room for now.
    pub fn free_lines(&mut self) -> u32 {
        let readers = self.shared.device.readers;
        // The reader that is farthest behind decides. One that is ahead of the next line has credit past it.
        let ahead = |reader| self.shared.in_credit(reader).wrapping_sub(self.next).cast_signed();
        let behind = (0..readers).map(ahead).min().unwrap_or(0);
        let free = u32::try_from(i64::from(behind) + i64::from(self.lines)).unwrap_or(0).min(self.lines);
        if self.is_settled {
            self.free = free;
        }
        free
    }

    #[inline]
    pub(super) fn has_room(&mut self, lines: u32) -> bool {
        self.free >= lines || self.refresh() >= lines
    }

    /// After a message of so many lines: looks for room for another, if none is known. Who waits for an answer has the time; who
    /// sends next may have none, and the credit's line comes from memory when the GPU has written it.
    #[inline]
    pub(super) fn look_ahead(&mut self, lines: u32) {
        if self.free < lines {
            self.free_lines();
        }
    }

    /// Before a line for which no room is known, and so before the first one.
    fn refresh(&mut self) -> u32 {
        if !self.is_settled {
            self.ring = self.shared.in_ring();
            self.is_settled = true;
        }
        self.free_lines()
    }

    /// Posts the next line, for which there is room.
    #[inline]
    fn post(&mut self, payload: &[u8; LINE_PAYLOAD]) {
        let at = self.ring.wrapping_add(slot(self.next, self.lines));
        // SAFETY: a slot of the ring, which starts on a line; `Shared` checked the instructions.
        unsafe { self.store.line(at, self.next, payload) };
        self.next = self.next.wrapping_add(1);
        self.free -= 1;
    }

    /// Posts `head` and `data`, one after the other, as `lines` lines, for which there is room. `head` fits in one line.
    #[inline]
    pub(super) fn post_bytes(&mut self, head: &[u8], data: &[u8], lines: u32) {
        let end = self.next.wrapping_add(lines);
        let mut rest = data;
        if !head.is_empty() || data.is_empty() {
            let (first, later) = data.split_at(data.len().min(LINE_PAYLOAD - head.len()));
            let mut payload = [0; LINE_PAYLOAD];
            payload[..head.len()].copy_from_slice(head);
            payload[head.len()..head.len() + first.len()].copy_from_slice(first);
            self.post(&payload);
            rest = later;
        }
        let (whole, tail) = rest.as_chunks::<LINE_PAYLOAD>();
        for payload in whole {
            self.post(payload);
        }
        if !tail.is_empty() {
            let mut payload = [0; LINE_PAYLOAD];
            payload[..tail.len()].copy_from_slice(tail);
            self.post(&payload);
        }
        debug_assert_eq!(self.next, end, "as many lines as were counted");
    }

    /// Sees off what was sent: SFENCE, which empties the write-combining buffers of this core. The call returns before
    /// that; stores that follow wait for it, about 140 ns on PCIe Gen5. For the last message before a pause; a line that
    /// others follow at once is pushed out by them. Lines arrive whole and are told apart by their numbers either way.
    #[inline]
    pub fn commit(&self) {
        fence::store();
    }

    fn check_one_reader(&self) -> Result<(), ChannelError> {
        if self.shared.device.readers == 1 {
            return Ok(());
        }
        let cause = format!("{} warps receive, and a message of several lines goes to one", self.shared.device.readers);
        Err(Error::new("send", ErrorKind::InvalidArgument, cause)
            .remedy("send lines, or make a channel for each")
            .into())
    }

    /// Sends one line.
    ///
    /// # Errors
    ///
    /// `Full`; `Failed(WrongProcess)`.
    #[inline]
    pub fn try_send_line(&mut self, payload: &[u8; LINE_PAYLOAD]) -> Result<(), ChannelError> {
        self.shared.owner.check("send")?;
        if !self.has_room(1) {
            return Err(ChannelError::Full);
        }
        self.post(payload);
        self.look_ahead(1);
        Ok(())
    }

    /// Sends one line, waiting for room.
    ///
    /// # Errors
    ///
    /// `TimedOut`, `KernelGone`; `Failed(WrongProcess)`. Nothing was sent then.
    #[inline]
    pub fn send_line(&mut self, payload: &[u8; LINE_PAYLOAD], timeout: Duration) -> Result<(), ChannelError> {
        match self.try_send_line(payload) {
            Err(ChannelError::Full) => self.wait_for(1, timeout)?,
            done => return done,
        }
        self.post(payload);
        Ok(())
    }

    /// Sends as many of the lines, from the first on, as there is room for, and says how many.
    ///
    /// # Errors
    ///
    /// `Failed(WrongProcess)`.
    #[inline]
    pub fn try_send_lines(&mut self, payloads: &[[u8; LINE_PAYLOAD]]) -> Result<usize, ChannelError> {
        self.shared.owner.check("send")?;
        let wanted = u32::try_from(payloads.len()).unwrap_or(u32::MAX);
        if self.free < wanted {
            self.refresh();
        }
        let count = self.free.min(wanted);
        // In registers while the lines go out: each is a matter of three nanoseconds.
        let (ring, store, lines, mut number) = (self.ring, self.store, self.lines, self.next);
        for payload in &payloads[..usize_of(u64::from(count))] {
            // SAFETY: as in `post`.
            unsafe { store.line(ring.wrapping_add(slot(number, lines)), number, payload) };
            number = number.wrapping_add(1);
        }
        self.next = number;
        self.free -= count;
        Ok(usize_of(u64::from(count)))
    }

    /// Sends a message of any length up to half the ring, whole or not at all.
    ///
    /// # Errors
    ///
    /// `Full`; `Failed`: `OutOfBounds` for a longer message, `InvalidArgument` if several warps receive, `WrongProcess`.
    #[inline]
    pub fn try_send(&mut self, message: &[u8]) -> Result<(), ChannelError> {
        self.shared.owner.check("send")?;
        self.check_one_reader()?;
        let lines = message_lines("send", LENGTH, message.len(), self.lines)?;
        if !self.has_room(lines) {
            return Err(ChannelError::Full);
        }
        self.post_message(message, lines);
        Ok(())
    }

    /// Sends a message of any length up to half the ring, waiting for room.
    ///
    /// # Errors
    ///
    /// `TimedOut`, `KernelGone`: nothing was sent; otherwise as [`Sender::try_send`].
    #[inline]
    pub fn send(&mut self, message: &[u8], timeout: Duration) -> Result<(), ChannelError> {
        match self.try_send(message) {
            Err(ChannelError::Full) => {}
            done => return done,
        }
        let lines = message_lines("send", LENGTH, message.len(), self.lines)?;
        self.wait_for(lines, timeout)?;
        self.post_message(message, lines);
        Ok(())
    }

    fn post_message(&mut self, message: &[u8], lines: u32) {
        // Half a ring is less than 2^32 bytes.
        let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
        self.post_bytes(&length.to_le_bytes(), message, lines);
        self.look_ahead(lines);
    }

    fn wait_for(&mut self, lines: u32, timeout: Duration) -> Result<(), ChannelError> {
        // The kernel cannot make room before it has the lines that are there.
        self.commit();
        wait::until(self, |end| &end.shared, timeout, |end| Ok(end.has_room(lines).then_some(())))
    }
}
