//! The least that any program could do to share a copy: threads that spin, on shares cut up once, with a word to begin and
//! one each to end. Nobody asks for work, sleeps between copies or stands in for another, and nothing is ordered beyond
//! what the words need. What a copier takes longer is its own; what this takes is the machine's.

#![allow(
    unsafe_code,
    reason = "routines are called on the window directly, by several threads, on shares that do not meet"
)]

use std::hint::spin_loop;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};

use gdrcopy::Mapping;
use gdrcopy::copy::{self, Routine, fence};
use gdrcopy::tool::cpu;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::report::Direction;

use crate::lab::Load;

const LINE: usize = 64;

/// A cache line, and its neighbour that processors fetch along with it, for one writer.
#[repr(align(128))]
struct Own<T>(T);

/// What the caller writes.
struct Order {
    number: AtomicU32,
    mode: AtomicU32,
    device: AtomicPtr<u8>,
    host: AtomicPtr<u8>,
}

const SPIN: u32 = 0;
const SLEEP: u32 = 1;
const END: u32 = 2;

/// What a thread writes.
struct Word {
    /// The last copy whose share it has done.
    done: Own<AtomicU32>,
    /// `SPIN`, `SLEEP`, or `END` for one that cannot be kept on its CPU.
    mode: Own<AtomicU32>,
}

struct Shared {
    order: Own<Order>,
    words: Box<[Word]>,
    routine: &'static Routine,
    direction: Direction,
    bytes: usize,
}

/// The threads, the calling one not among them. They sleep until [`wake`](Self::wake).
pub(crate) struct Bare {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Bare {
    /// Threads on these CPUs, for copies of so many bytes.
    pub(crate) fn start(cpus: &[u32], direction: Direction, bytes: usize) -> Result<Self, Failure> {
        let order = Order {
            number: AtomicU32::new(0),
            mode: AtomicU32::new(SLEEP),
            device: AtomicPtr::new(ptr::null_mut()),
            host: AtomicPtr::new(ptr::null_mut()),
        };
        // Until a thread sleeps it is taken to spin.
        let word = || Word { done: Own(AtomicU32::new(0)), mode: Own(AtomicU32::new(SPIN)) };
        let words = cpus.iter().map(|_| word()).collect();
        let shared = Arc::new(Shared { order: Own(order), words, routine: copy::preferred(), direction, bytes });
        // Complete from the start, so that whatever fails below ends what has been started.
        let mut bare = Self { shared, threads: Vec::with_capacity(cpus.len()) };
        for (n, &cpu) in cpus.iter().enumerate() {
            let shared = Arc::clone(&bare.shared);
            let thread = thread::Builder::new().name(format!("bare-{n}")).spawn(move || shared.work(n, cpu));
            let thread = thread.map_err(|error| Failure::run(format!("a thread cannot be started: {error}")))?;
            bare.threads.push(thread);
        }
        for (word, cpu) in bare.shared.words.iter().zip(cpus) {
            while word.mode.0.load(Ordering::Acquire) == SPIN {
                spin_loop();
            }
            if word.mode.0.load(Ordering::Acquire) == END {
                return Err(Failure::run(format!("a thread of the bare loop cannot be kept on CPU {cpu}")));
            }
        }
        Ok(bare)
    }

    /// Threads that share a copy, the calling one among them.
    pub(crate) fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Returns when all threads spin.
    pub(crate) fn wake(&self) {
        self.turn_to(SPIN);
    }

    /// Returns when all threads are about to sleep.
    pub(crate) fn rest(&self) {
        self.turn_to(SLEEP);
    }

    fn order(&self, mode: u32) {
        self.shared.order.0.mode.store(mode, Ordering::SeqCst);
        self.threads.iter().for_each(|thread| thread.thread().unpark());
    }

    fn turn_to(&self, mode: u32) {
        self.order(mode);
        for word in &self.shared.words {
            while word.mode.0.load(Ordering::Acquire) != mode {
                spin_loop();
            }
        }
    }

