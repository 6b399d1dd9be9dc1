//! Sizes and places that both sides agree on. The C twin is `ffi/include/gdrcopy_channel.cuh`.

use crate::error::{Error, ErrorKind, Result};
use crate::sys::num::usize_of;

/// Bytes of payload in a line.
pub const LINE_PAYLOAD: usize = 48;

pub(crate) const LINE: usize = 64;
pub(crate) const PART: usize = 16;
pub(crate) const PARTS: usize = LINE / PART;
/// Bytes of payload in a part.
pub(crate) const PART_PAYLOAD: usize = PART - 4;
/// Lines that one of several readers takes at a time.
pub(crate) const BLOCK_LINES: u32 = 32;
/// Bytes before the data of a message with a length.
pub(crate) const LENGTH: usize = 4;

/// `gdrc_state`.
#[cfg_attr(not(test), allow(dead_code, reason = "what a kernel stores"))]
pub(crate) const RUNNING: u32 = 1;
pub(crate) const ENDED: u32 = 2;
/// Above it in the state of a kernel that runs: the place it took for the ring.
pub(crate) const STATE_BITS: u32 = 8;

/// Places that a short ring has, half of which are near to an SM, as a rule. They are measured when a kernel starts, two
/// microseconds each.
const PLACES: u32 = 8;

/// Lines that fill a place.
const PLACE_LINES: u32 = 64;
const _: () = assert!(LINE * 64 == DeviceChannel::PLACE);

/// Places for a ring of so many lines: several for the shortest, which leaves room in each for what is measured with.
pub(crate) const fn places(lines: u32, readers: u32) -> u32 {
    if readers == 1 && lines < PLACE_LINES { PLACES } else { 1 }
}

/// A channel as a kernel gets it: `struct gdrc_channel` in C, passed by value.
///
/// Addresses are those by which a kernel reaches the memory; on emulated GPUs, where a thread takes the kernel's place,
/// they are addresses of this process. They are valid while the [`Sender`](super::Sender) or the
/// [`Receiver`](super::Receiver) lives.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceChannel {
    /// GPU memory: lines from the CPU.
    pub in_ring: u64,
    /// Host memory, a `u32` for each reader: number of the first line that it has not consumed.
    pub in_credit: u64,
    /// Host memory: lines to the CPU.
    pub out_ring: u64,
    /// GPU memory, `u32`: number of the first line that the CPU has not consumed.
    pub out_credit: u64,
    /// GPU memory, `u32`: not 0 asks the kernel to end.
    pub stop: u64,
    /// Host memory, a `u32` for each reader: 1 once it runs, 2 when it has ended.
    pub state: u64,
    /// A kernel ends by itself this many nanoseconds after its start.
    pub limit_ns: u64,
    /// Lines in the ring from the CPU, a power of two.
    pub in_lines: u32,
    /// Number of the first line from the CPU.
    pub in_start: u32,
    /// Lines in the ring to the CPU, a power of two.
    pub out_lines: u32,
    /// Number of the first line to the CPU.
    pub out_start: u32,
    /// Warps that receive.
    pub readers: u32,
    /// Places for the ring from the CPU, [`PLACE`](Self::PLACE) bytes apart, of which the kernel takes the nearest.
    pub places: u32,
}

const _: () = assert!(size_of::<DeviceChannel>() == 80);

impl DeviceChannel {
    /// How far apart the places for the ring from the CPU are, in bytes: memory is at home in one half of a GPU's L2 cache by
    /// pages of so many (H200).
    pub const PLACE: usize = 4096;

    /// The structure's 80 bytes as words, to be put among a kernel's arguments.
    #[must_use]
    pub fn to_words(&self) -> [u64; 10] {
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        [
            self.in_ring,
            self.in_credit,
            self.out_ring,
            self.out_credit,
            self.stop,
            self.state,
            self.limit_ns,
            pair(self.in_lines, self.in_start),
            pair(self.out_lines, self.out_start),
            pair(self.readers, self.places),
        ]
    }
}

/// Where line `number` of a ring of `lines` lines starts, in bytes.
#[inline]
pub(crate) fn slot(number: u32, lines: u32) -> usize {
    usize_of(u64::from(number & (lines - 1))) * LINE
}

/// Lines that `bytes` bytes fill, at least one.
pub(crate) const fn lines_of(bytes: usize) -> usize {
    if bytes == 0 { 1 } else { bytes.div_ceil(LINE_PAYLOAD) }
}

/// Lines of a message of `bytes` bytes, `ahead` more included; refuses more than half a ring.
pub(crate) fn message_lines(op: &'static str, ahead: usize, bytes: usize, ring: u32) -> Result<u32> {
    let lines = bytes.checked_add(ahead).map(lines_of).and_then(|lines| u32::try_from(lines).ok());
    lines.filter(|&lines| lines <= ring / 2).ok_or_else(|| {
        let most = usize_of(u64::from(ring / 2)) * LINE_PAYLOAD - ahead;
        Error::new(
            op,
            ErrorKind::OutOfBounds,
            format!("a message of {bytes} bytes in a ring that takes {most} bytes at most"),
        )
        .remedy("make the ring larger, or the message smaller")
    })
}

/// What every part of a ring carries before its first lap: the number of the lap before.
pub(crate) fn unwritten(start: u32, lines: u32) -> Vec<u8> {
    let mut bytes = vec![0; usize_of(u64::from(lines)) * LINE];
    for offset in 0..lines {
        let number = start.wrapping_add(offset);
        let at = slot(number, lines);
        for part in bytes[at..at + LINE].chunks_exact_mut(PART) {
            part[..4].copy_from_slice(&number.wrapping_sub(lines).to_le_bytes());
        }
    }
    bytes
}
