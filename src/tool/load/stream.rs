//! A kernel on every SM that multiplies what it reads from a memory that no cache holds, without end.

#![allow(unsafe_code, reason = "launches a kernel on memory allocated here")]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::{PATIENCE, PTX, await_start};
use crate::backend::Allocator;
use crate::buffer::DeviceBuffer;
use crate::cuda::{Kernel, Module, PinnedHost, Priority, Stream};
use crate::error::Error;
use crate::session::Session;
use crate::sys::num::u64_of;
use crate::tool::fail::Failure;

/// More than any L2 cache holds.
const BYTES: usize = 1 << 30;
const THREADS: u32 = 256;
/// Where the kernel says that it runs.
const REPORT: usize = 64;

/// The kernel and its memory.
#[derive(Debug)]
pub(super) struct Reader {
    module: Module,
    buffer: DeviceBuffer,
    control: PinnedHost,
}

impl Reader {
    pub(super) fn new(session: &Session, ordinal: usize) -> Result<Self, Error> {
        let module = Module::load(ordinal, PTX)?;
        module.kernel(c"load")?;
        let buffer = session.alloc_as(ordinal, BYTES, Allocator::CuMemAlloc)?;
        let reader = Self { module, buffer, control: PinnedHost::new(ordinal, 4096)? };
        // Once for nothing: whatever the driver puts off until a first launch would wait for the kernel it is to run beside.
        reader.launch(Duration::ZERO)?.finish(PATIENCE)?;
        Ok(reader)
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

    pub(super) fn start(&self, limit: Duration) -> Result<Reading<'_>, Failure> {
        let stream = self.launch(limit)?;
        let reading = Reading { reader: self, stream };
        await_start(|| Ok(self.report().load(Ordering::Acquire) != 0))?;
        Ok(reading)
    }
}

/// The kernel runs.
#[derive(Debug)]
pub(super) struct Reading<'a> {
    reader: &'a Reader,
    stream: Stream<'a>,
}

impl Reading<'_> {
    pub(super) fn still_runs(&self) -> Result<bool, Error> {
        self.stream.is_idle().map(|idle| !idle)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.reader.stop_word().store(1, Ordering::Release);
        // It looks at the word every fraction of a millisecond.
        let _ = self.stream.finish(PATIENCE);
    }
}
