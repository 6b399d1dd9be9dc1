//! What host and kernel share: doorbells, the control lines, packets. The kernel's half is `src/ptx/push.cu`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::memory::{HostMemory, Place};
use super::options::MAX_PACKET_BYTES;
use crate::error::Result;
use crate::sys::num::{u64_of, usize_of};

/// Bytes of a doorbell's line.
pub(super) const LINE: usize = 64;

/// The most that one doorbell asks for.
pub(super) const MAX_BYTES: usize = 1 << 30;

/// What a doorbell asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// To copy; a later request answers.
    Copy,
    /// To copy and say so.
    CopyAndAnswer,
    /// To copy, in bulk copies if the kernel has any and they suit, as they do for what lies in host memory; a later request
    /// answers.
    Bulk,
    /// The same, and say so.
    BulkAndAnswer,
    /// To send packets.
    Send,
    /// To end.
    Stop,
}

impl Order {
    const ALL: [Self; 6] = [Self::Copy, Self::CopyAndAnswer, Self::Bulk, Self::BulkAndAnswer, Self::Send, Self::Stop];
    /// A bit beside the code of a copy.
    const BULK: u32 = 8;

    const fn code(self) -> u32 {
        match self {
            Self::Copy => 1,
            Self::CopyAndAnswer => 2,
            Self::Bulk => Self::BULK | Self::Copy.code(),
            Self::BulkAndAnswer => Self::BULK | Self::CopyAndAnswer.code(),
            Self::Send => 3,
            Self::Stop => 4,
        }
    }

    /// The same copy, answered; anything else as it is.
    pub(super) const fn answered(self) -> Self {
        match self {
            Self::Copy => Self::CopyAndAnswer,
            Self::Bulk => Self::BulkAndAnswer,
            other => other,
        }
    }

    /// Whether the kernel answers it with a flag.
    pub(super) const fn is_answered(self) -> bool {
        matches!(self, Self::CopyAndAnswer | Self::BulkAndAnswer)
    }

    /// Whether it may be done in bulk copies.
    pub(super) const fn is_bulk(self) -> bool {
        matches!(self, Self::Bulk | Self::BulkAndAnswer)
    }

    /// Whether nothing says that it has been served.
    pub(super) const fn is_silent(self) -> bool {
        matches!(self, Self::Copy | Self::Bulk)
    }
}

/// A request as the kernel reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Doorbell {
    pub(super) order: Order,
    pub(super) source: u64,
    pub(super) target: u64,
    pub(super) bytes: u32,
}

impl Doorbell {
    /// Two parts of 16 bytes with the request's number in each; the rest of the line is not looked at.
    pub(super) fn line(&self, number: u32) -> [u8; LINE] {
        let mut line = [0; LINE];
        line[..8].copy_from_slice(&self.source.to_le_bytes());
        line[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        line[12..16].copy_from_slice(&number.to_le_bytes());
        line[16..24].copy_from_slice(&self.target.to_le_bytes());
        line[24..28].copy_from_slice(&self.order.code().to_le_bytes());
        line[28..32].copy_from_slice(&number.to_le_bytes());
        line
    }

    /// The request of this number in the line's four words, if all of it has arrived.
    pub(super) fn in_words(words: [u64; 4], number: u32) -> Option<Self> {
        let [source, bytes, target, order] = words;
        if high(bytes) != number || high(order) != number {
            return None;
        }
        let order = Order::ALL.into_iter().find(|known| known.code() == low(order))?;
        Some(Self { order, source, target, bytes: low(bytes) })
    }
}

/// A line that no request rings in: its number belongs to the next line.
pub(super) fn silent(slot: u32) -> [u8; LINE] {
    Doorbell { order: Order::Stop, source: 0, target: 0, bytes: 0 }.line(slot.wrapping_add(1))
}

pub(super) fn low(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0)
}

pub(super) fn high(word: u64) -> u32 {
    u32::try_from(word >> 32).unwrap_or(0)
}

