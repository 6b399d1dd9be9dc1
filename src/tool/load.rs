//! Something for the GPU to do meanwhile: a kernel that keeps every SM busy with arithmetic and the memory with reads.

#![allow(unsafe_code, reason = "launches a kernel on memory allocated here")]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::fail::Failure;
use crate::backend::Allocator;
use crate::buffer::DeviceBuffer;
use crate::cuda::{Kernel, Module, PinnedHost, Priority, Stream};
use crate::error::Error;
use crate::session::Session;
use crate::sys::num::u64_of;

const PTX: &str = include_str!("../ptx/load.ptx");
/// More than any L2 cache holds.
const BYTES: usize = 1 << 30;
const THREADS: u32 = 256;
/// Where the kernel says that it runs.
const REPORT: usize = 64;
/// How long starting and stopping may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// A GPU with the load kernel and its memory ready.
#[derive(Debug)]
pub struct Load {
    module: Module,
    buffer: DeviceBuffer,
    control: PinnedHost,
}

impl Load {
    /// Loads the kernel and allocates [`BYTES`] of device memory.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn new(session: &Session, ordinal: usize) -> Result<Self, Error> {
        let module = Module::load(ordinal, PTX)?;
        module.kernel(c"load")?;
        let buffer = session.alloc_as(ordinal, BYTES, Allocator::CuMemAlloc)?;
        let load = Self { module, buffer, control: PinnedHost::new(ordinal, 4096)? };
        // Once for nothing: whatever the driver puts off until a first launch would wait for the kernel it is to run beside.
        load.launch(Duration::ZERO)?.finish(PATIENCE)?;
        Ok(load)
    }

    /// What it does, in words.
    #[must_use]
    pub fn describe() -> &'static str {
        "a kernel on every SM: FMAs on 1 GiB read again and again, low priority"
    }

    fn stop_word(&self) -> &AtomicU32 {
        // SAFETY: the first word of `control`, which the GPU only reads.
        unsafe { AtomicU32::from_ptr(self.control.as_ptr().cast()) }
    }

    fn report(&self) -> &AtomicU64 {
        // SAFETY: inside `control`, a multiple of 8, written by the GPU with single accesses.
        unsafe { AtomicU64::from_ptr(self.control.as_ptr().wrapping_add(REPORT).cast()) }
    }

    fn launch(&self, limit: Duration) -> Result<Stream<'_>, Error> {
        self.stop_word().store(0, Ordering::Release);
        self.report().store(0, Ordering::Release);
        let kernel: Kernel<'_> = self.module.kernel(c"load")?;
        let blocks = kernel.resident_blocks(THREADS)?.max(1);
        let stream = self.module.stream(Priority::Low)?;
        let control = self.control.gpu_addr()?.raw();
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let words = [self.buffer.addr().raw(), u64_of(BYTES), control, control + u64_of(REPORT), limit_ns];
        // SAFETY: the parameter's layout is held to the kernel's by a test; freeing the memory waits for the kernel.
        unsafe { kernel.launch(&stream, blocks, THREADS, &words)? };
        Ok(stream)
    }

    /// Starts it; returns when it runs. It ends when the returned value is dropped, or by itself after `limit`.
    ///
    /// # Errors
    ///
    /// What CUDA reports, or that it does not start.
    pub fn start(&self, limit: Duration) -> Result<Loading<'_>, Failure> {
        let stream = self.launch(limit)?;
        let loading = Loading { load: self, stream };
        let started = Instant::now();
        while self.report().load(Ordering::Acquire) == 0 {
            if started.elapsed() > PATIENCE {
                let seconds = PATIENCE.as_secs();
                return Err(Failure::run(format!("the load did not start within {seconds} s; leave --load out")));
            }
            std::thread::yield_now();
        }
        Ok(loading)
    }
}

/// A running load.
#[derive(Debug)]
pub struct Loading<'a> {
    load: &'a Load,
    stream: Stream<'a>,
}

impl Loading<'_> {
    /// Whether it still runs: figures taken beside it say nothing otherwise.
    ///
    /// # Errors
    ///
    /// It failed.
    pub fn still_runs(&self) -> Result<bool, Error> {
        self.stream.is_idle().map(|idle| !idle)
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.load.stop_word().store(1, Ordering::Release);
        // It looks at the word every fraction of a millisecond.
        let _ = self.stream.finish(PATIENCE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameter_is_as_long_as_the_kernels() {
        assert_eq!(crate::cuda::parameter_bytes(PTX, "load"), Some(5 * 8));
    }
}
