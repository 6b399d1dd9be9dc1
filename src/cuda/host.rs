//! Page-locked host memory and plain synchronous copies: the rival in every comparison.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

use super::context::{Device, Primary};
use super::driver::Driver;
use crate::error::{Error, ErrorKind, Result};
use crate::range::GpuAddr;

/// `CU_MEMHOSTALLOC_PORTABLE`: page-locked for every context.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: kernels can reach it.
const DEVICE_MAPPED: u32 = 2;

/// Page-locked host memory (`cuMemHostAlloc`), zeroed, freed on drop. Freeing it waits for running kernels.
pub struct PinnedHost {
    ptr: NonNull<u8>,
    len: usize,
    primary: Primary,
}

// SAFETY: owned memory, reached through `&` and `&mut` like a Vec's.
unsafe impl Send for PinnedHost {}
// SAFETY: as above.
unsafe impl Sync for PinnedHost {}

impl PinnedHost {
    /// Allocates in the primary context of the GPU with this ordinal.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for 0 bytes, `NoDriver`, `NoDevice`, `OutOfMemory`.
    pub fn new(ordinal: usize, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::new("alloc", ErrorKind::InvalidArgument, "page-locked memory of 0 bytes")
                .remedy("ask for at least 1 byte"));
        }
        let primary = Device::new(Driver::get()?, ordinal)?.retain_primary()?;
        let driver = primary.device.driver;
        let entered = primary.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call.
        let code = unsafe { driver.host_alloc(&mut raw, bytes, PORTABLE | DEVICE_MAPPED) };
        driver.check("alloc", "cuMemHostAlloc", code)?;
        drop(entered);
        let ptr = NonNull::new(raw.cast::<u8>())
            .ok_or_else(|| Error::new("alloc", ErrorKind::OutOfMemory, "cuMemHostAlloc returned no memory"))?;
        // SAFETY: `bytes` writable bytes were just allocated.
        unsafe { ptr.write_bytes(0, bytes) };
        Ok(Self { ptr, len: bytes, primary })
    }

    /// The address by which kernels of its GPU reach byte 0.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn gpu_addr(&self) -> Result<GpuAddr> {
        let driver = self.primary.device.driver;
        let _entered = self.primary.enter()?;
        let mut addr = 0;
        // SAFETY: a live place, memory from cuMemHostAlloc, and flags that must be 0.
        let code = unsafe { driver.host_device_pointer(&mut addr, self.ptr.as_ptr().cast::<c_void>(), 0) };
        driver.check("alloc", "cuMemHostGetDevicePointer", code).map(|()| GpuAddr::new(addr))
    }

    /// The length in bytes; never 0.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, owned by `self`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes, to change.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// Where they are, for a kernel or a copy that runs on its own.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for PinnedHost {
    fn drop(&mut self) {
        let driver = self.primary.device.driver;
        let Ok(_entered) = self.primary.enter() else { return };
        // SAFETY: allocated by cuMemHostAlloc and freed once.
        let _ = unsafe { driver.host_free(self.ptr.as_ptr().cast::<c_void>()) };
    }
}

impl fmt::Debug for PinnedHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedHost").field("len", &self.len).finish_non_exhaustive()
    }
}

/// `cuMemcpyHtoD` in the calling thread's context, synchronous as CUDA has it: bytes from pageable memory may still be
/// on their way when it returns.
///
/// # Errors
///
/// What CUDA reports.
///
/// # Safety
///
/// `from.len()` bytes of live device memory start at `to`.
pub unsafe fn memcpy_to_device(to: GpuAddr, from: &[u8]) -> Result<()> {
    let driver = Driver::get()?;
    // SAFETY: the source is a live slice; the destination is the caller's duty.
    let code = unsafe { driver.copy_to_device(to.raw(), from.as_ptr().cast(), from.len()) };
    driver.check("copy", "cuMemcpyHtoD", code)
}

/// `cuMemcpyDtoH` in the calling thread's context.
///
/// # Errors
///
/// What CUDA reports.
///
/// # Safety
///
/// `to.len()` bytes of live device memory start at `from`.
pub unsafe fn memcpy_to_host(to: &mut [u8], from: GpuAddr) -> Result<()> {
    let driver = Driver::get()?;
    // SAFETY: the destination is a live slice; the source is the caller's duty.
    let code = unsafe { driver.copy_to_host(to.as_mut_ptr().cast(), from.raw(), to.len()) };
    driver.check("copy", "cuMemcpyDtoH", code)
}
