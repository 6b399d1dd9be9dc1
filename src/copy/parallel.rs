//! One copy by several cores.
//!
//! A core has a fixed number of lines in flight: 16 on Sapphire and Emerald Rapids, which is 1 KiB per round trip of the
//! bus, or 0.98 GB/s of reads; and it stores 18.3 GB/s of the 45.8 GB/s that a PCIe Gen5 x16 link can take. More cores have
//! more lines. Measured on an Emerald Rapids Xeon and an H200, with threads of their own for each part: reads 0.86, 1.7,
//! 3.2 to 3.7 and 5.8 to 7.2 GB/s with 1, 2, 4 and 8 cores, and no more after that; writes of 1 MiB 18.3, 32.8 and 33.6
//! GB/s with 1, 2 and 4 cores.

mod builder;
mod job;
mod pieces;
mod place;
mod pool;

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use self::builder::ParallelCopierBuilder;
use self::job::Job;
pub(crate) use self::pieces::largest_alone;
use self::pieces::{GRANULE_BYTES, Shares, Span, most_threads};
use self::pool::Pool;
use super::{Routine, fence};
use crate::error::{Error, ErrorKind, Result};
use crate::mapping::Mapping;
use crate::policy::CopyDirection;
use crate::sys::process::Owner;

const OP: &str = "parallel copier";

/// Bytes from which waking workers pays: some 30 us of one core, twice what waking took in a virtual machine.
const LONG_READ: usize = 32 << 10;
const LONG_WRITE: usize = 512 << 10;
/// By how much pieces are smaller where workers have yet to wake.
const LATE: usize = 4;

/// Worker threads that share a copy with the calling thread. They exist only where a program makes one of these.
///
/// The calling thread copies too, so a copier of 8 threads has 7 workers. Each is kept on a CPU of its own, and spins
/// there for its next share; after 40 us without one ([`ParallelCopierBuilder::spin`]) it sleeps. Among workers that spin a
/// copy takes no lock, allocates nothing and makes no system call.
///
/// Waking is a system call, and can take longer than a copy: in a virtual machine it added 17 us to one that takes 4 us. So
/// a copy is shared among the workers that are awake, and wakes the others only where it is a long one (a read
/// of 32 KiB or more, a write of 512 KiB), or where the one before was short of workers as well and is no longer ago than
/// workers spin: the second of a burst. [`wake`](Self::wake) wakes them ahead of time.
///
/// Where all are awake each thread has a share of its own, which it need not ask for. Reads of up to 3 KiB for each thread,
/// and writes of up to 24 KiB, are shared out whole; of longer ones six eighths of a read and seven of a write are, and the
/// rest is pieces for whoever is free. Nobody waits for a sleeper: where some sleep the whole copy is such pieces, large
/// ones first, and what nobody comes for the calling thread does.
///
/// It is bound to no mapping or session, and any number of threads may use it. One copy at a time has the workers; one
/// that comes meanwhile is done by its calling thread alone. Copies too small to gain are done alone as well: reads that
/// touch no more than 16 lines, writes of less than 16 KiB.
///
/// Keep the calling threads off the CPUs of the workers ([`cpus`](Self::cpus)). Workers take no signals but those of their
/// own faults, such as `SIGBUS` where a backend takes freed memory away: it comes to whichever thread meets it. They have
/// the scheduling policy of the thread that makes the copier.
///
/// # Ordering
///
/// That of [`Mapping::read`] and [`Mapping::write`], to the letter:
///
/// - [`read`](Self::read): every byte was fetched after the call began, and after this thread's earlier writes had left its
///   core. The caller executes `MFENCE` before it hands out shares; each worker executes `MFENCE` before and `LFENCE` after
///   its loads.
/// - [`write`](Self::write): every byte is stored exactly once, and after this thread's earlier writes; what this thread
///   writes later is seen after these bytes. The caller executes `SFENCE` before it hands out shares, and each worker after
///   its stores and before it reports; the report is a release that the caller acquires. An `SFENCE` makes the stores
///   globally visible before any later store of its core (Intel SDM volume 3, "Memory Ordering"), the report is such a
///   store, and what the caller stores once it has seen the report comes after both.
///
/// Parts of one copy arrive in any order, as ever.
///
/// ```
/// use gdrcopy::{BackendKind, ParallelCopier, Session};
///
/// let session = Session::builder().backend(BackendKind::Emulated).open()?;
/// let buffer = session.alloc(1 << 20)?;
/// let mapping = session.pin(&buffer)?.map()?;
///
/// let copier = ParallelCopier::new(&mapping)?;
/// let mut bytes = vec![0; 64 << 10];
/// copier.write(&mapping, 100, &bytes)?;
/// copier.read(&mapping, 100, &mut bytes)?;
/// # Ok::<(), gdrcopy::Error>(())
/// ```
pub struct ParallelCopier {
    pool: ManuallyDrop<Arc<Pool>>,
    threads: ManuallyDrop<Vec<JoinHandle<()>>>,
    cpus: Vec<u32>,
    write_threads: usize,
    /// A copy has the workers.
    busy: AtomicBool,
    made: Instant,
    /// When a copy was last short of workers, in nanoseconds since `made`. Used by the copy that is `busy`.
    short: AtomicU64,
    spin: Duration,
    owner: Owner,
}

