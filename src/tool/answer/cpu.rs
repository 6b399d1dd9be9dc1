//! A thread in the kernel's place, for emulated GPUs, whose memory is the host's.

#![allow(unsafe_code, reason = "reads and writes memory that another thread shares, by its address")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{ANSWER_STRIDE, LINE};
use super::{Addresses, Answering, FLAG_STRIDE, Mode, PAGE, PAGES, PART, Shape, Side, Totals, WRONG_DATA};
use crate::error::{Error, ErrorKind, Result};
use crate::range::GpuAddr;
use crate::sys::num::{u64_of, usize_of};
use crate::tool::cpu::{self, CpuList};

/// Polls between two looks at the clock and two offers of the processor to others.
const PATIENT_POLLS: u32 = 1 << 10;

/// An emulated GPU.
#[derive(Debug)]
pub struct CpuSide {
    /// Where the thread may run, as it was before the measuring thread settled.
    cpus: Option<CpuList>,
}

impl CpuSide {
    /// Made before the measuring thread settles on its CPU: the answering one wants another.
    #[must_use]
    pub fn new() -> Self {
        Self { cpus: cpu::allowed() }
    }
}

impl Default for CpuSide {
    fn default() -> Self {
        Self::new()
    }
}

impl Side for CpuSide {
    unsafe fn start(&self, shape: Shape, at: Addresses, idle: Duration) -> Result<Box<dyn Answering + '_>> {
        let stop = Arc::new(AtomicBool::new(false));
        let cpus = self.cpus.clone();
        let taken = cpu::current();
        let job = Job { shape, at, idle, stop: Arc::clone(&stop) };
        let thread = thread::Builder::new()
            .name("emulated GPU".to_owned())
            .spawn(move || {
                if let Some((cpus, taken)) = cpus.zip(taken) {
                    // Sharing one with the other side is slow, not wrong.
                    let _ = cpu::move_away(&cpus, taken);
                }
                job.run()
            })
            .map_err(|error| {
                Error::new("launch", ErrorKind::OutOfMemory, format!("no thread can be started: {error}"))
            })?;
        Ok(Box::new(Running { stop, thread: Some(thread) }))
    }

    fn pages_by_distance(&self, _: GpuAddr) -> Result<[usize; PAGES]> {
        Ok(std::array::from_fn(|page| PAGE * page))
    }
}

struct Running {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Totals>>,
}

impl Running {
    fn end(&mut self) -> Totals {
        self.stop.store(true, Ordering::Release);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Answering for Running {
    fn has_ended(&self) -> Result<bool> {
        Ok(self.thread.as_ref().is_none_or(JoinHandle::is_finished))
    }

    fn let_run(&self) {
        thread::yield_now();
    }

    fn stop(mut self: Box<Self>) -> Result<Totals> {
        Ok(self.end())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// The word at an address.
///
/// # Safety
///
/// 4 bytes of memory, aligned, that stay; others reach them by single accesses only.
unsafe fn word<'a>(at: u64) -> &'a AtomicU32 {
    let pointer = std::ptr::with_exposed_provenance_mut(usize_of(at));
    // SAFETY: the caller's duty.
    unsafe { AtomicU32::from_ptr(pointer) }
}

/// What the thread does: see `answer.cu`, whose steps these are.
struct Job {
    shape: Shape,
    at: Addresses,
    idle: Duration,
    stop: Arc<AtomicBool>,
}

/// Told to stop, or nothing came for too long.
struct Over;

impl Job {
    fn run(&self) -> Totals {
        let mut totals = Totals::default();
        if self.shape.blocks == 0 {
            return totals;
        }
        for number in 1.. {
            for block in 0..self.shape.blocks {
                let Ok(wrong) = self.take(number, block) else { return totals };
                totals.messages += 1;
                totals.wrong_words += wrong;
                let answer = if wrong > 0 { number | WRONG_DATA } else { number };
                // SAFETY: the caller of `start` keeps the answers.
                unsafe { word(self.at.answers + u64_of(block * ANSWER_STRIDE)) }.store(answer, Ordering::Release);
            }
        }
        totals
    }

    /// Waits for a message and counts its wrong words.
    fn take(&self, number: u32, block: usize) -> Result<u64, Over> {
        let shape = self.shape;
        let data = self.at.data + u64_of(block * shape.data_stride());
        if shape.mode != Mode::Packets {
            // SAFETY: the caller of `start` keeps the flags.
            let flag = unsafe { word(self.at.flags + u64_of(block * FLAG_STRIDE)) };
            self.wait(|| flag.load(Ordering::Acquire) == number)?;
        } else {
            for part in 0..shape.bytes.div_ceil(PART) {
                // SAFETY: the caller of `start` keeps the data.
                let last = unsafe { word(data + u64_of(part * PART + 12)) };
                self.wait(|| last.load(Ordering::Acquire) == number)?;
            }
        }
        Ok(match shape.mode {
            Mode::Flag => 0,
            // SAFETY: as above.
            Mode::Data => unsafe { wrong_words(shape, number, data, shape.bytes) },
            // SAFETY: as above.
            Mode::Packets => unsafe { wrong_words(shape, number, data, shape.bytes.next_multiple_of(PART)) },
        })
    }

    fn wait(&self, mut is_there: impl FnMut() -> bool) -> Result<(), Over> {
        let started = Instant::now();
        loop {
            for _ in 0..PATIENT_POLLS {
                if is_there() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if self.stop.load(Ordering::Acquire) || started.elapsed() > self.idle {
                return Err(Over);
            }
            thread::yield_now();
        }
    }
}

/// Words of a message that are wrong in their bytes below `bytes`.
///
/// # Safety
///
/// The whole lines around `bytes` bytes at `data` stay and are reached by single accesses only.
unsafe fn wrong_words(shape: Shape, number: u32, data: u64, bytes: usize) -> u64 {
    let is_wrong = |&index: &usize| {
        // SAFETY: the caller's duty.
        let found = unsafe { word(data + u64_of(4 * index)) }.load(Ordering::Relaxed);
        let wanted = shape.word(number, u32::try_from(index).unwrap_or(u32::MAX));
        let kept = match bytes - 4 * index {
            left @ 0..4 => (1_u32 << (8 * left)) - 1,
            _ => u32::MAX,
        };
        (found ^ wanted) & kept != 0
    };
    debug_assert!(bytes <= shape.bytes.next_multiple_of(LINE), "inside the data area");
    u64_of((0..bytes.div_ceil(4)).filter(is_wrong).count())
}
