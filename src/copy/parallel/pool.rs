//! The workers, and how work gets to them.
//!
//! Each worker watches a cache line of its own. The caller writes a job there and offers it; the worker takes the offer,
//! works, and sets the line free. An offer that has not been taken when the caller has finished its own share is
//! withdrawn, and the caller does that share too. So nobody waits for a worker that is asleep, or that the system has put
//! aside: only for one that is at work. It also means that a wake-up which comes too late, or is lost, costs time and
//! nothing else.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::super::fence;
use super::super::kernel::Routine;
use crate::sys::num::usize_of;

/// A share of a copy. The pointers are the caller's, who waits until the share is done.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) routine: &'static Routine,
    pub(super) way: Way,
    pub(super) device: *mut u8,
    pub(super) host: *mut u8,
    pub(super) len: usize,
}

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Store,
    Load,
}

impl Job {
    /// Copies, without fences.
    ///
    /// # Safety
    ///
    /// The routine is available; `len` device bytes, and the whole lines around them, are mapped; the host bytes are
    /// readable, for a load writable and no other thread's; and all of that until this returns.
    pub(super) unsafe fn run(&self) {
        match self.way {
            Way::Store => {
                // SAFETY: the caller's duty.
                let from = unsafe { std::slice::from_raw_parts(self.host, self.len) };
                // SAFETY: as above.
                unsafe { self.routine.store(self.device, from) };
            }
            Way::Load => {
                // SAFETY: the caller's duty.
                let to = unsafe { std::slice::from_raw_parts_mut(self.host, self.len) };
                // SAFETY: as above.
                unsafe { self.routine.load(to, self.device) };
            }
        }
    }

    /// Copies as a core must that is not the caller's.
    ///
    /// # Safety
    ///
    /// As [`Job::run`].
    unsafe fn run_fenced(&self) {
        match self.way {
            Way::Store => {
                // SAFETY: the caller's duty.
                unsafe { self.run() };
                // Before the share is called done: what the caller writes then is seen after these bytes.
                fence::store();
            }
            Way::Load => {
                // Nothing that this core fetched before the offer may answer.
                fence::full();
                // SAFETY: the caller's duty.
                unsafe { self.run() };
                fence::load();
            }
        }
    }
}

/// The line is the caller's to write: there is no job, or it is done.
const FREE: u32 = 0;
/// There is a job that nobody has begun.
const OFFERED: u32 = 1;
/// The worker is at it.
const TAKEN: u32 = 2;

/// What passes between caller and worker: one line, alone in the pair of lines that processors like to fetch together.
#[repr(align(128))]
struct Desk {
    state: AtomicU32,
    /// Written by the caller while the state is `FREE`, read by whoever changed it from `OFFERED`.
    job: UnsafeCell<Option<Job>>,
}

/// Whether a worker sleeps. Apart from the desk, for it seldom changes and is looked at in every copy.
#[repr(align(128))]
struct Bed {
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

struct Worker {
    desk: Desk,
    bed: Bed,
}

/// Some of the workers, a bit for each.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Crew(u64);

impl Crew {
    /// The most workers there can be.
    pub(super) const MAX: usize = 63;

    /// The first `count` workers.
    pub(super) fn first(count: usize) -> Self {
        debug_assert!(count <= Self::MAX, "{count} workers");
        Self((1 << count) - 1)
    }

    #[inline]
    pub(super) fn add(&mut self, n: usize) {
        self.0 |= 1 << n;
    }

    #[inline]
    pub(super) fn len(self) -> usize {
        usize_of(u64::from(self.0.count_ones()))
    }

    /// From the first to the last.
    #[inline]
    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let n = (left != 0).then(|| left.trailing_zeros())?;
            left &= left - 1;
            Some(usize_of(u64::from(n)))
        })
    }

    /// From the last to the first.
    #[inline]
    fn backwards(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let n = left.checked_ilog2()?;
            left ^= 1 << n;
            Some(usize_of(u64::from(n)))
        })
    }
}

/// What the caller and the workers share.
pub(super) struct Pool {
    workers: Box<[Worker]>,
    spin: Duration,
    stop: AtomicBool,
}

// SAFETY: a job is written by one thread while the desk is free and read by one thread that took the offer, which the
// desk's state orders; the pointers in it stay valid until the desk is free again, since the caller waits for that.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

/// Looks at the desk between two looks at the clock.
const LOOKS: usize = 16;

/// How many others a woken worker wakes.
const WAKES: usize = 2;

impl Pool {
    pub(super) fn new(workers: usize, spin: Duration) -> Self {
        let worker = || Worker {
            desk: Desk { state: AtomicU32::new(FREE), job: UnsafeCell::new(None) },
            bed: Bed { asleep: AtomicBool::new(false), thread: OnceLock::new() },
        };
        Self { workers: (0..workers).map(|_| worker()).collect(), spin, stop: AtomicBool::new(false) }
    }