impl ParallelCopier {
    /// A copier with the default settings, near the GPU of `mapping`.
    ///
    /// # Errors
    ///
    /// As [`ParallelCopierBuilder::build`].
    pub fn new(mapping: &Mapping<'_>) -> Result<Self> {
        Self::builder().gpu(mapping.facts().pci).build()
    }

    /// Chooses number and place of the threads by hand.
    ///
    /// Make the copier on the CPU that the calling thread stays on, which is left out, and before that thread is kept
    /// there: afterwards its affinity mask has no other CPU left.
    #[must_use]
    pub fn builder() -> ParallelCopierBuilder {
        ParallelCopierBuilder::new()
    }

    /// Threads that share a copy, the calling one among them. 1 where no CPU was to be had for a worker.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.cpus.len() + 1
    }

    /// The CPUs of the workers, in the order in which they are given work. Keep the calling thread off them.
    #[must_use]
    pub fn cpus(&self) -> &[u32] {
        &self.cpus
    }

    /// How many workers spin at the moment; the others sleep.
    #[must_use]
    pub fn awake(&self) -> usize {
        self.pool.awake()
    }

    /// Wakes all workers ahead of a copy: one system call for each that sleeps. They spin as long as after a copy.
    pub fn wake(&self) {
        if self.owner.is_here() {
            self.pool.wake_all();
        }
    }

    /// [`Mapping::read`] by several cores: each fetches a part of whole lines, 16 of them or a multiple.
    ///
    /// # Errors
    ///
    /// As [`Mapping::read`]; `WrongProcess` also where the copier was made by another process.
    #[inline]
    pub fn read(&self, mapping: &Mapping<'_>, offset: usize, to: &mut [u8]) -> Result<()> {
        self.check("read")?;
        if to.len() <= GRANULE_BYTES / 2 {
            return mapping.read(offset, to);
        }
        let device = mapping.at("read", offset, to.len())?;
        let most = most_threads(device.addr(), to.len(), CopyDirection::DeviceToHost);
        let Some(team) = self.team(self.threads().min(most), to.len() >= LONG_READ) else {
            return mapping.read(offset, to);
        };
        let routine = mapping.routines.load(to.len() / team.threads());
        let job = team.job(routine, device, to.as_mut_ptr(), to.len(), CopyDirection::DeviceToHost);
        // Before the copy is opened: this core's earlier writes leave it first, and the workers' loads see them.
        fence::full();
        // SAFETY: `at` proved that the bytes lie in the live window, which is whole pages and so whole lines; both sides
        // are borrowed until the team is done.
        unsafe { team.run(job) };
        fence::load();
        Ok(())
    }

    /// [`Mapping::write`] by several cores: each stores a part of whole lines.
    ///
    /// # Errors
    ///
    /// As [`Mapping::write`]; `WrongProcess` also where the copier was made by another process.
    #[inline]
    pub fn write(&self, mapping: &Mapping<'_>, offset: usize, from: &[u8]) -> Result<()> {
        self.check("write")?;
        let most = most_threads(0, from.len(), CopyDirection::HostToDevice);
        let Some(threads) = Some(self.write_threads.min(most)).filter(|&threads| threads > 1) else {
            return mapping.write(offset, from);
        };
        let device = mapping.at("write", offset, from.len())?;
        let Some(team) = self.team(threads, from.len() >= LONG_WRITE) else {
            return mapping.write(offset, from);
        };
        let routine = mapping.routines.store(from.len() / team.threads());
        let job = team.job(routine, device, from.as_ptr().cast_mut(), from.len(), CopyDirection::HostToDevice);
        // Before the copy is opened: an earlier write of this core to the same bytes must not arrive after a worker's.
        fence::store();
        // SAFETY: `at` proved that the bytes lie in the live window; `from` is host memory, which device memory cannot
        // overlap and stores only read; both are borrowed until the team is done.
        unsafe { team.run(job) };
        fence::store();
        Ok(())
    }

    #[inline]
    fn check(&self, op: &'static str) -> Result<()> {
        if self.owner.is_here() { Ok(()) } else { Err(elsewhere(op)) }
    }

    /// Who shares a copy, unless there is nothing to share, no worker awake, or another copy has them.
    #[inline]
    fn team(&self, threads: usize, is_long: bool) -> Option<Team<'_>> {
        let wanted = threads.checked_sub(1).filter(|&workers| workers > 0)?;
        self.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // From here on dropping the team gives the workers up.
        let mut team = Team { copier: self, hands: wanted, workers: self.pool.awake_of(wanted), wakes: false };
        if team.workers < wanted && self.waking_pays(is_long) {
            (team.workers, team.wakes) = (wanted, true);
        }
        (team.workers > 0).then_some(team)
    }

    /// Whether a copy that is short of workers wakes some.
    #[cold]
    fn waking_pays(&self, is_long: bool) -> bool {
        let now = u64::try_from(self.made.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let last = self.short.swap(now, Ordering::Relaxed);
        let is_burst = now.checked_sub(last).is_some_and(|ago| u128::from(ago) < self.spin.as_nanos());
        is_long || is_burst
    }
}

