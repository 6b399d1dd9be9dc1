//! The CPU's end of the ring from the GPU.

use std::sync::Arc;
use std::time::Duration;

use super::error::ChannelError;
use super::layout::{LENGTH, LINE_PAYLOAD, message_lines, slot};
use super::memory::Shared;
use super::part;
use super::wait;
use crate::copy::fence;
use crate::error::{Error, ErrorKind};
use crate::sys::num::usize_of;

/// Receives messages from a kernel. One thread at a time; receiving is loads of host memory, and now and then one store
/// into GPU memory, which returns credit.
#[derive(Debug)]
pub struct Receiver {
    pub(super) shared: Arc<Shared>,
    ring: *const u8,
    lines: u32,
    /// Number of the first line that was not consumed.
    next: u32,
    /// The credit returned last.
    returned: u32,
}

// SAFETY: the pointer leads into the shared memory, which may be used from any thread; the value itself is used by one at
// a time.
unsafe impl Send for Receiver {}

impl Receiver {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let (ring, lines, next) = (shared.out_ring(), shared.device.out_lines, shared.device.out_start);
        Self { shared, ring, lines, next, returned: next }
    }

    /// The payload of the line `ahead` lines after the next one, if it is there.
    #[inline]
    fn look(&self, ahead: u32, payload: &mut [u8; LINE_PAYLOAD]) -> bool {
        let number = self.next.wrapping_add(ahead);
        let at = self.ring.wrapping_add(slot(number, self.lines));
        // SAFETY: a slot of the ring in host memory, which starts on a line; `Shared` checked for AVX.
        unsafe { part::load_line(at, number, payload) }
    }

    /// The bytes of the next `lines` lines after the first `skip` ones, as many as `to` takes, if all the lines are there.
    #[inline]
    pub(super) fn look_at_bytes(&self, lines: u32, skip: usize, to: &mut [u8]) -> bool {
        let mut payload = [0; LINE_PAYLOAD];
        let (mut left, mut skip) = (to, skip);
        for ahead in 0..lines {
            if !self.look(ahead, &mut payload) {
                return false;
            }
            let share = &payload[skip..];
            skip = 0;
            let (now, later) = left.split_at_mut(share.len().min(left.len()));
            now.copy_from_slice(&share[..now.len()]);
            left = later;
        }
        true
    }

    /// Gives `lines` lines back, the credit for them once they are a quarter of the ring.
    #[inline]
    pub(super) fn consume(&mut self, lines: u32) {
        self.next = self.next.wrapping_add(lines);
        if self.next.wrapping_sub(self.returned) >= self.lines / 4 {
            self.returned = self.next;
            // The loads before it are done: x86 stores do not pass them.
            // SAFETY: the credit's line in GPU memory; `Shared` checked the instructions.
            unsafe { self.shared.store.word(self.shared.far_ptr(), self.next) };
            // The kernel may be waiting for it, and this thread may store nothing else for long.
            fence::store();
        }
    }

    /// Receives one line, if one is there.
    ///
    /// # Errors
    ///
    /// `Failed(WrongProcess)`.
    #[inline]
    pub fn try_recv_line(&mut self) -> Result<Option<[u8; LINE_PAYLOAD]>, ChannelError> {
        self.shared.owner.check("receive")?;
        let mut payload = [0; LINE_PAYLOAD];
        if !self.look(0, &mut payload) {
            return Ok(None);
        }
        self.consume(1);
        Ok(Some(payload))
    }

    /// Receives one line, waiting for it.
    ///
    /// # Errors
    ///
    /// `TimedOut`, `KernelGone`; `Failed(WrongProcess)`.
    #[inline]
    pub fn recv_line(&mut self, timeout: Duration) -> Result<[u8; LINE_PAYLOAD], ChannelError> {
        wait::until(self, |end| &end.shared, timeout, Self::try_recv_line)
    }

    /// Receives a message with its length into the beginning of `to`, if a whole one is there, and says how long it is.
    ///
    /// # Errors
    ///
    /// `Failed`: `OutOfBounds` if `to` is too short, and the message stays; `UnknownLayout` for what is no message, sent
    /// by a kernel that sends lines; `WrongProcess`. What `to` holds without a message is not specified.
    #[inline]
    pub fn try_recv(&mut self, to: &mut [u8]) -> Result<Option<usize>, ChannelError> {
        self.shared.owner.check("receive")?;
        let mut payload = [0; LINE_PAYLOAD];
        if !self.look(0, &mut payload) {
            return Ok(None);
        }
        let [a, b, c, d, ..] = payload;
        let bytes = usize_of(u64::from(u32::from_le_bytes([a, b, c, d])));
        let lines = message_lines("receive", LENGTH, bytes, self.lines).map_err(|_| self.no_message(bytes))?;
        let Some(room) = to.get_mut(..bytes) else {
            let cause = format!("the message has {bytes} bytes, and there is room for {}", to.len());
            return Err(Error::new("receive", ErrorKind::OutOfBounds, cause).remedy("pass a longer slice").into());
        };
        if !self.look_at_bytes(lines, LENGTH, room) {
            return Ok(None);
        }
        self.consume(lines);
        Ok(Some(bytes))
    }

    #[cold]
    fn no_message(&self, bytes: usize) -> Error {
        let cause = format!("a length of {bytes} bytes cannot be, with a ring of {} lines", self.lines);
        Error::new("receive", ErrorKind::UnknownLayout, cause)
            .remedy("have the kernel send with gdrc_send, or receive lines here")
    }

    /// Receives a message with its length, waiting for it.
    ///
    /// # Errors
    ///
    /// `TimedOut`, `KernelGone`; otherwise as [`Receiver::try_recv`].
    #[inline]
    pub fn recv(&mut self, to: &mut [u8], timeout: Duration) -> Result<usize, ChannelError> {
        wait::until(self, |end| &end.shared, timeout, |end| end.try_recv(to))
    }
}
