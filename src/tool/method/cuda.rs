//! What the others are compared with: `cuMemcpy`.

#![allow(unsafe_code, reason = "plain cuMemcpy on device addresses")]

use super::Method;
use crate::buffer::DeviceBuffer;
use crate::cuda;
use crate::error::Result;
use crate::range::GpuAddr;
use crate::sys::num::u64_of;
use crate::tool::report::{Direction, Metric};

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
