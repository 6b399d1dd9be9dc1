//! The kernels that answer, on a GPU.

#![allow(unsafe_code, reason = "launches kernels on addresses that the caller vouches for")]

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Addresses, Answering, Mode, PAGE, PAGES, Shape, Side, Totals, parameter};
use crate::cuda::near;
use crate::cuda::{Kernel, Module, PinnedHost, Priority, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::range::GpuAddr;
use crate::sys::num::{u64_of, usize_of};

const PTX: &str = include_str!("../../ptx/answer.ptx");

/// One more warp than work needs looks after the kernel's end.
const WATCH_THREADS: u32 = 32;
/// Where the running blocks' reports begin, behind the word that stops them.
const REPORTS: usize = 128;
/// Bytes of a report, whose words are state, messages and wrong words.
const REPORT: usize = 64;
/// How long starting and stopping may take on a busy GPU.
const PATIENCE: Duration = Duration::from_secs(5);

fn kernel_name(mode: Mode) -> &'static CStr {
    match mode {
        Mode::Flag => c"answer_flag",
        Mode::Data => c"answer_data",
        Mode::Packets => c"answer_packets",
    }
}

/// A GPU with the answering kernels loaded.
#[derive(Debug)]
pub struct GpuSide {
    module: Module,
    ordinal: usize,
}

impl GpuSide {
    /// Compiles and loads the kernels, so that no launch waits for that.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn load(ordinal: usize) -> Result<Self> {
        let module = Module::load(ordinal, PTX)?;
        for mode in [Mode::Flag, Mode::Data, Mode::Packets] {
            module.kernel(kernel_name(mode))?;
        }
        Ok(Self { module, ordinal })
    }
}

impl Side for GpuSide {
    unsafe fn start(&self, shape: Shape, at: Addresses, idle: Duration) -> Result<Box<dyn Answering + '_>> {
        let kernel: Kernel<'_> = self.module.kernel(kernel_name(shape.mode))?;
        let threads = shape.threads.next_multiple_of(32) + WATCH_THREADS;
        // Blocks that could not run beside the others would wait for ever: those that run serve several.
        let most = kernel.resident_blocks(threads)?;
        if most == 0 {
            let cause = format!("no block of {} threads and {WATCH_THREADS} more fits on this GPU", shape.threads);
            return Err(Error::new("launch", ErrorKind::InvalidArgument, cause).remedy("ask for fewer threads"));
        }
        let blocks = u32::try_from(shape.blocks).unwrap_or(u32::MAX).min(most);
        let control = PinnedHost::new(self.ordinal, REPORTS + REPORT * usize_of(u64::from(blocks)))?;
        let address = control.gpu_addr()?.raw();
        let stream = self.module.stream(Priority::High)?;
        let words = parameter(shape, at, address, address + u64_of(REPORTS), idle);
        // SAFETY: the parameter's layout is held to the kernel's by a test; the areas are the caller's duty; `control`
        // is freed by `drop` after the kernel has ended.
        unsafe { kernel.launch(&stream, blocks, threads, &words)? };
        let running = Running { stream, control: Some(control), blocks: usize_of(u64::from(blocks)) };
        running.await_start()?;
        Ok(Box::new(running))
    }

    fn pages_by_distance(&self, memory: GpuAddr) -> Result<[usize; PAGES]> {
        const { assert!(PAGES == near::PLACES && PAGE == near::STRIDE) };
        let report = PinnedHost::new(self.ordinal, near::REPORT_BYTES)?;
        // SAFETY: the caller's memory is so large; `report` is freed when the kernel has ended.
        let places = unsafe { near::by_distance(&self.module, memory, (report.as_ptr(), report.gpu_addr()?.raw())) };
        Ok(places?.map(|(_, offset)| offset))
    }
}

/// A kernel on the GPU.
#[derive(Debug)]
struct Running<'a> {
    stream: Stream<'a>,
    /// Present until the end.
    control: Option<PinnedHost>,
    blocks: usize,
}

impl Running<'_> {
    fn control(&self) -> &PinnedHost {
        self.control.as_ref().expect("taken only by `drop`")
    }

    fn report_word(&self, block: usize, word: usize) -> u64 {
        let at = self.control().as_ptr().wrapping_add(REPORTS + REPORT * block + 8 * word);
        // SAFETY: inside `control`, a multiple of 8, and written by the GPU with single accesses.
        unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Acquire)
    }

    /// Waits until every block runs.
    fn await_start(&self) -> Result<()> {
        let started = Instant::now();
        while (0..self.blocks).any(|block| self.report_word(block, 0) == 0) {
            if self.stream.is_idle()? {
                // It may have ended in between, having run.
                break;
            }
            if started.elapsed() > PATIENCE {
                let cause = format!("the GPU did not start a kernel within {} s", PATIENCE.as_secs());
                return Err(Error::new("launch", ErrorKind::Busy, cause)
                    .remedy("look with nvidia-smi for another program that keeps the GPU busy"));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn end(&self) -> Result<()> {
        // SAFETY: the first word of `control`, which the GPU only reads.
        unsafe { AtomicU32::from_ptr(self.control().as_ptr().cast()) }.store(1, Ordering::Release);
        self.stream.finish(PATIENCE)
    }
}

impl Answering for Running<'_> {
    fn has_ended(&self) -> Result<bool> {
        self.stream.is_idle()
    }

    fn let_run(&self) {}

    fn stop(self: Box<Self>) -> Result<Totals> {
        self.end()?;
        let sum = |word| (0..self.blocks).map(|block| self.report_word(block, word)).sum();
        Ok(Totals { messages: sum(1), wrong_words: sum(2) })
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.end().is_err() {
            // The kernel may still write there; the memory must outlive it.
            std::mem::forget(self.control.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::parameter_bytes;

    #[test]
    fn the_parameter_is_as_long_as_the_kernels() {
        let shape = Shape { mode: Mode::Flag, bytes: 4, blocks: 1, threads: 32 };
        let at = Addresses { flags: 0, data: 0, answers: 0 };
        let words = parameter(shape, at, 0, 0, Duration::ZERO);
        for mode in [Mode::Flag, Mode::Data, Mode::Packets] {
            let name = kernel_name(mode).to_str().unwrap();
            assert_eq!(parameter_bytes(PTX, name), Some(size_of_val(&words)), "{name}");
        }
    }
}
