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

    /// Whether [`Mapping::publish`] works without a CUDA call.
    #[must_use]
    pub fn publish_is_ordered(&self) -> bool {
        self.publish == Publish::Ordered
    }
}
