//! The workers, and how work gets to them.
//!
//! A copy is cut into pieces, large ones first, and whoever is free takes the next. The caller writes what is to be done
//! into one line that all workers look at, and takes pieces itself. When none are left it closes the copy and waits for
//! those who are still at one. So nobody waits for a worker that is asleep, or that the system has put aside: only for one
//! that is at work. It also means that a wake-up which comes too late, or is lost, costs time and nothing else, and that a
//! core which is slow for a while, as a hyperthread beside a busy one is, gets less to do.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::super::Routine;
use super::super::fence;
use super::pieces::Pieces;
use crate::policy::CopyDirection;

/// A copy. The pointers are the caller's, who waits until it is done.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) routine: &'static Routine,
    pub(super) device: *mut u8,
    pub(super) host: *mut u8,
    pub(super) len: usize,
    /// For how many threads it is cut up.
    pub(super) shares: usize,
    pub(super) direction: CopyDirection,
    /// Those whom it is cut up for are all awake.
    pub(super) is_prompt: bool,
}

impl Job {
    /// Takes pieces until none are left; where there is one for each thread, and all are there, a worker (`is_helper`) takes
    /// no second.
    ///
    /// # Safety
    ///
    /// The routine is available; the device bytes, and the whole lines around them, are mapped; the host bytes are
    /// readable, for a load writable and no other thread's; and all of that until this returns.
    unsafe fn run(&self, next: &AtomicU32, is_helper: bool) {
        let pieces = Pieces::new(self.device.addr(), self.len, self.shares, self.direction);
        // What the pieces hold is ordered by the opening and the closing of the copy.
        while let Some(range) = pieces.range(next.fetch_add(1, Ordering::Relaxed)) {
            let (device, host) = (self.device.wrapping_add(range.start), self.host.wrapping_add(range.start));
            match self.direction {
                CopyDirection::HostToDevice => {
                    // SAFETY: a piece of the range that the caller vouches for.
                    let from = unsafe { std::slice::from_raw_parts(host, range.len()) };
                    // SAFETY: as above.
                    unsafe { self.routine.store(device, from) };
                }
                CopyDirection::DeviceToHost => {
                    // SAFETY: as above; this thread alone took the piece, and pieces do not overlap.
                    let to = unsafe { std::slice::from_raw_parts_mut(host, range.len()) };
                    // SAFETY: as above.
                    unsafe { self.routine.load(to, device) };
                }
            }
            // What a worker that comes too late does not take, the caller does.
            if is_helper && self.is_prompt && pieces.are_shares() {
                return;
            }
        }
    }

    /// What makes this core's pieces part of the copy when it says that they are done.
    fn fence(&self) {
        match self.direction {
            // What the caller writes then is seen after these bytes.
            CopyDirection::HostToDevice => fence::store(),
            CopyDirection::DeviceToHost => fence::load(),
        }
    }
}

/// What is to be done, all of it in one line of 64 bytes: workers that wait share it, and one store of the caller's tells
/// them all.
#[repr(C, align(128))]
struct Board {
    /// The number of the copy: odd while it is open.
    number: AtomicU32,
    /// How many workers may take part.
    hands: AtomicU32,
    /// Written by the caller while no copy is open and no worker at one; read by workers that are [at](Worker::at) it.
    job: UnsafeCell<Option<Job>>,
}

/// The next piece. In a line of its own, for everybody writes it.
#[repr(align(128))]
struct Counter(AtomicU32);

#[repr(align(128))]
struct Worker {
    /// The copy that it is at; 0 for none.
    at: AtomicU32,
    bed: Bed,
}

/// Whether a worker sleeps. Apart from the rest, for it seldom changes and is looked at in every copy.
#[repr(align(128))]
struct Bed {
    state: AtomicU32,
    thread: OnceLock<Thread>,
}

/// It looks at the board.
const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
/// Somebody has woken it, and the system has yet to run it: in a virtual machine that takes tens of microseconds.
const WAKING: u32 = 2;

/// The most workers there can be.
pub(super) const MAX_WORKERS: usize = 63;

/// What the caller and the workers share.
pub(super) struct Pool {
    board: Board,
    next: Counter,
    workers: Box<[Worker]>,
    spin: Duration,
    stop: AtomicBool,
}

const _: () = assert!(std::mem::offset_of!(Board, job) + size_of::<Option<Job>>() <= 64);

// SAFETY: a job is written by one thread while no copy is open and nobody at one, and read by workers that the closing of
// the copy waits for; the pointers in it stay valid until then.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

/// Looks at the board between two looks at the clock.
const LOOKS: usize = 16;

/// How many others a woken worker wakes.
const WAKES: usize = 2;

impl Pool {
    pub(super) fn new(workers: usize, spin: Duration) -> Self {
        let worker =
            || Worker { at: AtomicU32::new(0), bed: Bed { state: AtomicU32::new(AWAKE), thread: OnceLock::new() } };
        Self {
            board: Board { number: AtomicU32::new(0), hands: AtomicU32::new(0), job: UnsafeCell::new(None) },
            next: Counter(AtomicU32::new(0)),
            workers: (0..workers).map(|_| worker()).collect(),
            spin,
            stop: AtomicBool::new(false),
        }
    }

    /// Notes the thread that is worker `n`.
    pub(super) fn hire(&self, n: usize, thread: &Thread) {
        let _ = self.workers[n].bed.thread.set(thread.clone());
    }

