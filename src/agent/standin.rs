//! Threads that play the kernel: the device side of `src/ptx/push.cu` once more, on the memory of emulated GPUs.
//!
//! Each thread stands for a warp. What they do to each other is what warps do: each looks at the doorbell itself, all meet
//! at a barrier after each request, and the first one alone decides that the block leaves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::engine::Launch;
use super::options::Fault;
use super::wire::{Control, Doorbell, LINE, Order, index};
use crate::copy::{self, fence};
use crate::error::{Error, ErrorKind, Result};
use crate::mapping::Mapping;
use crate::sys::num::{u64_of, usize_of};

/// Threads of a block. More than one, or there would be nothing to race.
const WARPS: usize = 2;
/// Polls between two looks at the clock, after which another thread gets its turn.
const POLLS_PER_LOOK: u64 = 32;

/// A window that the threads use: its owner keeps it until they have ended.
#[derive(Clone, Copy)]
struct Window {
    addr: u64,
    len: usize,
    at: *mut u8,
}

// SAFETY: an address in a window that is good on every thread.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    fn of(mapping: &Mapping<'_>) -> Self {
        Self { addr: mapping.gpu_addr().raw(), len: mapping.len(), at: mapping.as_ptr() }
    }

    /// Where `bytes` bytes from a device address on are, if they are in this window.
    fn find(&self, addr: u64, bytes: usize) -> Option<*mut u8> {
        let offset = addr.checked_sub(self.addr).map(usize_of)?;
        (offset <= self.len && bytes <= self.len - offset).then(|| self.at.wrapping_add(offset))
    }
}

/// What the threads of one launch share.
struct Block {
    launch: Launch,
    control: Arc<Control>,
    ring: Window,
    ranges: Arc<[Window]>,
    fault: Option<(u32, Fault)>,
    barrier: Barrier,
    leaves_at: AtomicU64,
}

/// Launches the threads, one block after the other.
pub(super) struct StandIn<'a> {
    control: Arc<Control>,
    ring: Window,
    ranges: Arc<[Window]>,
    fault: Option<(u32, Fault)>,
    running: Vec<JoinHandle<()>>,
    /// Keep the windows.
    _mappings: Vec<Mapping<'a>>,
}

impl<'a> StandIn<'a> {
    /// `ring` outlives the threads.
    pub(super) fn new(
        control: Arc<Control>,
        ring: &Mapping<'_>,
        mappings: Vec<Mapping<'a>>,
        fault: Option<(u32, Fault)>,
    ) -> Self {
        let ranges = mappings.iter().map(Window::of).collect();
        Self { control, ring: Window::of(ring), ranges, fault, running: Vec::new(), _mappings: mappings }
    }

    pub(super) fn launch(&mut self, launch: Launch) -> Result<()> {
        // As on a stream: one after the other.
        self.join();
        let block = Arc::new(Block {
            launch,
            control: Arc::clone(&self.control),
            ring: self.ring,
            ranges: Arc::clone(&self.ranges),
            fault: self.fault,
            barrier: Barrier::new(WARPS),
            leaves_at: AtomicU64::new(u64::MAX),
        });
        for warp in 0..WARPS {
            let block = Arc::clone(&block);
            let thread = thread::Builder::new().name(format!("push agent {warp}")).spawn(move || block.serve(warp));
            self.running.push(thread.map_err(|error| {
                Error::new("agent", ErrorKind::OutOfMemory, format!("a thread cannot be started: {error}"))
            })?);
        }
        Ok(())
    }

    pub(super) fn has_ended(&self) -> bool {
        self.running.iter().all(JoinHandle::is_finished)
    }

    fn join(&mut self) {
        for thread in self.running.drain(..) {
            // A panic has been printed; its block has not announced anything, which the host notices.
            let _ = thread.join();
        }
    }

    /// Waits for the threads.
    pub(super) fn finish(&mut self, limit: Duration) -> Result<()> {
        let started = Instant::now();
        while !self.has_ended() {
            if started.elapsed() > limit {
                let cause = format!("the stand-in did not end within {} ms", limit.as_millis());
                return Err(Error::new("agent", ErrorKind::Busy, cause));
            }
            thread::yield_now();
        }
        self.join();
        Ok(())
    }
}

