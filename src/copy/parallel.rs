//! One copy by several cores.
//!
//! A core has a fixed number of lines in flight: 16 on Sapphire and Emerald Rapids, which is 1 KiB per round trip of the
//! bus, or 0.98 GB/s of reads; and it stores 18.3 GB/s of the 45.8 GB/s that a PCIe Gen5 x16 link can take. More cores have
//! more lines. Measured on an Emerald Rapids Xeon and an H200, with threads of their own for each part: reads 0.86, 1.7,
//! 3.2 to 3.7 and 5.8 to 7.2 GB/s with 1, 2, 4 and 8 cores, and no more after that; writes of 1 MiB 18.3, 32.8 and 33.6
//! GB/s with 1, 2 and 4 cores.

mod place;
mod pool;
mod share;

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use self::place::Machine;
use self::pool::{Crew, Job, Pool, Way};
use self::share::{GRANULE_BYTES, Shares};
use super::fence;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::PciAddress;
use crate::mapping::Mapping;
use crate::sys::cpu::{self, CpuList};
use crate::sys::process::Owner;

const OP: &str = "parallel copier";

/// Cores that copy unless a number is asked for: reads of an H200 gain nothing past that.
const THREADS: usize = 8;
/// Cores that write: two come within 3 per cent of all.
const WRITE_THREADS: usize = 2;
/// The most cores that can be asked for.
const MAX_THREADS: usize = Crew::MAX + 1;
/// Bytes below which a write is not worth another core: half a microsecond of one core's stores, against a hand-off of
/// a quarter or so.
const WRITE_SHARE: usize = 8 << 10;
/// Bytes from which waking workers pays: some 30 us of one core, against 2 to 20 us until the first is at work.
const LONG_READ: usize = 32 << 10;
const LONG_WRITE: usize = 512 << 10;
/// How long a worker looks for its next job. The rest of 50 us is for falling asleep.
const SPIN: Duration = Duration::from_micros(40);
/// A worker copies and waits.
const STACK_BYTES: usize = 64 << 10;

/// Worker threads that share a copy with the calling thread. They exist only where a program makes one of these.
///
/// The calling thread copies too, so a copier of 8 threads has 7 workers. Each is kept on a CPU of its own, and spins
/// there for its next share; after 40 us without one ([`ParallelCopierBuilder::spin`]) it sleeps. Among workers that spin a
/// copy takes no lock, allocates nothing and makes no system call.
///
/// Waking is a system call, and takes 2 to 20 us until the worker is there, the more in a virtual machine: longer than many
/// a copy. So a copy is shared among the workers that are awake, and wakes the others only where it is a long one (a read
/// of 32 KiB or more, a write of 512 KiB), or where the one before was short of workers as well and is no longer ago than
/// workers spin: the second of a burst. [`wake`](Self::wake) wakes them ahead of time. Nobody waits for a sleeper: whatever
/// share a worker has not begun when the calling thread has finished its own, the calling thread does itself.
///
/// It is bound to no mapping or session, and any number of threads may use it. One copy at a time has the workers; one
/// that comes meanwhile is done by its calling thread alone. Copies too small to gain are done alone as well: reads that
/// touch no more than 16 lines, writes of less than 16 KiB.
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

/// Settings of a [`ParallelCopier`].
#[derive(Clone, Debug)]
pub struct ParallelCopierBuilder {
    gpu: Option<PciAddress>,
    threads: Option<usize>,
    write_threads: usize,
    cpus: Option<CpuList>,
    spin: Duration,
}

impl ParallelCopierBuilder {
    /// Prefers the CPUs next to this GPU ([`MappingFacts::pci`](crate::MappingFacts::pci)), as the kernel lists them in
    /// `/sys/bus/pci/devices/*/local_cpulist`.
    #[must_use]
    pub fn gpu(mut self, gpu: impl Into<Option<PciAddress>>) -> Self {
        self.gpu = gpu.into();
        self
    }

    /// Copies with exactly so many threads, 1 to 64, the calling one among them, or fails. By default 8, or as many as
    /// there are CPUs to be had.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// The most threads that share a write, 2 by default; 1 for the calling thread alone. On PCIe Gen5 two cores come
    /// near to what the link takes of such stores, on earlier generations one does.
    #[must_use]
    pub fn write_threads(mut self, threads: usize) -> Self {
        self.write_threads = threads;
        self
    }

