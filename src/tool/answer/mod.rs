//! The other side of a ping-pong: a kernel on the GPU, or a thread that plays its part on an emulated one.
//!
//! Messages are numbered from 1. Each of `blocks` receivers has a flag, a data area and a 4-byte answer of its own; a
//! round is a message to each and an answer from each. How a message is made, and what the receiver checks, is said here
//! once for both sides, and once more in `src/ptx/answer.cu`.

#![allow(unsafe_code, reason = "declares a method whose caller vouches for addresses")]

use std::time::Duration;

mod cpu;
mod gpu;

pub use cpu::CpuSide;
pub use gpu::GpuSide;

use crate::error::Result;
use crate::range::GpuAddr;
use crate::sys::num::u64_of;

/// Bytes from one flag to the next, and from one answer to the next.
pub const FLAG_STRIDE: usize = 128;
/// See [`FLAG_STRIDE`].
pub const ANSWER_STRIDE: usize = 64;
/// Bytes that a receiver loads with one access.
pub const PART: usize = 16;
/// Set in an answer to a message with wrong data.
pub const WRONG_DATA: u32 = 1 << 31;

const LINE: usize = 64;

/// How a message comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As a 4-byte flag: the number of the message.
    Flag,
    /// As data and then a flag.
    Data,
    /// As parts of 16 bytes, 12 of data and the number of the message, in any order, without a flag.
    Packets,
}

impl Mode {
    /// As in the report and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Flag => "flag",
            Self::Data => "data+flag",
            Self::Packets => "packets",
        }
    }
}

/// What goes to and fro in one round.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// How a message comes.
    pub mode: Mode,
    /// Bytes of a message as they are stored: for packets with the numbers in them, for a flag the flag's 4.
    pub bytes: usize,
    /// Receivers.
    pub blocks: usize,
    /// Threads that share a receiver's work.
    pub threads: u32,
}

impl Shape {
    /// Bytes from one receiver's data area to the next: whole lines, so that no two share one.
    #[must_use]
    pub fn data_stride(&self) -> usize {
        match self.mode {
            Mode::Flag => LINE,
            _ => self.bytes.next_multiple_of(LINE),
        }
    }

    /// Of a message's bytes, those that are data.
    #[must_use]
    pub fn data_bytes(&self) -> usize {
        match self.mode {
            Mode::Packets => self.bytes.div_ceil(PART) * 12,
            _ => self.bytes,
        }
    }

    /// Word `index` of message `number`, as stored.
    #[must_use]
    pub fn word(&self, number: u32, index: u32) -> u32 {
        match (self.mode, index % 4) {
            (Mode::Packets, 3) => number,
            (Mode::Packets, n) => word_of(number, index / 4 * 3 + n),
            _ => word_of(number, index),
        }
    }

    /// Writes message `number` to `into`, [`Shape::data_stride`] bytes.
    pub fn fill(&self, number: u32, into: &mut [u8]) {
        for (bytes, index) in into.chunks_exact_mut(4).zip(0..) {
            bytes.copy_from_slice(&self.word(number, index).to_le_bytes());
        }
    }
}

/// Word `index` of the data of message `number`: no two messages in a row share one.
#[must_use]
pub fn word_of(number: u32, index: u32) -> u32 {
    number.wrapping_mul(0x9e37_79b1).wrapping_add(index.wrapping_mul(0x85eb_ca6b))
}

/// Where the three areas are, for the side that answers: addresses on its side of the bus.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Flags, [`FLAG_STRIDE`] apart.
    pub flags: u64,
    /// Data areas, [`Shape::data_stride`] apart.
    pub data: u64,
    /// Answers, [`ANSWER_STRIDE`] apart.
    pub answers: u64,
}

/// What the answering side counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Messages answered.
    pub messages: u64,
    /// 4-byte words that were not those of the message.
    pub wrong_words: u64,
}

/// A side that answers until it is told to stop, or until no message has come for a while.
pub trait Answering {
    /// Whether it has ended by itself.
    ///
    /// # Errors
    ///
    /// It failed.
    fn has_ended(&self) -> Result<bool>;

    /// Called now and then by whoever waits for an answer.
    fn let_run(&self);

    /// Ends it.
    ///
    /// # Errors
    ///
    /// It failed, or does not end.
    fn stop(self: Box<Self>) -> Result<Totals>;
}

/// Something that can start answering.
pub trait Side {
    /// Starts answering. Ends by itself when no message has come for `idle`.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    ///
    /// # Safety
    ///
    /// The memory at the addresses is large enough for the shape, holds zeros where flags, answers and numbers go, and
    /// stays what it is until the returned value is stopped or dropped.
    unsafe fn start(&self, shape: Shape, at: Addresses, idle: Duration) -> Result<Box<dyn Answering + '_>>;

    /// Pages in `memory`, 64 KiB of it, in the order in which this side reaches them, the nearest first: offsets.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    fn pages_by_distance(&self, memory: GpuAddr) -> Result<[usize; PAGES]>;
}

/// Pages of 64 KiB.
pub const PAGES: usize = 16;
/// Bytes of each.
pub const PAGE: usize = 4096;

/// The parameter of the kernels, which is a structure of such words.
fn parameter(shape: Shape, at: Addresses, stop: u64, report: u64, idle: Duration) -> [u64; 10] {
    let Addresses { flags, data, answers } = at;
    let idle_ns = u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX);
    let (blocks, threads, bytes) = (u64_of(shape.blocks), u64::from(shape.threads), u64_of(shape.bytes));
    [blocks, threads, bytes, flags, data, u64_of(shape.data_stride()), answers, stop, report, idle_ns]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(mode: Mode, bytes: usize) -> Shape {
        Shape { mode, bytes, blocks: 1, threads: 32 }
    }

    fn words(shape: Shape, number: u32) -> Vec<u32> {
        let mut bytes = vec![0; shape.data_stride()];
        shape.fill(number, &mut bytes);
        bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    fn areas_are_whole_lines() {
        let table = [(Mode::Flag, 4, 64), (Mode::Data, 1, 64), (Mode::Data, 65, 128), (Mode::Packets, 4, 64)];
        for (mode, bytes, stride) in table {
            assert_eq!(shape(mode, bytes).data_stride(), stride, "{mode:?} {bytes}");
        }
        assert_eq!(shape(Mode::Packets, 512).data_bytes(), 384);
        assert_eq!(shape(Mode::Packets, 4).data_bytes(), 12);
        assert_eq!(shape(Mode::Data, 512).data_bytes(), 512);
    }

    #[test]
    fn every_part_of_a_packet_has_its_number() {
        let all = words(shape(Mode::Packets, 64), 7);
        assert!(all.chunks(4).all(|part| part[3] == 7));
        let data: Vec<u32> = all.chunks(4).flat_map(|part| part[..3].to_vec()).collect();
        assert!(data.iter().zip(0..).all(|(&word, index)| word == word_of(7, index)), "{data:x?}");
    }

    #[test]
    fn messages_in_a_row_share_no_word() {
        let (a, b) = (words(shape(Mode::Data, 4096), 41), words(shape(Mode::Data, 4096), 42));
        assert!(a.iter().zip(&b).all(|(a, b)| a != b));
    }
}