impl Block {
    fn serve(&self, warp: usize) {
        let started = Instant::now();
        let mut number = self.launch.next;
        if warp == 0 {
            self.control.start(self.launch.generation);
        }
        self.barrier.wait();
        for count in 0.. {
            match self.fault {
                Some((at, Fault::Dies)) if at == number => return,
                Some((at, Fault::Hangs)) if at == number => loop {
                    thread::park();
                },
                Some((at, Fault::Sleeps(time))) if at == number => thread::sleep(time),
                _ => {}
            }
            let bell = if warp == 0 { self.lead(started, count, number) } else { self.follow(count, number) };
            let order = bell.map(|bell| bell.order);
            if let Some(bell) = bell {
                self.obey(bell, warp, number);
            }
            if warp == 0 && matches!(order, None | Some(Order::Stop)) {
                self.leaves_at.store(count, Ordering::Relaxed);
            }
            self.barrier.wait();
            if self.leaves_at.load(Ordering::Relaxed) == count {
                if warp == 0 {
                    let unserved = if order.is_some() { number.wrapping_add(1) } else { number };
                    self.control.leave(self.launch.generation, unserved);
                }
                return;
            }
            if warp == 0 && order.is_some_and(Order::is_answered) {
                self.control.answer(number);
            }
            number = number.wrapping_add(1);
        }
    }

    fn lead(&self, started: Instant, count: u64, number: u32) -> Option<Doorbell> {
        let since = Instant::now();
        let is_over = |limit: u64, since: Instant| limit != 0 && since.elapsed().as_nanos() > u128::from(limit);
        for polls in 0_u64.. {
            if polls.is_multiple_of(POLLS_PER_LOOK) && (polls > 0 || count > 0) {
                let is_idle = polls > 0 && is_over(self.launch.idle_ns, since);
                if is_idle || is_over(self.launch.residency_ns, started) {
                    return None;
                }
                thread::yield_now();
            }
            if let Some(bell) = self.rings(number) {
                return Some(bell);
            }
        }
        None
    }

    fn follow(&self, count: u64, number: u32) -> Option<Doorbell> {
        for polls in 0_u64.. {
            let leaves = self.leaves_at.load(Ordering::Relaxed) == count;
            if let Some(bell) = self.rings(number) {
                return Some(bell);
            }
            if leaves {
                return None;
            }
            if polls.is_multiple_of(POLLS_PER_LOOK) {
                thread::yield_now();
            }
        }
        None
    }

    fn rings(&self, number: u32) -> Option<Doorbell> {
        let line = self.ring.at.wrapping_add(LINE * index(number & self.launch.mask));
        let load = |word: usize| {
            // SAFETY: the line lies in the ring's window, which outlives the threads, and starts at a multiple of 64.
            unsafe { copy::load_u64(line.wrapping_add(8 * word).cast()) }
        };
        // The half with the number first: on x86 the other is not older then.
        let (bytes, order) = (load(1), load(3));
        Doorbell::in_words([load(0), bytes, load(2), order], number)
    }

    fn obey(&self, bell: Doorbell, warp: usize, number: u32) {
        let bytes = index(bell.bytes);
        match bell.order {
            Order::Stop => {}
            Order::Send => {
                for packet in (warp..bytes.div_ceil(8)).step_by(WARPS) {
                    let mut data = [0; 8];
                    let wanted = (bytes - 8 * packet).min(8);
                    self.load(bell.source + u64_of(8 * packet), &mut data[..wanted]);
                    self.control.send(number, packet, data);
                }
            }
            Order::Copy | Order::CopyAndAnswer | Order::Bulk | Order::BulkAndAnswer => {
                let (start, end) = (bytes * warp / WARPS, bytes * (warp + 1) / WARPS);
                let mut data = vec![0; end - start];
                self.load(bell.source + u64_of(start), &mut data);
                self.store(bell.target + u64_of(start), &data);
            }
        }
    }

    /// Device memory by its window.
    fn window(&self, addr: u64, bytes: usize) -> Option<*mut u8> {
        self.ranges.iter().find_map(|window| window.find(addr, bytes))
    }

    /// Device memory by its window; any other address is one of the host's, exposed when it was handed over.
    fn place(&self, addr: u64, bytes: usize) -> *mut u8 {
        self.window(addr, bytes).unwrap_or_else(|| std::ptr::with_exposed_provenance_mut(usize_of(addr)))
    }

    fn load(&self, addr: u64, to: &mut [u8]) {
        if to.is_empty() {
            return;
        }
        let Some(from) = self.window(addr, to.len()) else {
            let from = self.place(addr, to.len()).cast_const();
            // SAFETY: host memory that is left alone until the answer; `to` is the thread's own.
            return unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) };
        };
        fence::full();
        // SAFETY: inside a window of whole pages, which outlives the threads.
        unsafe { copy::preferred().load(to, from) };
        fence::load();
    }

    fn store(&self, addr: u64, from: &[u8]) {
        if from.is_empty() {
            return;
        }
        let to = self.place(addr, from.len());
        // SAFETY: inside a window, which outlives the threads, or host memory that is left alone until the answer.
        unsafe { copy::preferred().store(to, from) };
        fence::store();
    }
}
