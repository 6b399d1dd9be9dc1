//! Between cudarc's types and ours.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError};

use crate::buffer::DeviceBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::range::{DeviceRange, GpuAddr, Span};

fn failed(op: &'static str, call: &'static str, error: &DriverError) -> Error {
    Error::new(op, ErrorKind::Io(libc::EIO), format!("{call}: {error}"))
}

impl<'a> DeviceRange<'a> {
    /// The memory of a cudarc slice or view, borrowed; its stream is synchronised once, so that what was queued before
    /// has happened.
    ///
    /// Slices that cudarc allocated itself come from a stream-ordered pool, which backend `rm` refuses; one that wraps
    /// `cudaMalloc` memory is fine, and so is a [`DeviceBuffer`] lent to kernels.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an empty slice, or what CUDA reports.
    pub fn from_cuda<T, S: DevicePtr<T>>(slice: &'a S) -> Result<Self> {
        let stream = slice.stream();
        stream.synchronize().map_err(|error| failed("range", "synchronise", &error))?;
        let (addr, _sync) = slice.device_ptr(stream);
        let bytes = slice.len().saturating_mul(size_of::<T>());
        Ok(Self::borrowed(Span::new("range", GpuAddr::new(addr), bytes)?))
    }
}

impl DeviceBuffer {
    /// Lends the buffer to kernels as a cudarc slice of `T` on `stream`, as many whole `T` as fit.
    ///
    /// Device bytes are shared between the CPU's mapping and kernels like a `Cell`: order is up to the program.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the stream is on another GPU than the buffer or no `T` fits, `NoDriver`.
    pub fn as_cuda<T: DeviceRepr>(&self, stream: &Arc<CudaStream>) -> Result<CudaLoan<'_, T>> {
        if stream.context().ordinal() != self.ordinal() {
            let cause = format!("the buffer is on GPU {}, the stream on another", self.ordinal());
            return Err(
                Error::new("lend", ErrorKind::InvalidArgument, cause).remedy("use a stream of the buffer's GPU")
            );
        }
        let Some(len) = self.len().checked_div(size_of::<T>()).filter(|len| *len > 0) else {
            let cause = format!("no value of {} bytes fits a buffer of {} bytes", size_of::<T>(), self.len());
            return Err(Error::new("lend", ErrorKind::InvalidArgument, cause));
        };
        // SAFETY: `len` values fit the live buffer, which the loan borrows; `DeviceRepr` types are plain data, and
        // freshly allocated device memory is as good as any bytes to a kernel.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(self.addr().raw(), len) };
        Ok(CudaLoan { slice: ManuallyDrop::new(slice), buffer: self })
    }
}

/// A [`DeviceBuffer`] as a cudarc slice, for kernel arguments. Ending the loan frees nothing.
pub struct CudaLoan<'a, T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    buffer: &'a DeviceBuffer,
}

impl<T> Deref for CudaLoan<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> DerefMut for CudaLoan<'_, T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.slice
    }
}

impl<T> Drop for CudaLoan<'_, T> {
    fn drop(&mut self) {
        // SAFETY: taken once, in the value's own drop.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // Gives the pointer up instead of freeing it.
        let _ = slice.leak();
    }
}

impl<T> fmt::Debug for CudaLoan<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaLoan").field("buffer", self.buffer).finish_non_exhaustive()
    }
}