    /// How many workers are awake.
    pub(super) fn awake(&self) -> usize {
        let is_awake = |worker: &&Worker| worker.bed.thread.get().is_some() && worker.bed.is(AWAKE);
        self.workers.iter().filter(is_awake).count()
    }

    /// How many of the first `hands` workers are awake.
    #[inline]
    pub(super) fn awake_of(&self, hands: usize) -> usize {
        self.workers.iter().take(hands).filter(|worker| worker.bed.is(AWAKE)).count()
    }

    /// Does a job together with those of the first `hands` workers that are awake or come in time; `wakes` wakes the others.
    ///
    /// # Safety
    ///
    /// No other thread is in here. The duties of [`Job::run`] hold until this returns.
    #[inline]
    pub(super) unsafe fn run(&self, job: Job, hands: usize, wakes: bool) {
        let number = self.board.number.load(Ordering::Relaxed).wrapping_add(1);
        // SAFETY: no copy is open and no worker at one, and no other thread is in here.
        unsafe { *self.board.job.get() = Some(job) };
        self.board.hands.store(u32::try_from(hands).unwrap_or(u32::MAX), Ordering::Relaxed);
        self.board.number.store(number, Ordering::Release);
        // Closed also where a fault of this thread is made a panic on its way through here.
        let open = Open { pool: self, number, hands };
        if wakes {
            self.wake_one(hands);
        }
        // SAFETY: the caller's duty.
        unsafe { job.run(&self.next.0, false) };
        drop(open);
    }

    /// Wakes the first sleeper of the first `hands`. It wakes the others in turn.
    #[cold]
    fn wake_one(&self, hands: usize) {
        if let Some(worker) = self.workers.iter().take(hands).find(|worker| worker.bed.is(ASLEEP)) {
            worker.bed.wake();
        }
    }

    /// Wakes all workers.
    pub(super) fn wake_all(&self) {
        self.workers.iter().for_each(|worker| worker.bed.wake());
    }

    /// The number of the copy that worker `n` may take part in and has not seen yet.
    #[inline]
    fn offer(&self, n: usize, seen: u32) -> Option<u32> {
        let number = self.board.number.load(Ordering::Acquire);
        let hands = usize::try_from(self.board.hands.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        (number % 2 == 1 && number != seen && n < hands).then_some(number)
    }

    /// The life of worker `n`.
    pub(super) fn work(&self, n: usize) {
        let Worker { at, bed } = &self.workers[n];
        let mut seen = 0;
        let mut last = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            if let Some(number) = self.offer(n, seen) {
                seen = number;
                at.store(number, Ordering::Relaxed);
                // Between the two: either the caller, who closes the copy and looks here, sees this worker at it, or this
                // worker sees that it is closed. And nothing that this core fetched before may answer a load of the copy.
                fence::full();
                if self.board.number.load(Ordering::Acquire) == number {
                    // SAFETY: the copy was open when this worker was at it already, so the caller waits.
                    if let Some(job) = unsafe { *self.board.job.get() } {
                        // SAFETY: as above.
                        unsafe { job.run(&self.next.0, true) };
                        job.fence();
                    }
                }
                at.store(0, Ordering::Release);
                last = Instant::now();
            }
            for _ in 0..LOOKS {
                if self.offer(n, seen).is_some() {
                    break;
                }
                spin_loop();
            }
            if last.elapsed() >= self.spin && self.offer(n, seen).is_none() {
                self.sleep(n, seen, bed);
                last = Instant::now();
            }
        }
    }

    /// Sleeps until woken.
    #[cold]
    fn sleep(&self, n: usize, seen: u32, bed: &Bed) {
        bed.state.store(ASLEEP, Ordering::SeqCst);
        while bed.is(ASLEEP) && self.offer(n, seen).is_none() && !self.stop.load(Ordering::SeqCst) {
            thread::park();
        }
        bed.state.store(AWAKE, Ordering::Relaxed);
        let waiting =
            self.workers.iter().enumerate().filter(|(n, other)| other.bed.is(ASLEEP) && self.offer(*n, 0).is_some());
        waiting.take(WAKES).for_each(|(_, other)| other.bed.wake());
    }

    /// Ends the lives of all workers, as soon as they are unparked.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

/// A copy that workers take part in.
struct Open<'a> {
    pool: &'a Pool,
    number: u32,
    hands: usize,
}

impl Drop for Open<'_> {
    /// Closes the copy, and waits for those who are at it.
    #[inline]
    fn drop(&mut self) {
        let closed = self.number.wrapping_add(1);
        self.pool.board.number.store(closed, Ordering::Relaxed);
        // See `work`.
        fence::full();
        for worker in self.pool.workers.iter().take(self.hands) {
            while worker.at.load(Ordering::Acquire) == self.number {
                spin_loop();
            }
        }
        // For the next copy, which does not wait for this line then.
        self.pool.next.0.store(0, Ordering::Relaxed);
    }
}

impl Bed {
    #[inline]
    fn is(&self, state: u32) -> bool {
        self.state.load(Ordering::Relaxed) == state
    }

    /// A system call, and only where the worker sleeps and nobody else has woken it.
    #[cold]
    fn wake(&self) {
        if self.state.compare_exchange(ASLEEP, WAKING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}