    /// Notes the thread that is worker `n`.
    pub(super) fn hire(&self, n: usize, thread: &Thread) {
        let _ = self.workers[n].bed.thread.set(thread.clone());
    }

    /// How many workers are awake.
    pub(super) fn awake(&self) -> usize {
        let is_awake = |worker: &&Worker| worker.bed.thread.get().is_some() && !worker.bed.is_asleep();
        self.workers.iter().filter(is_awake).count()
    }

    /// Offers a job to worker `n`.
    ///
    /// # Safety
    ///
    /// No other thread offers, the last offer to this worker was followed by [`Pool::finish`], and the duties of
    /// [`Job::run`] hold until then.
    #[inline]
    pub(super) unsafe fn offer(&self, n: usize, job: Job) {
        let desk = &self.workers[n].desk;
        // SAFETY: the desk is free, so the worker does not look, and no other thread offers.
        unsafe { *desk.job.get() = Some(job) };
        desk.state.store(OFFERED, Ordering::Release);
    }

    /// The first `wanted` workers that are awake, fewer if there are not so many.
    #[inline]
    pub(super) fn awake_ones(&self, wanted: usize) -> Crew {
        let mut crew = Crew::default();
        let awake = self.workers.iter().enumerate().filter(|(_, worker)| !worker.bed.is_asleep());
        awake.take(wanted).for_each(|(n, _)| crew.add(n));
        crew
    }

    /// Wakes the first sleeper of a crew. It wakes the others in turn.
    #[inline]
    pub(super) fn wake_one(&self, crew: Crew) {
        if let Some(n) = crew.iter().find(|&n| self.workers[n].bed.is_asleep()) {
            self.workers[n].bed.wake();
        }
    }

    /// Wakes all workers.
    pub(super) fn wake_all(&self) {
        self.workers.iter().for_each(|worker| worker.bed.wake());
    }

    /// Does what the workers of a crew have not begun, and waits for what they have.
    ///
    /// # Safety
    ///
    /// All of them were offered a job by this thread.
    #[inline]
    pub(super) unsafe fn finish(&self, crew: Crew) {
        loop {
            let mut at_work = false;
            // From the back: sleepers are woken from the front.
            for n in crew.backwards() {
                let desk = &self.workers[n].desk;
                match desk.state.load(Ordering::Acquire) {
                    FREE => {}
                    OFFERED if desk.change(OFFERED, FREE) => {
                        // SAFETY: withdrawn, so the worker does not look, and this thread wrote it.
                        if let Some(job) = unsafe { *desk.job.get() } {
                            // SAFETY: the duties of `offer` still hold.
                            unsafe { job.run() };
                        }
                    }
                    _ => at_work = true,
                }
            }
            if !at_work {
                return;
            }
            spin_loop();
        }
    }

    /// The life of worker `n`.
    pub(super) fn work(&self, n: usize) {
        let Worker { desk, bed } = &self.workers[n];
        let mut last = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            if desk.is_offered() && desk.change(OFFERED, TAKEN) {
                // SAFETY: taken, so the caller does not write it.
                if let Some(job) = unsafe { *desk.job.get() } {
                    // SAFETY: the caller waits until the desk is free.
                    unsafe { job.run_fenced() };
                }
                desk.state.store(FREE, Ordering::Release);
                last = Instant::now();
            }
            for _ in 0..LOOKS {
                if desk.is_offered() {
                    break;
                }
                spin_loop();
            }
            if !desk.is_offered() && last.elapsed() >= self.spin {
                self.sleep(desk, bed);
                last = Instant::now();
            }
        }
    }

    /// Sleeps until woken.
    #[cold]
    fn sleep(&self, desk: &Desk, bed: &Bed) {
        bed.asleep.store(true, Ordering::SeqCst);
        while bed.is_asleep() && !desk.is_offered() && !self.stop.load(Ordering::SeqCst) {
            thread::park();
        }
        bed.asleep.store(false, Ordering::Relaxed);
        let waiting = self.workers.iter().filter(|other| other.desk.is_offered() && other.bed.is_asleep());
        waiting.take(WAKES).for_each(|other| other.bed.wake());
    }

    /// Ends the lives of all workers, as soon as they are unparked.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

impl Desk {
    #[inline]
    fn is_offered(&self) -> bool {
        self.state.load(Ordering::Relaxed) == OFFERED
    }

    #[inline]
    fn change(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

impl Bed {
    #[inline]
    fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// A system call, and only where the worker sleeps and nobody else has woken it.
    #[cold]
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crew_is_counted_and_walked_both_ways() {
        let mut crew = Crew::first(3);
        crew.add(62);
        assert_eq!(crew.len(), 4);
        assert_eq!(crew.iter().collect::<Vec<_>>(), [0, 1, 2, 62]);
        assert_eq!(crew.backwards().collect::<Vec<_>>(), [62, 2, 1, 0]);
        assert_eq!((Crew::first(0).len(), Crew::first(0).iter().count(), Crew::first(Crew::MAX).len()), (0, 0, 63));
    }
}
