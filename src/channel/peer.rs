//! The kernel's side on a CPU thread, on emulated GPUs: `ffi/include/gdrcopy_channel.cuh` once more, with a warp of one
//! lane. For tests and examples; no stable interface.

use std::hint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::latest::{DeviceLatest, SLOTS};
use super::layout::{
    BLOCK_LINES, DeviceChannel, ENDED, LENGTH, LINE, LINE_PAYLOAD, RUNNING, STATE_BITS, lines_of, slot,
};
use super::part;
use crate::sys::num::{u64_of, usize_of};

/// Waiting ended because the channel asked for it or its time was up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

type Outcome<T> = Result<T, Stopped>;

/// `gdrc_port`.
#[derive(Debug)]
pub struct Port {
    channel: DeviceChannel,
    reader: u32,
    in_next: u32,
    in_returned: u32,
    in_sub: u32,
    /// Where the first line may come as well.
    in_early: Option<u64>,
    out_next: u32,
    out_limit: u32,
    looks: u32,
    started: Instant,
}

fn pointer(addr: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize_of(addr))
}

impl Port {
    /// `gdrc_open`.
    ///
    /// # Safety
    ///
    /// `channel` comes from a channel on emulated GPUs, which lives longer than the port.
    #[must_use]
    pub unsafe fn open(channel: &DeviceChannel, reader: u32) -> Self {
        let in_next = channel.in_start.wrapping_add(reader * BLOCK_LINES);
        // No place is nearer than another here. The last one, which nobody takes by mistake.
        let place = channel.places - 1;
        let in_ring = channel.in_ring + u64::from(place) * u64_of(DeviceChannel::PLACE);
        let port = Self {
            channel: DeviceChannel { in_ring, ..*channel },
            reader,
            in_early: (place != 0).then_some(channel.in_ring),
            in_next,
            in_returned: in_next,
            in_sub: 0,
            out_next: channel.out_start,
            out_limit: channel.out_start.wrapping_add(channel.out_lines),
            looks: 0,
            started: Instant::now(),
        };
        port.state().store(RUNNING | place << STATE_BITS, Ordering::Relaxed);
        port
    }

    fn word(&self, addr: u64) -> &AtomicU32 {
        // SAFETY: an aligned word of the channel, which lives longer than the port by the duty of `open`.
        unsafe { AtomicU32::from_ptr(pointer(addr).cast()) }
    }

    fn state(&self) -> &AtomicU32 {
        self.word(self.channel.state + 4 * u64::from(self.reader))
    }

    /// `gdrc_is_over`, sooner: a thread of few has time.
    fn check(&mut self) -> Outcome<()> {
        self.looks = self.looks.wrapping_add(1);
        hint::spin_loop();
        if !self.looks.is_multiple_of(64) {
            return Ok(());
        }
        thread::yield_now();
        let limit = Duration::from_nanos(self.channel.limit_ns);
        let is_over = self.word(self.channel.stop).load(Ordering::Relaxed) != 0 || self.started.elapsed() > limit;
        if is_over { Err(Stopped) } else { Ok(()) }
    }

    fn return_credit(&mut self) {
        if self.in_next.wrapping_sub(self.in_returned) < self.channel.in_lines / 4 {
            return;
        }
        self.in_returned = self.in_next;
        let credit = self.word(self.channel.in_credit + 4 * u64::from(self.reader));
        credit.store(self.in_next, Ordering::Release);
    }

    /// `gdrc_find_place`, with every look until a line has come.
    fn find_place(&mut self) {
        let Some(early) = self.in_early else { return };
        let is_there = |ring: u64| {
            let at = pointer(ring).wrapping_add(slot(self.in_next, self.channel.in_lines));
            // SAFETY: a line of the ring, by the duty of `open`; the channel's maker checked for AVX.
            unsafe { part::load_line(at, self.in_next, &mut [0; LINE_PAYLOAD]) }
        };
        if is_there(self.channel.in_ring) {
            self.in_early = None;
        } else if is_there(early) {
            self.channel.in_ring = early;
            self.in_early = None;
        }
    }

    fn look(&mut self, number: u32, payload: &mut [u8; LINE_PAYLOAD]) -> bool {
        self.find_place();
        let at = pointer(self.channel.in_ring).wrapping_add(slot(number, self.channel.in_lines));
        // SAFETY: a line of the ring, by the duty of `open`; the channel's maker checked for AVX.
        unsafe { part::load_line(at, number, payload) }
    }

    fn wait_for(&mut self, number: u32) -> Outcome<[u8; LINE_PAYLOAD]> {
        let mut payload = [0; LINE_PAYLOAD];
        while !self.look(number, &mut payload) {
            self.check()?;
        }
        Ok(payload)
    }

    /// `gdrc_recv_lines`: as many lines as `to` fills.
    ///
    /// # Errors
    ///
    /// The end.
    pub fn recv_lines(&mut self, to: &mut [u8]) -> Outcome<()> {
        self.return_credit();
        let mut rest = &mut *to;
        let lines = u32::try_from(lines_of(rest.len())).unwrap_or(u32::MAX);
        for ahead in 0..lines {
            let payload = self.wait_for(self.in_next.wrapping_add(ahead))?;
            let (now, later) = rest.split_at_mut(rest.len().min(LINE_PAYLOAD));
            now.copy_from_slice(&payload[..now.len()]);
            rest = later;
        }
        self.in_next = self.in_next.wrapping_add(lines);
        Ok(())
    }