    /// Keeps the workers on these CPUs, one each in ascending order. They need not be among those of the calling thread,
    /// which may be kept on one; what the cpuset of the process forbids is an error.
    #[must_use]
    pub fn cpus(mut self, cpus: CpuList) -> Self {
        self.cpus = Some(cpus);
        self
    }

    /// How long a worker spins for its next job before it sleeps; 40 us by default, after which it is asleep within 50.
    /// Longer keeps cores busy, and the copies after a pause fast.
    #[must_use]
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = spin;
        self
    }

    /// The CPUs of the workers.
    fn place(&self) -> Result<Vec<u32>> {
        let asked = |count: usize, cause: String| {
            Error::new(OP, ErrorKind::InvalidArgument, cause)
                .remedy(format!("ask for at most {} threads, or name the CPUs of the workers", count + 1))
        };
        if let Some(threads) = self.threads.filter(|threads| !(1..=MAX_THREADS).contains(threads)) {
            let cause = format!("{threads} threads, of 1 to {MAX_THREADS}");
            return Err(Error::new(OP, ErrorKind::InvalidArgument, cause).remedy("ask for a number in between"));
        }
        let (mut cpus, whose) = match &self.cpus {
            Some(cpus) => (cpus.iter().collect::<Vec<_>>(), format!("CPUs {cpus} were named")),
            None => {
                let local = self.gpu.and_then(|gpu| cpu::local_to(&gpu.to_string()));
                let machine = Machine::this(local)?;
                let whose = format!("the calling thread may use CPUs {} and keeps one for itself", machine.allowed);
                (machine.candidates(), whose)
            }
        };
        let workers = match self.threads {
            Some(threads) if threads - 1 > cpus.len() => {
                let cause = format!("{threads} threads need {} CPUs beside the caller's, and {whose}", threads - 1);
                return Err(asked(cpus.len(), cause));
            }
            Some(threads) => threads - 1,
            None if self.cpus.is_some() => MAX_THREADS - 1,
            None => THREADS - 1,
        };
        cpus.truncate(workers);
        Ok(cpus)
    }

    /// Starts the workers.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where so many threads were asked for that there are not enough CPUs: those in the calling
    /// thread's affinity mask but the one it runs on, or those that were named. What the system reports where a thread
    /// cannot be started, or not be kept on a CPU: the cpuset does not have it.
    pub fn build(&self) -> Result<ParallelCopier> {
        let cpus = self.place()?;
        let pool = Arc::new(Pool::new(cpus.len(), self.spin));
        // Complete from the start, so that whatever fails below stops and joins what has been started.
        let mut copier = ParallelCopier {
            pool: ManuallyDrop::new(Arc::clone(&pool)),
            threads: ManuallyDrop::new(Vec::with_capacity(cpus.len())),
            write_threads: self.write_threads.clamp(1, cpus.len() + 1),
            cpus,
            busy: AtomicBool::new(false),
            made: Instant::now(),
            short: AtomicU64::new(u64::MAX),
            spin: self.spin,
            owner: Owner::here(),
        };
        let (ready, started) = channel();
        for (n, &cpu) in copier.cpus.iter().enumerate() {
            let thread = start(Arc::clone(&pool), n, cpu, ready.clone())?;
            pool.hire(n, thread.thread());
            copier.threads.push(thread);
        }
        drop(ready);
        for place in started {
            place?;
        }
        Ok(copier)
    }
}

/// Starts worker `n`, which says when it is in place, or why it is not.
fn start(pool: Arc<Pool>, n: usize, cpu: u32, ready: Sender<Result<()>>) -> Result<JoinHandle<()>> {
    let body = move || {
        let placed = cpu::pin_to(cpu).map_err(|error| {
            let cause = format!("a worker cannot be kept on CPU {cpu}");
            Error::from_errno(OP, error.raw_os_error().unwrap_or(libc::EINVAL), cause)
                .remedy("name CPUs that the cpuset of this process has")
        });
        let works = placed.is_ok();
        let _ = ready.send(placed);
        drop(ready);
        if works {
            pool.work(n);
        }
    };
    // Signals are for the program's own threads.
    let _quiet = Quiet::new();
    thread::Builder::new().name(format!("gdrcopy-{n}")).stack_size(STACK_BYTES).spawn(body).map_err(|error| {
        Error::from_errno(OP, error.raw_os_error().unwrap_or(libc::EAGAIN), "a worker thread cannot be started")
    })
}

