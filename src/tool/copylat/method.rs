//! The ways of copying that are compared. Each call here is what a timed region contains.

#![allow(unsafe_code, reason = "plain cuMemcpy on device addresses")]

use crate::buffer::DeviceBuffer;
use crate::cuda;
use crate::error::Result;
use crate::mapping::Mapping;
use crate::range::GpuAddr;
use crate::sys::num::u64_of;
use crate::tool::report::Direction;

/// A way to copy between host memory and the device buffer.
pub(super) trait Method {
    /// As in the report.
    const NAME: &'static str;

    /// What a call does, in words.
    fn describe(direction: Direction) -> &'static str;

    /// Host to device, at `offset` of the buffer.
    fn write(&self, offset: usize, from: &[u8]) -> Result<()>;

    /// Device to host.
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()>;

    /// Makes sure that all writes have arrived.
    fn settle(&self) -> Result<()>;
}

/// Loads and stores through the mapping.
#[derive(Debug)]
pub(super) struct Bar1<'a>(pub(super) &'a Mapping<'a>);

impl Method for Bar1<'_> {
    const NAME: &'static str = "bar1";

    fn describe(direction: Direction) -> &'static str {
        match direction {
            Direction::HostToDevice => "Mapping::write (stores, then SFENCE; not waiting for the GPU)",
            Direction::DeviceToHost => "Mapping::read (MFENCE, loads, LFENCE)",
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

/// Synchronous `cuMemcpy` from and to page-locked memory, in the buffer's own context.
#[derive(Debug)]
pub(super) struct CudaMemcpy<'a>(&'a DeviceBuffer);

impl<'a> CudaMemcpy<'a> {
    /// Makes the buffer's context current on this thread.
    pub(super) fn new(buffer: &'a DeviceBuffer) -> Result<Self> {
        buffer.make_current()?;
        Ok(Self(buffer))
    }

    /// The device address of `len` bytes at `offset`.
    #[inline(always)]
    fn at(&self, offset: usize, len: usize) -> GpuAddr {
        assert!(offset <= self.0.len() && len <= self.0.len() - offset, "the plan's copies lie in the buffer");
        GpuAddr::new(self.0.addr().raw() + u64_of(offset))
    }
}

impl Method for CudaMemcpy<'_> {
    const NAME: &'static str = "cuda_memcpy_pinned";

    fn describe(direction: Direction) -> &'static str {
        match direction {
            Direction::HostToDevice => "cuMemcpyHtoD from page-locked memory, synchronous",
            Direction::DeviceToHost => "cuMemcpyDtoH to page-locked memory, synchronous",
        }
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
        Ok(())
    }
}
