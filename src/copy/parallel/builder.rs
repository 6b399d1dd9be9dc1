//! How many workers there are, where, and how they start.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::place::Machine;
use super::pool::{MAX_WORKERS, Pool};
use super::{OP, ParallelCopier};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::PciAddress;
use crate::sys::cpu::{self, CpuList};
use crate::sys::process::Owner;

/// Cores that copy unless a number is asked for: reads of an H200 gain nothing past that.
const THREADS: usize = 8;
/// Cores that write: two come within 3 per cent of all.
const WRITE_THREADS: usize = 2;
/// The most cores that can be asked for.
const MAX_THREADS: usize = MAX_WORKERS + 1;
/// How long a worker looks for its next job. The rest of 50 us is for falling asleep.
const SPIN: Duration = Duration::from_micros(40);
/// A worker copies and waits.
const STACK_BYTES: usize = 64 << 10;

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
    pub(super) fn new() -> Self {
        Self { gpu: None, threads: None, write_threads: WRITE_THREADS, cpus: None, spin: SPIN }
    }

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
        for (n, &cpu) in copier.cpus.iter().enumerate() {
            let thread = start(Arc::clone(&pool), n)?;
            pool.hire(n, thread.thread());
            let placed = cpu::pin_thread(&thread, cpu);
            copier.threads.push(thread);
            placed.map_err(|error| {
                let cause = format!("a worker cannot be kept on CPU {cpu}");
                Error::from_errno(OP, error.raw_os_error().unwrap_or(libc::EINVAL), cause)
                    .remedy("name CPUs that the cpuset of this process has")
            })?;
        }
        Ok(copier)
    }
}

/// Starts worker `n`.
fn start(pool: Arc<Pool>, n: usize) -> Result<JoinHandle<()>> {
    // Signals are for the program's own threads.
    let _quiet = Quiet::new();
    let worker = thread::Builder::new().name(format!("gdrcopy-{n}")).stack_size(STACK_BYTES);
    worker.spawn(move || pool.work(n)).map_err(|error| {
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
