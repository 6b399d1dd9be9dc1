//! The ways of copying that are compared. Each call here is what a timed region contains.

#![allow(unsafe_code, reason = "plain cuMemcpy on device addresses")]

use super::cpu;
use super::report::{Direction, Metric};
use crate::ParallelCopier;
use crate::buffer::DeviceBuffer;
use crate::copy::fence;
use crate::cuda;
use crate::error::Result;
use crate::mapping::Mapping;
use crate::range::GpuAddr;
use crate::sys::num::u64_of;

/// A way to copy between host memory and the device buffer.
pub trait Method {
    /// As in the report.
    fn name(&self) -> &'static str;

    /// Threads that share a copy, where that is the method.
    fn threads(&self) -> Option<usize> {
        None
    }

    /// Nanoseconds that every single call contains and that are not the copy's.
    fn deducted_ns(&self) -> f64 {
        0.0
    }

    /// What a call does, in words.
    fn describe(&self, direction: Direction) -> &'static str;

    /// What is known of a single call: one loop for each, in this order.
    fn singles(&self, direction: Direction) -> &'static [Metric];

    /// Host to device, at `offset` of the buffer.
    fn write(&self, offset: usize, from: &[u8]) -> Result<()>;

    /// Device to host.
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()>;

    /// Ends a row of writes that were timed together; timed as well.
    fn close(&self) {}

    /// A single write until it has got as far as `metric` says.
    #[inline(always)]
    fn single_write(&self, metric: Metric, offset: usize, from: &[u8]) -> Result<()> {
        self.write(offset, from)?;
        if metric == Metric::Drained {
            cpu::mfence();
        }
        Ok(())
    }

    /// Makes sure that all writes have arrived.
    fn settle(&self) -> Result<()>;
}

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

/// Where the host's side of `cuMemcpy` lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostSide {
    /// Page-locked: the GPU's copy engine reaches it.
    PageLocked,
    /// Ordinary: the driver copies it to or from a place that the copy engine reaches.
    Pageable,
}

/// Synchronous `cuMemcpy`, in the buffer's own context.
#[derive(Debug)]
pub struct CudaMemcpy<'a> {
    buffer: &'a DeviceBuffer,
    host: HostSide,
}

impl<'a> CudaMemcpy<'a> {
    /// With page-locked memory, as in the report.
    pub const PINNED: &'static str = "cuda_memcpy_pinned";
    /// With ordinary memory, as in the report.
    pub const PAGEABLE: &'static str = "cuda_memcpy_pageable";

    /// Makes the buffer's context current on this thread. `host` is what the caller will copy from and to.
    ///
    /// # Errors
    ///
    /// CUDA refuses.
    pub fn new(buffer: &'a DeviceBuffer, host: HostSide) -> Result<Self> {
        buffer.make_current()?;
        Ok(Self { buffer, host })
    }

    /// The device address of `len` bytes at `offset`.
    #[inline(always)]
    fn at(&self, offset: usize, len: usize) -> GpuAddr {
        assert!(
            offset <= self.buffer.len() && len <= self.buffer.len() - offset,
            "the plan's copies lie in the buffer"
        );
        GpuAddr::new(self.buffer.addr().raw() + u64_of(offset))
    }
}

impl Method for CudaMemcpy<'_> {
    fn name(&self) -> &'static str {
        match self.host {
            HostSide::PageLocked => Self::PINNED,
            HostSide::Pageable => Self::PAGEABLE,
        }
    }

    fn describe(&self, direction: Direction) -> &'static str {
        match (direction, self.host) {
            (Direction::HostToDevice, HostSide::PageLocked) => "cuMemcpyHtoD from page-locked memory, synchronous",
            (Direction::DeviceToHost, HostSide::PageLocked) => "cuMemcpyDtoH to page-locked memory, synchronous",
            // The programming guide's words: it returns once the bytes are in the driver's staging memory.
            (Direction::HostToDevice, HostSide::Pageable) => "cuMemcpyHtoD from pageable memory (may return earlier)",
            (Direction::DeviceToHost, HostSide::Pageable) => "cuMemcpyDtoH to pageable memory, synchronous",
        }
    }

    fn singles(&self, _: Direction) -> &'static [Metric] {
        &[Metric::Single]
    }

    #[inline(always)]
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.at(offset, from.len());
        // SAFETY: `at` checked the range against the buffer, which `self` keeps allocated.
        unsafe { cuda::memcpy_to_device(to, from) }
    }

    #[inline(always)]
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.at(offset, to.len());
        // SAFETY: `at` checked the range against the buffer, which `self` keeps allocated.
        unsafe { cuda::memcpy_to_host(to, from) }
    }

    fn settle(&self) -> Result<()> {
        // What was staged goes out in the order of the stream, which this waits for.
        self.read(0, &mut [0])
    }
}