    /// One copy, at the start of the window. The threads spin.
    #[inline]
    pub(crate) fn carry(&self, mapping: &Mapping<'_>, load: &Load) {
        let shared = &*self.shared;
        let mut to = load.to.borrow_mut();
        let host = match shared.direction {
            Direction::HostToDevice => load.from.as_ptr().cast_mut(),
            Direction::DeviceToHost => to.as_mut_ptr(),
        };
        assert!(load.direction == shared.direction && load.from.len() == shared.bytes && to.len() == shared.bytes);
        assert!(mapping.len() >= shared.bytes, "the window holds the largest copy");
        let order = &shared.order.0;
        let number = order.number.load(Ordering::Relaxed).wrapping_add(1);
        let device = mapping.as_ptr();
        order.device.store(device, Ordering::Relaxed);
        order.host.store(host, Ordering::Relaxed);
        order.number.store(number, Ordering::Release);
        // SAFETY: the window and the host's bytes are as long as the copy, by the assertions, and borrowed until this returns.
        unsafe { shared.copy(shared.share(0), device, host) };
        for word in &shared.words {
            while word.done.0.load(Ordering::Acquire) != number {
                spin_loop();
            }
        }
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        self.order(END);
        for thread in self.threads.drain(..) {
            // It does not panic, and if it did there would be nothing left to do here.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Even shares of whole lines, the caller's first.
    fn share(&self, n: usize) -> Range<usize> {
        let (lines, threads) = (self.bytes.div_ceil(LINE), self.words.len() + 1);
        let byte = |n: usize| (lines * n / threads * LINE).min(self.bytes);
        byte(n)..byte(n + 1)
    }

    /// # Safety
    ///
    /// The share lies in the window that begins at `device` and in the bytes at `host`; these are nobody else's, for a read.
    #[inline]
    unsafe fn copy(&self, share: Range<usize>, device: *mut u8, host: *mut u8) {
        let (device, host) = (device.wrapping_add(share.start), host.wrapping_add(share.start));
        match self.direction {
            Direction::HostToDevice => {
                // SAFETY: a part of the bytes that the caller vouches for.
                let from = unsafe { std::slice::from_raw_parts(host, share.len()) };
                // SAFETY: as above; the preferred routine is available; no reference to the window exists.
                unsafe { self.routine.store(device, from) };
                fence::store();
            }
            Direction::DeviceToHost => {
                // SAFETY: a part of the bytes that the caller vouches for, and this thread's alone.
                let to = unsafe { std::slice::from_raw_parts_mut(host, share.len()) };
                // SAFETY: as above; the preferred routine is available; a window is whole pages and so whole lines.
                unsafe { self.routine.load(to, device) };
            }
        }
    }

    /// The life of thread `n`.
    fn work(&self, n: usize, cpu: u32) {
        let (Word { done, mode }, order) = (&self.words[n], &self.order.0);
        if cpu::pin_to(cpu).is_err() {
            mode.0.store(END, Ordering::Release);
            return;
        }
        let share = self.share(n + 1);
        let mut seen = 0;
        loop {
            mode.0.store(SLEEP, Ordering::Release);
            while order.mode.load(Ordering::SeqCst) == SLEEP {
                thread::park();
            }
            if order.mode.load(Ordering::Relaxed) == END {
                return;
            }
            mode.0.store(SPIN, Ordering::Release);
            loop {
                let number = order.number.load(Ordering::Acquire);
                if number != seen {
                    seen = number;
                    let device = order.device.load(Ordering::Relaxed);
                    // SAFETY: the caller of this copy vouched for its ranges and waits for this share.
                    unsafe { self.copy(share.clone(), device, order.host.load(Ordering::Relaxed)) };
                    done.0.store(number, Ordering::Release);
                } else if order.mode.load(Ordering::Relaxed) != SPIN {
                    break;
                } else {
                    spin_loop();
                }
            }
        }
    }
}
