//! Loads and stores through the mapping: by one thread, or by several.

use super::Method;
use crate::ParallelCopier;
use crate::copy::fence;
use crate::error::Result;
use crate::mapping::Mapping;
use crate::tool::report::{Direction, Metric};

/// Loads and stores through the mapping, each write with its fence.
#[derive(Debug)]
pub struct Bar1<'a>(pub &'a Mapping<'a>);

impl Bar1<'_> {
    /// As in the report.
    pub const NAME: &'static str = "bar1";
}

impl Method for Bar1<'_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn describe(&self, direction: Direction) -> &'static str {
        match direction {
            Direction::HostToDevice => "Mapping::write (stores, then SFENCE; not waiting for the GPU)",
            Direction::DeviceToHost => "Mapping::read (MFENCE, loads, LFENCE)",
        }
    }

    fn singles(&self, direction: Direction) -> &'static [Metric] {
        match direction {
            Direction::HostToDevice => &[Metric::Issue, Metric::Drained],
            Direction::DeviceToHost => &[Metric::Single],
        }
    }

    #[inline(always)]
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.0.write(offset, from)
    }

    #[inline(always)]
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.0.read(offset, to)
    }

    fn settle(&self) -> Result<()> {
        self.0.flush()
    }
}

/// Stores through the mapping without a fence of their own.
#[derive(Debug)]
pub struct Posted<'a>(pub &'a Mapping<'a>);

impl Posted<'_> {
    /// As in the report.
    pub const NAME: &'static str = "bar1_posted";
}

impl Method for Posted<'_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn describe(&self, direction: Direction) -> &'static str {
        match direction {
            Direction::HostToDevice => "Mapping::write_posted (no fence per call; one SFENCE after many)",
            Direction::DeviceToHost => Bar1(self.0).describe(direction),
        }
    }

    fn singles(&self, direction: Direction) -> &'static [Metric] {
        match direction {
            Direction::HostToDevice => &[Metric::Issue],
            Direction::DeviceToHost => &[Metric::Single],
        }
    }

    #[inline(always)]
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.0.write_posted(offset, from)
    }

    #[inline(always)]
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.0.read(offset, to)
    }

    #[inline(always)]
    fn close(&self) {
        fence::store();
    }

    fn settle(&self) -> Result<()> {
        self.0.flush()
    }
}

/// Loads and stores by several threads at once.
#[derive(Debug)]
pub struct Parallel<'a>(pub &'a Mapping<'a>, pub &'a ParallelCopier);

impl Parallel<'_> {
    /// As in the report.
    pub const NAME: &'static str = "parallel";
}

impl Method for Parallel<'_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn threads(&self) -> Option<usize> {
        Some(self.1.threads())
    }

    fn describe(&self, direction: Direction) -> &'static str {
        match direction {
            Direction::HostToDevice => "ParallelCopier::write (stores by several threads, each with its SFENCE)",
            Direction::DeviceToHost => "ParallelCopier::read (loads by several threads)",
        }
    }

    fn singles(&self, _: Direction) -> &'static [Metric] {
        &[Metric::Single]
    }

    #[inline(always)]
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.1.write(self.0, offset, from)
    }

    #[inline(always)]
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.1.read(self.0, offset, to)
    }

    fn settle(&self) -> Result<()> {
        self.0.flush()
    }
}