pub(super) fn joined(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Whether a count that is at `now` has come to `number`; counts wrap.
pub(super) fn reached(now: u32, number: u32) -> bool {
    now.wrapping_sub(number) < 1 << 31
}

/// What the kernel tells the host, in host memory: a line each.
const ANSWERED: usize = 0;
const LEFT: usize = 64;
const STARTED: usize = 128;
const PACKETS: usize = 256;
/// Packets of 16 bytes carry 8.
const AREA: usize = 2 * MAX_PACKET_BYTES;

/// Control lines, and for each line of the ring an area for packets.
pub(super) struct Control {
    memory: HostMemory,
    ring: u32,
}

impl Control {
    /// As it is before request `first`.
    pub(super) fn new(place: Place, ring: u32, first: u32) -> Result<Self> {
        let control = Self { memory: HostMemory::new(place, PACKETS + AREA * index(ring))?, ring };
        control.word(ANSWERED).store(first.wrapping_sub(1), Ordering::Relaxed);
        control.clear_packets();
        Ok(control)
    }

    pub(super) fn addr(&self) -> u64 {
        self.memory.addr()
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        let at = self.memory.ptr().wrapping_add(offset).cast::<u32>();
        // SAFETY: offsets in this file are multiples of 8 inside the memory, which starts on a page and is only accessed
        // atomically, by the CPU and by the kernel.
        unsafe { AtomicU32::from_ptr(at) }
    }

    fn double_word(&self, offset: usize) -> &AtomicU64 {
        let at = self.memory.ptr().wrapping_add(offset).cast::<u64>();
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// The last request that was answered with a flag. What it asked for is there.
    #[inline]
    pub(super) fn answered(&self) -> u32 {
        self.word(ANSWERED).load(Ordering::Acquire)
    }

    pub(super) fn answer(&self, number: u32) {
        self.word(ANSWERED).store(number, Ordering::Release);
    }

    /// The number of the first request that this generation of the kernel did not serve, if it has left.
    #[inline]
    pub(super) fn left(&self, generation: u32) -> Option<u32> {
        let left = self.double_word(LEFT).load(Ordering::Acquire);
        (high(left) == generation).then(|| low(left))
    }

    pub(super) fn leave(&self, generation: u32, number: u32) {
        self.double_word(LEFT).store(joined(number, generation), Ordering::Release);
    }

    /// The generation that has started last.
    pub(super) fn started(&self) -> u32 {
        self.word(STARTED).load(Ordering::Acquire)
    }

    pub(super) fn start(&self, generation: u32) {
        self.word(STARTED).store(generation, Ordering::Release);
    }

    fn packet_offset(&self, number: u32, packet: usize) -> usize {
        PACKETS + AREA * index(number & (self.ring - 1)) + 16 * packet
    }

    /// Where the kernel puts the packets of a request.
    pub(super) fn packets_addr(&self, number: u32) -> u64 {
        self.memory.addr() + u64_of(self.packet_offset(number, 0))
    }

    /// The 8 bytes in a packet of request `number`, once both halves have arrived.
    #[inline]
    pub(super) fn packet(&self, number: u32, packet: usize) -> Option<[u8; 8]> {
        let at = self.packet_offset(number, packet);
        let first = self.double_word(at).load(Ordering::Acquire);
        let second = self.double_word(at + 8).load(Ordering::Acquire);
        let arrived = high(first) == number && high(second) == number;
        arrived.then(|| joined(low(first), low(second)).to_le_bytes())
    }

    pub(super) fn send(&self, number: u32, packet: usize, data: [u8; 8]) {
        let (at, data) = (self.packet_offset(number, packet), u64::from_le_bytes(data));
        self.double_word(at).store(joined(low(data), number), Ordering::Release);
        self.double_word(at + 8).store(joined(high(data), number), Ordering::Release);
    }

    /// Makes all packets nobody's. The kernel sends none meanwhile.
    pub(super) fn clear_packets(&self) {
        for slot in 0..self.ring {
            for packet in 0..AREA / 16 {
                let at = self.packet_offset(slot, packet);
                let nobodys = joined(0, slot.wrapping_add(1));
                self.double_word(at).store(nobodys, Ordering::Relaxed);
                self.double_word(at + 8).store(nobodys, Ordering::Relaxed);
            }
        }
    }
}

pub(super) fn index(number: u32) -> usize {
    usize_of(u64::from(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doorbell_is_read_as_it_was_written() {
        for order in Order::ALL {
            let bell = Doorbell { order, source: 0x7f00_1234_5678_9abc, target: u64::MAX, bytes: u32::MAX };
            let line = bell.line(7);
            let words: Vec<u64> = line.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
            let words: [u64; 4] = words[..4].try_into().unwrap();
            assert_eq!(Doorbell::in_words(words, 7), Some(bell));
            assert_eq!(Doorbell::in_words(words, 8), None);
            // Half of it has arrived.
            assert_eq!(Doorbell::in_words([words[0], words[1], 0, joined(4, 6)], 7), None);
            assert_eq!(Doorbell::in_words([0, joined(0, 6), words[2], words[3]], 7), None);
        }
    }

    #[test]
    fn a_copy_that_is_answered_goes_the_same_way() {
        for order in Order::ALL {
            let answered = order.answered();
            assert_eq!(answered.is_bulk(), order.is_bulk(), "{order:?}");
            assert_eq!(order.is_bulk(), order.code() & Order::BULK != 0, "{order:?}");
            assert_eq!(answered.is_answered(), order.is_silent() || order.is_answered(), "{order:?}");
            assert!(!answered.is_silent(), "{order:?}");
        }
    }

    #[test]
    fn the_kernel_knows_the_same_orders() {
        let kernel = include_str!("../ptx/push.cu");
        let named = [("COPY", Order::Copy.code()), ("COPY_AND_ANSWER", Order::CopyAndAnswer.code())];
        let named = named.into_iter().chain([("SEND", Order::Send.code()), ("STOP", Order::Stop.code())]);
        for (name, code) in named.chain([("BULK", Order::BULK)]) {
            let found = [',', ' '].iter().any(|end| kernel.contains(&format!(" {name} = {code}{end}")));
            assert!(found, "{name} = {code}");
        }
    }

    #[test]
    fn counts_wrap() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(2, u32::MAX - 1) && !reached(u32::MAX - 1, 2) && reached(0, u32::MAX));
    }

    #[test]
    fn nothing_is_there_before_it_came() {
        for first in [1, u32::MAX - 3] {
            let control = Control::new(Place::StandIn, 16, first).unwrap();
            assert_eq!(control.answered(), first.wrapping_sub(1));
            assert_eq!((control.left(1), control.started()), (None, 0));
            for number in (0..64).map(|n| first.wrapping_add(n)) {
                assert!((0..AREA / 16).all(|packet| control.packet(number, packet).is_none()), "{number}");
            }
            control.send(first, 3, *b"messages");
            assert_eq!(control.packet(first, 3), Some(*b"messages"));
            assert_eq!(control.packet(first.wrapping_add(16), 3), None);
            control.leave(9, first);
            assert_eq!((control.left(9), control.left(8)), (Some(first), None));
        }
    }

    #[test]
    fn a_silent_line_rings_for_nobody_of_its_own() {
        for slot in 0..16 {
            let number = u32::from_le_bytes(silent(slot)[12..16].try_into().unwrap());
            assert_ne!(number % 16, slot);
        }
    }
}