/// While it lives, this thread and those it starts take no signals but those of their own faults.
struct Quiet(libc::sigset_t);

impl Quiet {
    fn new() -> Self {
        // SAFETY: all zeros is a valid value of this bit array, which is filled in below.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is live.
        unsafe { libc::sigfillset(&raw mut set) };
        for fault in [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS] {
            // SAFETY: `set` is live and the number is a signal's.
            unsafe { libc::sigdelset(&raw mut set, fault) };
        }
        // SAFETY: both sets are live.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before) };
        Self(before)
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // SAFETY: the set is live; the old one is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
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
        ParallelCopierBuilder { gpu: None, threads: None, write_threads: WRITE_THREADS, cpus: None, spin: SPIN }
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
        let split = |threads| Shares::new(device.addr(), to.len(), threads);
        let Some(team) = self.team(split, self.threads(), to.len() >= LONG_READ) else {
            return mapping.read(offset, to);
        };
        let job = |shares, n| job(mapping, Way::Load, device, to.as_mut_ptr(), shares, n);
        // Before the offers: this core's earlier writes leave it first, and the workers' loads see them.
        fence::full();
        // SAFETY: `at` proved that the bytes lie in the live window, which is whole pages and so whole lines; the shares
        // of `to` do not overlap; both are borrowed until the team is done.
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
        let threads = self.write_threads.min(from.len() / WRITE_SHARE);
        if threads < 2 {
            return mapping.write(offset, from);
        }
        let device = mapping.at("write", offset, from.len())?;
        let split = |threads| Shares::new(device.addr(), from.len(), threads);
        let Some(team) = self.team(split, threads, from.len() >= LONG_WRITE) else {
            return mapping.write(offset, from);
        };
        let job = |shares, n| job(mapping, Way::Store, device, from.as_ptr().cast_mut(), shares, n);
        // Before the offers: an earlier write of this core to the same bytes must not arrive after a worker's.
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

    /// Who shares a copy and how, unless there is nothing to share, no worker awake, or another copy has them.
    #[inline]
    fn team(&self, split: impl Fn(usize) -> Shares, threads: usize, is_long: bool) -> Option<Team<'_>> {
        let wanted = split(threads).count().checked_sub(1).filter(|&workers| workers > 0)?;
        self.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // From here on dropping the team gives the workers up.
        let mut team =
            Team { copier: self, shares: split(1), crew: self.pool.awake_ones(wanted), offered: Crew::default() };
        if team.crew.len() < wanted && self.waking_pays(is_long) {
            team.crew = Crew::first(wanted);
        }
        if team.crew == Crew::default() {
            return None;
        }
        team.shares = split(team.crew.len() + 1);
        Some(team)
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

/// Share `n` of a copy.
#[inline]
fn job(mapping: &Mapping<'_>, way: Way, device: *mut u8, host: *mut u8, shares: Shares, n: usize) -> Job {
    let range = shares.range(n);
    Job {
        routine: match way {
            Way::Store => mapping.routines.store(range.len()),
            Way::Load => mapping.routines.load(range.len()),
        },
        way,
        device: device.wrapping_add(range.start),
        host: host.wrapping_add(range.start),
        len: range.len(),
    }
}

/// The calling thread and some workers, for the time of one copy.
struct Team<'a> {
    copier: &'a ParallelCopier,
    shares: Shares,
    crew: Crew,
    /// Those who have a job.
    offered: Crew,
}

impl Team<'_> {
    /// Runs a job for each share, the first of them on this thread.
    ///
    /// # Safety
    ///
    /// The duties of [`Job::run`] hold for each job, until this returns.
    #[inline]
    unsafe fn run(mut self, mut job: impl FnMut(Shares, usize) -> Job) {
        let pool = &self.copier.pool;
        for (n, worker) in self.crew.iter().enumerate() {
            let job = job(self.shares, n + 1);
            // SAFETY: this team alone offers, each worker once; when it is dropped, all is finished.
            unsafe { pool.offer(worker, job) };
            self.offered.add(worker);
        }
        pool.wake_one(self.crew);
        // SAFETY: the caller's duty.
        unsafe { job(self.shares, 0).run() };
    }
}

impl Drop for Team<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this team offered a job to each of these.
        unsafe { self.copier.pool.finish(self.offered) };
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