    /// `gdrc_recv`.
    ///
    /// # Errors
    ///
    /// The end.
    pub fn recv(&mut self) -> Outcome<Vec<u8>> {
        self.return_credit();
        let [a, b, c, d, ..] = self.wait_for(self.in_next)?;
        let bytes = usize_of(u64::from(u32::from_le_bytes([a, b, c, d])));
        let mut message = vec![0; LENGTH + bytes];
        self.recv_lines(&mut message)?;
        Ok(message.split_off(LENGTH))
    }

    /// `gdrc_recv_own_line`.
    ///
    /// # Errors
    ///
    /// The end.
    pub fn recv_own_line(&mut self) -> Outcome<[u8; LINE_PAYLOAD]> {
        self.return_credit();
        let payload = self.wait_for(self.in_next.wrapping_add(self.in_sub))?;
        self.in_sub += 1;
        if self.in_sub == BLOCK_LINES {
            self.in_sub = 0;
            self.in_next = self.in_next.wrapping_add(BLOCK_LINES * self.channel.readers);
        }
        Ok(payload)
    }

    /// `gdrc_send_lines`.
    ///
    /// # Errors
    ///
    /// The end.
    pub fn send_lines(&mut self, data: &[u8]) -> Outcome<()> {
        let lines = u32::try_from(lines_of(data.len())).unwrap_or(u32::MAX);
        while self.out_limit.wrapping_sub(self.out_next) < lines {
            let credit = self.word(self.channel.out_credit).load(Ordering::Acquire);
            self.out_limit = credit.wrapping_add(self.channel.out_lines);
            self.check()?;
        }
        let mut rest = data;
        for _ in 0..lines {
            let mut payload = [0; LINE_PAYLOAD];
            let (now, later) = rest.split_at(rest.len().min(LINE_PAYLOAD));
            payload[..now.len()].copy_from_slice(now);
            rest = later;
            let at = pointer(self.channel.out_ring).wrapping_add(slot(self.out_next, self.channel.out_lines));
            // SAFETY: a line of the ring, by the duty of `open`; the channel's maker checked for AVX.
            unsafe { part::store_line(at, self.out_next, &payload) };
            self.out_next = self.out_next.wrapping_add(1);
        }
        Ok(())
    }

    /// `gdrc_send`.
    ///
    /// # Errors
    ///
    /// The end.
    pub fn send(&mut self, message: &[u8]) -> Outcome<()> {
        let length = u32::try_from(message.len()).map_err(|_| Stopped)?;
        self.send_lines(&[&length.to_le_bytes(), message].concat())
    }
}

/// `gdrc_close`.
impl Drop for Port {
    fn drop(&mut self) {
        self.state().store(ENDED, Ordering::Release);
    }
}

/// A kernel that answers the requests of a [`Mailbox`](super::Mailbox) until the channel asks it to end.
///
/// # Safety
///
/// As [`Port::open`].
pub unsafe fn answer<Req: FromBytes + IntoBytes, Resp: IntoBytes + Immutable>(
    channel: &DeviceChannel,
    mut answer: impl FnMut(&Req) -> Resp,
) {
    // SAFETY: the caller's duty.
    let mut port = unsafe { Port::open(channel, 0) };
    let mut request = Req::new_zeroed();
    while port.recv_lines(request.as_mut_bytes()).is_ok() {
        if port.send_lines(answer(&request).as_bytes()).is_err() {
            break;
        }
    }
}

/// `gdrc_latest_read`, for one lane.
#[derive(Debug)]
pub struct LatestReader {
    latest: DeviceLatest,
    version: u32,
}

impl LatestReader {
    /// Before the first look.
    ///
    /// # Safety
    ///
    /// `latest` comes from a [`Latest`](super::Latest) on emulated GPUs, which lives longer than the reader.
    #[must_use]
    pub unsafe fn new(latest: &DeviceLatest) -> Self {
        Self { latest: *latest, version: latest.start.wrapping_sub(1) }
    }

    /// Fills `to` with the newest value, if it is newer than the one before and is not being written.
    pub fn read<T: FromBytes + IntoBytes>(&mut self, to: &mut T) -> bool {
        let slots = pointer(self.latest.slots);
        let mut newest = self.version;
        for slot in 0..SLOTS {
            // SAFETY: the first line of a slot, by the duty of `new`.
            let found = unsafe { part::load_number(slots.wrapping_add(self.latest.slot(slot))) };
            if found.wrapping_sub(newest).cast_signed() > 0 {
                newest = found;
            }
        }
        if newest == self.version {
            return false;
        }
        let mut at = slots.wrapping_add(self.latest.slot(newest));
        for chunk in to.as_mut_bytes().chunks_mut(LINE_PAYLOAD) {
            let mut payload = [0; LINE_PAYLOAD];
            // SAFETY: a line of the slot, by the duty of `new`.
            if !unsafe { part::load_line(at, newest, &mut payload) } {
                return false;
            }
            chunk.copy_from_slice(&payload[..chunk.len()]);
            at = at.wrapping_add(LINE);
        }
        self.version = newest;
        true
    }
}
