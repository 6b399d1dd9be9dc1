//! Data first, then the flag that says so.

#![allow(unsafe_code, reason = "stores a flag into the window once its place was checked")]

use crate::copy::{self, fence};
use crate::error::{Error, ErrorKind, Feature, Result};
use crate::mapping::Mapping;

/// How data and a flag reach the device in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Publish {
    Ordered,
    CudaFlush,
    Refused,
}

impl Publish {
    pub(crate) fn decide(ordered_writes: bool, allow_cuda_flush: bool) -> Self {
        match (ordered_writes, allow_cuda_flush) {
            (true, _) => Self::Ordered,
            (false, true) => Self::CudaFlush,
            (false, false) => Self::Refused,
        }
    }
}

/// An unsigned integer that a flag can be: `u32` or `u64`.
pub trait Flag: Copy + sealed::Sealed {}

mod sealed {
    pub trait Sealed {
        /// Stores with one access.
        ///
        /// # Safety
        ///
        /// `dst` is writable device or host memory, aligned to the size of `Self`.
        unsafe fn store(self, dst: *mut u8);
    }
}

impl Flag for u32 {}
impl sealed::Sealed for u32 {
    #[inline]
    unsafe fn store(self, dst: *mut u8) {
        // SAFETY: the caller's duty.
        unsafe { copy::store_u32(dst.cast(), self) }
    }
}

impl Flag for u64 {}
impl sealed::Sealed for u64 {
    #[inline]
    unsafe fn store(self, dst: *mut u8) {
        // SAFETY: the caller's duty.
        unsafe { copy::store_u64(dst.cast(), self) }
    }
}

impl Mapping<'_> {
    /// Writes `data`, and then `flag` so that a kernel which sees the flag (`ld.acquire.sys`) sees the data.
    ///
    /// # Errors
    ///
    /// `UnsupportedFeature` where the GPU does not order such writes and
    /// [`SessionBuilder::allow_cuda_flush`](crate::SessionBuilder::allow_cuda_flush) was not given: decided when the
    /// mapping was made. `InvalidArgument` if the flag is misaligned, `OutOfBounds`, `WrongProcess`. Nothing was written
    /// then.
    #[inline]
    pub fn publish<F: Flag>(&self, data_offset: usize, data: &[u8], flag_offset: usize, flag: F) -> Result<()> {
        if self.publish == Publish::Refused {
            return Err(self.publish_refused());
        }
        let flag_at = self.aligned("publish", flag_offset, size_of::<F>())?;
        self.posted("publish", data_offset, data)?;
        fence::store();
        if self.publish == Publish::CudaFlush {
            self.core.cuda_flush()?;
        }
        // SAFETY: in the live window and aligned.
        unsafe { flag.store(flag_at) };
        fence::store();
        Ok(())
    }

    #[cold]
    fn publish_refused(&self) -> Error {
        Error::new(
            "publish",
            ErrorKind::UnsupportedFeature(Feature::Publish),
            "this GPU does not order a CPU's writes to its memory by itself",
        )
        .remedy("open the session with allow_cuda_flush(), which costs a CUDA call for each publish")
    }

    /// Before a copy by the GPU's copy engine: what this thread wrote to the GPU so far is there when CUDA's copy, asked for
    /// next, begins.
    ///
    /// An `SFENCE` does for that where the device orders writes by itself, and saves a flush's round trip of the bus:
    ///
    /// - The copy engine begins once the CPU has rung for it: a store to a register of the GPU's
    ///   (`NVC361_NOTIFY_CHANNEL_PENDING` in `clc361.h` of open-gpu-kernel-modules), which CUDA makes after this fence. An `SFENCE` makes earlier stores, those in
    ///   write-combining buffers too, globally visible before later ones (Intel SDM volume 3, "Memory Ordering").
    /// - Both go down the same link as posted writes, and no posted write passes another (PCIe base specification, table
    ///   "Ordering Rules", row A, column 2) unless it is marked with relaxed or ID-based ordering, which a CPU's own stores are
    ///   not.
    /// - Inside the GPU, whoever acts on the later write finds the earlier: `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`
    ///   of at least `OWNER` says that the device itself consistently consumes remote writes (CUDA driver API,
    ///   `CUGPUDirectRDMAWritesOrdering`). The copy engine is part of the device.
    ///
    /// That is an argument; `the_copy_engine_finds_what_was_written_before` in `tests/gpu_soak.rs` is the observation.
    /// Elsewhere the writes' arrival is waited for.
    #[inline]
    pub(crate) fn settle_for_copy_engine(&self) -> Result<()> {
        if self.publish != Publish::Ordered {
            return self.flush();
        }
        fence::store();
        Ok(())
    }

    /// Whether [`Mapping::publish`] works without a CUDA call.
    #[must_use]
    pub fn publish_is_ordered(&self) -> bool {
        self.publish == Publish::Ordered
    }
}
