//! The workers, and how work gets to them.
//!
//! The caller writes what is to be done into one line that all workers look at. Where all of those that are to take part are
//! awake, each has a share of its own, which nobody asks for: a counter that all cores write to would hand itself around
//! among them one by one before the last can begin. What the shares leave is taken in pieces by whoever is free, so a core
//! that is slow for a while, as a hyperthread beside a busy one is, gets less to do. Where some sleep all is such pieces.
//!
//! A worker that comes puts the number of the copy into its own line by compare-and-swap, and so does the caller for those
//! that have not come when all else is done: whoever is first has the share. So nobody waits for a worker that is asleep, or
//! that the system has put aside: only for one that is at work. It also means that a wake-up which comes too late, or is
//! lost, costs time and nothing else.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::super::fence;
use super::job::Job;
use crate::sys::num::{u64_of, usize_of};

/// What is to be done, all of it in one line of 64 bytes: workers that wait share it, and one store of the caller's tells
/// them all.
#[repr(C, align(128))]
struct Board {
    /// The number of the copy, from 1 on, and in the low bits how many workers may take part.
    call: AtomicU64,
    /// Written by the caller while no worker is at a copy; read by workers that are.
    job: UnsafeCell<Option<Job>>,
}

/// Bits of a call that say how many may take part.
const HANDS: u32 = 8;

/// A copy that workers are called to.
#[derive(Clone, Copy)]
struct Call {
    number: u64,
    hands: usize,
}

impl Call {
    #[inline]
    fn word(self) -> u64 {
        self.number << HANDS | u64_of(self.hands)
    }

    #[inline]
    fn of(word: u64) -> Self {
        Self { number: word >> HANDS, hands: usize_of(word & ((1 << HANDS) - 1)) }
    }
}

/// The next piece. In a line of its own, for everybody writes it.
#[repr(align(128))]
struct Counter(AtomicU32);

/// The number of a copy in a line of its own.
#[repr(align(128))]
struct Number(AtomicU64);

