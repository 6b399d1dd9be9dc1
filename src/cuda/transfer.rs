//! Copies on a stream of our own, which never wait for anybody else's kernel.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use super::driver::{Driver, Handle, NOT_READY, SUCCESS};
use crate::error::{Error, ErrorKind, Result};

/// `CU_STREAM_NON_BLOCKING`: does not synchronise with the default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

/// A non-blocking stream and an event. Destroying them waits for nobody (CUDA releases a busy stream when it is done).
#[derive(Debug)]
pub(crate) struct Lane {
    driver: &'static Driver,
    stream: Handle,
    event: Handle,
}

// SAFETY: streams and events may be used from any thread.
unsafe impl Send for Lane {}

impl Drop for Lane {
    fn drop(&mut self) {
        // SAFETY: our own event, destroyed once.
        let _ = unsafe { self.driver.event_destroy(self.event) };
        // SAFETY: our own stream, destroyed once.
        let _ = unsafe { self.driver.stream_destroy(self.stream) };
    }
}

impl Lane {
    /// In the current context.
    pub(crate) fn new(driver: &'static Driver) -> Result<Self> {
        let (mut stream, event) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the place outlives the call; a priority out of range is clamped.
        let code = unsafe { driver.stream_create(&mut stream, NON_BLOCKING, i32::MIN) };
        driver.check("copy", "cuStreamCreateWithPriority", code)?;
        let mut lane = Self { driver, stream, event };
        // SAFETY: the place outlives the call.
        let code = unsafe { driver.event_create(&mut lane.event, DISABLE_TIMING) };
        driver.check("copy", "cuEventCreate", code)?;
        Ok(lane)
    }

    /// Copies and waits for arrival.
    pub(crate) fn upload(&mut self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the source outlives the wait below; the destination was checked by the allocation's owner.
        let code = unsafe { self.driver.copy_to_device_async(to, from.as_ptr().cast(), from.len(), self.stream) };
        self.driver.check("copy", "cuMemcpyHtoDAsync", code)?;
        self.sync()
    }

    /// Copies and waits for arrival.
    pub(crate) fn download(&mut self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: the destination outlives the wait below; the source was checked by the allocation's owner.
        let code = unsafe { self.driver.copy_to_host_async(to.as_mut_ptr().cast(), from, to.len(), self.stream) };
        self.driver.check("copy", "cuMemcpyDtoHAsync", code)?;
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        // SAFETY: our own stream.
        self.driver.check("copy", "cuStreamSynchronize", unsafe { self.driver.stream_sync(self.stream) })
    }

    /// Like `upload`, from page-locked memory, but gives up after `limit`.
    ///
    /// # Safety
    ///
    /// `bytes` page-locked bytes at `from` and as many device bytes at `to` stay allocated whatever is returned: a copy
    /// that was given up on may still run.
    pub(crate) unsafe fn upload_within(
        &mut self,
        to: u64,
        from: *const c_void,
        bytes: usize,
        limit: Duration,
    ) -> Result<()> {
        // SAFETY: the caller's duty.
        let code = unsafe { self.driver.copy_to_device_async(to, from, bytes, self.stream) };
        self.driver.check("pin", "cuMemcpyHtoDAsync", code)?;
        self.wait(limit)
    }

    /// Like `download`, to page-locked memory, but gives up after `limit`.
    ///
    /// # Safety
    ///
    /// As [`Lane::upload_within`].
    pub(crate) unsafe fn download_within(
        &mut self,
        to: *mut c_void,
        from: u64,
        bytes: usize,
        limit: Duration,
    ) -> Result<()> {
        // SAFETY: the caller's duty.
        let code = unsafe { self.driver.copy_to_host_async(to, from, bytes, self.stream) };
        self.driver.check("pin", "cuMemcpyDtoHAsync", code)?;
        self.wait(limit)
    }

    fn wait(&self, limit: Duration) -> Result<()> {
        // SAFETY: our own event and stream.
        let code = unsafe { self.driver.event_record(self.event, self.stream) };
        self.driver.check("pin", "cuEventRecord", code)?;
        let started = Instant::now();
        loop {
            // SAFETY: our own event.
            match unsafe { self.driver.event_query(self.event) } {
                SUCCESS => return Ok(()),
                NOT_READY if started.elapsed() < limit => std::hint::spin_loop(),
                NOT_READY => {
                    let cause = format!("the GPU did not finish a small copy within {} ms", limit.as_millis());
                    return Err(Error::new("pin", ErrorKind::Busy, cause).remedy(
                        "pin before long copies are queued, or try again when the GPU's copy engines are free",
                    ));
                }
                code => return self.driver.check("pin", "cuEventQuery", code),
            }
        }
    }
}