#[cold]
fn elsewhere(op: &'static str) -> Error {
    Error::new(
        op,
        ErrorKind::WrongProcess,
        "the parallel copier was made by another process; workers do not survive a fork",
    )
    .remedy("make a copier of its own in this process")
}

/// The calling thread and some workers, for the time of one copy.
struct Team<'a> {
    copier: &'a ParallelCopier,
    /// The first so many workers may take part.
    hands: usize,
    /// So many of them are expected to.
    workers: usize,
    /// The sleepers among them are woken.
    wakes: bool,
}

impl Team<'_> {
    fn threads(&self) -> usize {
        self.workers + 1
    }

    /// What is to be done.
    #[inline]
    fn job(
        &self,
        routine: &'static Routine,
        device: *mut u8,
        host: *mut u8,
        len: usize,
        direction: CopyDirection,
    ) -> Job {
        // Those that have to be woken come late: the pieces are smaller then.
        let threads = if self.wakes { LATE * self.threads() } else { self.threads() };
        let are_all_awake = !self.wakes && self.workers == self.hands;
        let span = Span::new(device.addr(), len);
        let shares = if are_all_awake { Shares::new(span, threads, direction) } else { None };
        let threads = u32::try_from(threads).unwrap_or(1);
        Job { routine, device, host, len, shares, threads, direction, is_prompt: !self.wakes }
    }

    /// Does a job, this thread too.
    ///
    /// # Safety
    ///
    /// The routine is available; the device bytes lie in a live window; the host bytes are readable, for a read writable and
    /// nobody else's, until this returns.
    #[inline]
    unsafe fn run(self, job: Job) {
        // SAFETY: one team at a time; the rest is the caller's duty.
        unsafe { self.copier.pool.run(job, self.hands, self.wakes) };
    }
}

impl Drop for Team<'_> {
    #[inline]
    fn drop(&mut self) {
        self.copier.busy.store(false, Ordering::Release);
    }
}

impl Drop for ParallelCopier {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The threads are the parent's, and so is what they use.
            return;
        }
        self.pool.stop();
        // SAFETY: this is the value's own drop; the field is not used again.
        let threads = unsafe { ManuallyDrop::take(&mut self.threads) };
        threads.iter().for_each(|thread| thread.thread().unpark());
        for thread in threads {
            // A worker does not panic, and if it did there would be nothing left to do here.
            let _ = thread.join();
        }
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.pool) };
    }
}

impl fmt::Debug for ParallelCopier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParallelCopier")
            .field("threads", &self.threads())
            .field("write_threads", &self.write_threads)
            .field("cpus", &self.cpus)
            .finish_non_exhaustive()
    }
}