struct Worker {
    /// The last copy of which it is settled whether the worker takes part. The worker writes it, and the caller for one
    /// that does not come. The caller looks here only once it has waited in vain: so the line stays where the worker is,
    /// which then gets to work without waiting for any other core.
    taken: Number,
    /// The last copy in which nothing is to be waited for.
    done: Number,
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
const _: () = assert!(MAX_WORKERS < 1 << HANDS);

/// What the caller and the workers share.
pub(super) struct Pool {
    board: Board,
    next: Counter,
    workers: Box<[Worker]>,
    spin: Duration,
    stop: AtomicBool,
}

const _: () = assert!(std::mem::offset_of!(Board, job) + size_of::<Option<Job>>() <= 64);

// SAFETY: a job is written by one thread while nobody is at a copy, and read by workers that the caller waits for; the
// pointers in it stay valid until then.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

/// Looks at the board between two looks at the clock.
const LOOKS: usize = 16;

/// How many others a woken worker wakes.
const WAKES: usize = 2;

/// Looks for the ends of shares before those that nobody came for are looked for: two to three round trips of the bus, which
/// is more than workers that spin are late by.
const PATIENCE: u32 = 64;

impl Pool {
    pub(super) fn new(workers: usize, spin: Duration) -> Self {
        let number = || Number(AtomicU64::new(0));
        let bed = || Bed { state: AtomicU32::new(AWAKE), thread: OnceLock::new() };
        Self {
            board: Board { call: AtomicU64::new(0), job: UnsafeCell::new(None) },
            next: Counter(AtomicU32::new(0)),
            workers: (0..workers).map(|_| Worker { taken: number(), done: number(), bed: bed() }).collect(),
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
    /// No other thread is in here. The duties of [`Job::run`] hold until this returns. Shares are for these workers.
    #[inline]
    pub(super) unsafe fn run(&self, job: Job, hands: usize, wakes: bool) {
        let hands = hands.min(self.workers.len());
        let call = Call { number: self.call().number + 1, hands };
        // SAFETY: no worker is at a copy, and no other thread is in here.
        unsafe { *self.board.job.get() = Some(job) };
        self.board.call.store(call.word(), Ordering::Release);
        // Waited for also where a fault of this thread is made a panic on its way through here.
        let open = Open { pool: self, call };
        if wakes {
            self.wake_one(hands);
        }
        // SAFETY: the caller's duty.
        unsafe { job.run(0, &self.next.0) };
        if job.shares.is_some() {
            let mut patience = PATIENCE;
            for (n, worker) in open.workers().iter().enumerate() {
                if open.did_not_come(worker, &mut patience) {
                    // SAFETY: the caller's duty, and it is settled that the worker does not take part.
                    unsafe { job.stand_in(n + 1) };
                }
            }
        }
        drop(open);
    }

    #[inline]
    fn call(&self) -> Call {
        Call::of(self.board.call.load(Ordering::Acquire))
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

    /// The number of the copy that worker `n` may take part in, if it is another than the last one settled.
    #[inline]
    fn offer(&self, n: usize, settled: u64) -> Option<u64> {
        let Call { number, hands } = self.call();
        (number != settled && n < hands).then_some(number)
    }

    /// The life of worker `n`.
    pub(super) fn work(&self, n: usize) {
        let Worker { taken, done, bed } = &self.workers[n];
        let mut settled = 0;
        let mut last = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            if let Some(number) = self.offer(n, settled) {
                match taken.0.compare_exchange(settled, number, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        settled = number;
                        // Nothing that this core fetched before may answer a load of the copy.
                        fence::full();
                        // SAFETY: this worker was first to settle this copy, so the caller waits for it.
                        if let Some(job) = unsafe { *self.board.job.get() } {
                            // SAFETY: as above, and this is worker `n`.
                            unsafe { job.run(n + 1, &self.next.0) };
                            job.fence();
                        }
                        done.0.store(number, Ordering::Release);
                    }
                    // The caller did not wait.
                    Err(other) => settled = other,
                }
                last = Instant::now();
            }
            let is_called = || {
                let is_called = self.offer(n, settled).is_some();
                if !is_called {
                    spin_loop();
                }
                is_called
            };
            // A call is answered without a look at the clock.
            if (0..LOOKS).any(|_| is_called()) {
                continue;
            }
            if last.elapsed() >= self.spin && self.offer(n, settled).is_none() {
                self.sleep(n, settled, bed);
                last = Instant::now();
            }
        }
    }

    /// Sleeps until woken.
    #[cold]
    fn sleep(&self, n: usize, settled: u64, bed: &Bed) {
        bed.state.store(ASLEEP, Ordering::SeqCst);
        while bed.is(ASLEEP) && self.offer(n, settled).is_none() && !self.stop.load(Ordering::SeqCst) {
            thread::park();
        }
        bed.state.store(AWAKE, Ordering::Relaxed);
        let is_late = |n, other: &Worker| self.offer(n, other.taken.0.load(Ordering::Relaxed)).is_some();
        let waiting = self.workers.iter().enumerate().filter(|(n, other)| other.bed.is(ASLEEP) && is_late(*n, other));
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
    call: Call,
}

impl Open<'_> {
    #[inline]
    fn workers(&self) -> &[Worker] {
        &self.pool.workers[..self.call.hands]
    }

    /// Looks whether a worker is done, as often as there is patience, and then settles that it does not take part, unless it
    /// does.
    #[inline]
    fn did_not_come(&self, worker: &Worker, patience: &mut u32) -> bool {
        while worker.done.0.load(Ordering::Acquire) != self.call.number {
            if *patience == 0 {
                return self.shuts_out(worker);
            }
            *patience -= 1;
            spin_loop();
        }
        false
    }

    #[cold]
    fn shuts_out(&self, worker: &Worker) -> bool {
        let Call { number, .. } = self.call;
        let last = worker.taken.0.load(Ordering::Relaxed);
        // Nobody but the worker and this thread writes there, and either writes the number of this copy now.
        let is_out = last != number
            && worker.taken.0.compare_exchange(last, number, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if is_out {
            worker.done.0.store(number, Ordering::Relaxed);
        }
        is_out
    }
}

impl Drop for Open<'_> {
    /// Waits for those who are at it, and shuts the others out.
    #[inline]
    fn drop(&mut self) {
        for worker in self.workers() {
            let mut patience = 0;
            while worker.done.0.load(Ordering::Acquire) != self.call.number && !self.did_not_come(worker, &mut patience)
            {
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

#[cfg(test)]
mod tests {
    use super::super::super::preferred;
    use super::super::pieces::{Shares, Span};
    use super::*;
    use crate::policy::CopyDirection;

    /// Shares of four are all of the one, and leave a rest of the other.
    const SHORT: usize = 10_000;
    const LONG: usize = 140_000;

    /// One copy by the calling thread and three workers, whoever comes of them; from a start within a line.
    #[track_caller]
    fn copy(pool: &Pool, direction: CopyDirection, bytes: usize, is_shared: bool, wakes: bool, seed: u8) {
        let pattern = |seed: u8| (0..bytes).map(|n| u8::try_from(n % 251).unwrap() ^ seed).collect::<Vec<_>>();
        let (mut device, mut host) = (vec![0; bytes + 256], vec![0; bytes]);
        // Whole lines around what is copied.
        let start = device.as_ptr().addr().next_multiple_of(64) - device.as_ptr().addr() + 13;
        match direction {
            CopyDirection::HostToDevice => host = pattern(seed),
            CopyDirection::DeviceToHost => device[start..start + bytes].copy_from_slice(&pattern(seed)),
        }
        let at = device.as_mut_ptr().wrapping_add(start);
        let span = Span::new(at.addr(), bytes);
        let shares = Shares::new(span, 4, direction).expect("a line for each");
        assert_eq!(shares.rest(span, 4).is_some(), bytes == LONG, "{direction:?}");
        let (routine, host_at, shares) = (preferred(), host.as_mut_ptr(), is_shared.then_some(shares));
        let job =
            Job { routine, device: at, host: host_at, len: bytes, shares, threads: 4, direction, is_prompt: !wakes };
        // SAFETY: one copy at a time; both vectors outlive it, and nothing else touches them meanwhile.
        unsafe { pool.run(job, 3, wakes) };
        assert!(host == pattern(seed), "{direction:?} {bytes} {is_shared}");
        assert!(device[start..start + bytes] == host, "{direction:?} {bytes} {is_shared}");
        assert!(device[..start].iter().chain(&device[start + bytes..]).all(|&byte| byte == 0), "{direction:?}");
    }

    /// Eight copies.
    fn copies(pool: &Pool, seed: u8) {
        for direction in [CopyDirection::HostToDevice, CopyDirection::DeviceToHost] {
            for bytes in [SHORT, LONG] {
                for is_shared in [true, false] {
                    copy(pool, direction, bytes, is_shared, false, seed);
                }
            }
        }
    }

    #[test]
    fn the_caller_does_what_nobody_comes_for() {
        // No thread has been started: as if the system had put them all aside.
        let pool = Pool::new(3, Duration::from_secs(1));
        assert_eq!(pool.awake_of(3), 3, "taken to be awake");
        copies(&pool, 0x5a);
        let number = pool.call().number;
        assert_eq!(number, 8);
        for worker in &pool.workers {
            assert_eq!(
                (worker.taken.0.load(Ordering::Relaxed), worker.done.0.load(Ordering::Relaxed)),
                (number, number)
            );
        }
    }

    #[test]
    fn who_comes_late_takes_part_in_the_next_copy() {
        let pool = Pool::new(3, Duration::from_micros(20));
        copies(&pool, 1);
        thread::scope(|scope| {
            // Two of three: the last never comes.
            let threads = [0, 1].map(|n| {
                scope.spawn({
                    let pool = &pool;
                    move || pool.work(n)
                })
            });
            threads.iter().enumerate().for_each(|(n, thread)| pool.hire(n, thread.thread()));
            for round in 0..100 {
                copies(&pool, round);
                copy(&pool, CopyDirection::DeviceToHost, SHORT, false, true, round);
                if round % 10 == 0 {
                    thread::sleep(Duration::from_micros(200));
                }
            }
            pool.stop();
            threads.iter().for_each(|thread| thread.thread().unpark());
        });
        let taken = |n: usize| pool.workers[n].taken.0.load(Ordering::Relaxed);
        assert_eq!([0, 1, 2].map(taken), [pool.call().number; 3], "all is settled");
    }
}
