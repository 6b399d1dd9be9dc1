//! What goes round: how large it is, how it comes, and where each side looks.

use clap::ValueEnum;

use crate::tool::answer::{Mode, Shape};

/// Lanes of the one warp at a channel.
pub(super) const WARP: u32 = 32;
/// The method of rows in which the GPU polls host memory.
pub(super) const RIVAL: &str = "host_flag";
/// `4 * MOST_WORDS` in `src/ptx/channel.cu`; in lines, less than half of a ring.
pub(super) const MOST_LETTER: usize = 16 << 10;

/// Where something is.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// GPU memory, reached by the CPU through BAR1.
    Gpumem,
    /// Page-locked host memory, reached by the GPU over the bus.
    Hostmem,
}

impl Memory {
    /// As in the report.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gpumem => "gpumem",
            Self::Hostmem => "hostmem",
        }
    }
}

/// Where flags, data and answers are in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Where {
    pub(super) flag: Memory,
    pub(super) data: Memory,
    pub(super) answer: Memory,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub(super) enum Row {
    /// Messages to memory of the program's own.
    Plain { shape: Shape, at: Where },
    /// Messages through a channel.
    Channel(Letter),
}

/// A message through a channel, and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Letter {
    pub(super) bytes: usize,
    /// A multiple of 4, and one line at most.
    pub(super) answer_bytes: usize,
    /// Where the ring to the GPU is.
    pub(super) ring: Memory,
}

impl Letter {
    /// As in the report.
    pub(super) const MODE: &'static str = "channel";
}

impl Row {
    /// How messages come, as in the report.
    pub(super) fn mode(&self) -> &'static str {
        match self {
            Self::Plain { shape, .. } => shape.mode.name(),
            Self::Channel(_) => Letter::MODE,
        }
    }

    /// The mechanism as in the report, by where the GPU looks.
    pub(super) fn method(&self) -> &'static str {
        let looks = match *self {
            Self::Plain { shape: Shape { mode: Mode::Flag, .. }, at } => [at.flag; 2],
            Self::Plain { shape: Shape { mode: Mode::Packets, .. }, at } => [at.data; 2],
            Self::Plain { shape: Shape { mode: Mode::Data, .. }, at } => [at.flag, at.data],
            Self::Channel(letter) => [letter.ring; 2],
        };
        match looks {
            [Memory::Gpumem, Memory::Gpumem] => "bar1",
            [Memory::Hostmem, Memory::Hostmem] => RIVAL,
            _ => "mixed",
        }
    }

    /// Bytes of a message.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Plain { shape, .. } => shape.bytes,
            Self::Channel(letter) => letter.bytes,
        }
    }

    /// Blocks, and threads of each that share the work on a message.
    pub(super) fn grid(&self) -> (usize, u32) {
        match self {
            Self::Plain { shape, .. } => (shape.blocks, shape.threads),
            Self::Channel(_) => (1, WARP),
        }
    }

    /// The same with the GPU polling host memory, if that is another row.
    pub(super) fn rival(self, answer: Memory) -> Option<Self> {
        let rival = match self {
            Self::Plain { shape, .. } => {
                Self::Plain { shape, at: Where { flag: Memory::Hostmem, data: Memory::Hostmem, answer } }
            }
            Self::Channel(letter) => Self::Channel(Letter { ring: Memory::Hostmem, ..letter }),
        };
        (self.method() != RIVAL).then_some(rival)
    }
}
