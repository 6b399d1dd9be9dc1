//! The quickest way of copying at each size: a calibrated [policy], followed.

#![allow(unsafe_code, reason = "a caller's duty is handed on to the agent")]

mod choice;
mod method;
mod options;
mod table;
mod ways;

use std::fmt;
use std::sync::Arc;

pub use choice::AutoChoice;
pub use method::AutoMethod;
pub use options::AutoOptions;
use table::{HostKind, Table};
use ways::{Host, Trial, Ways};

use crate::agent::{HostBuffer, PushAgent};
use crate::backend::BackendKind;
use crate::buffer::DeviceBuffer;
use crate::copy::ParallelCopier;
use crate::error::Result;
use crate::mapping::Mapping;
use crate::policy::{self, CopyDirection, MeasuredOn, Policy};
use crate::range::DeviceRange;
use crate::session::Session;

/// Reads and writes a [`DeviceBuffer`] in whatever way is quickest for the size, by a [`Policy`].
///
/// [`AutoCopier::new`] measures one, on memory of its own, for half a second: the methods that it may use, by the very calls
/// that it will make of them, from 1 byte to 64 MiB or the buffer's length. [`AutoCopier::with_policy`] follows one that was
/// measured before: by [`Session::calibrate`], or by an `AutoCopier`, whose [`policy`](Self::policy) can be written to a file.
/// The agent and the parallel copier are used only where the options ask for them, for the one takes an SM and the other
/// cores.
///
/// Page-locked host memory saves time: the copy engine reaches it by itself, and the agent where it came from
/// [`host_buffer`](Self::host_buffer) or was [registered](Self::register_host). [`AutoOptions::page_locked`] has it measured.
///
/// A copy finds its method in a table, by a few comparisons. Nothing is allocated, and but for the copy engine and the
/// launch of an [agent](PushAgent) that has left there is no CUDA call.
///
/// # Ordering
///
/// The same for every method; [`AutoCopier::explain`] says how each keeps it:
///
/// - [`read`](Self::read): every byte was fetched after the call began; it sees what this thread wrote to the buffer before,
///   through any mapping of it.
/// - [`write`](Self::write): what this thread writes later, through any mapping, is seen after these bytes.
/// - Neither waits for kernels: all methods act beside every stream but their own. Synchronise with a kernel first.
///
/// The copy engine's is a CUDA call and may wait for a lock of the driver's.
///
/// ```
/// use gdrcopy::auto::{AutoCopier, AutoOptions};
/// use gdrcopy::policy::CopyDirection;
/// use gdrcopy::{BackendKind, Session};
///
/// let session = Session::builder().backend(BackendKind::Emulated).open()?;
/// let buffer = session.alloc(4096)?;
/// let mut copier = AutoCopier::new(&session, &buffer, AutoOptions::default())?;
/// copier.write(100, b"bytes")?;
/// let mut back = [0; 5];
/// copier.read(100, &mut back)?;
/// assert_eq!(&back, b"bytes");
///
/// // d2h of 4096 bytes: bar1 (at 4096 bytes: avx512=52.1 copy_engine=88.0; measured now); MFENCE, loads by ..
/// println!("{}", copier.explain(CopyDirection::DeviceToHost, 4096));
///
/// // Another time without measuring.
/// let policy = copier.policy().clone(); // or Policy::read("here.policy")?
/// let again = AutoCopier::with_policy(&session, &buffer, policy, AutoOptions::default());
/// # drop(copier);
/// # again?;
/// # Ok::<(), gdrcopy::Error>(())
/// ```
pub struct AutoCopier<'a> {
    /// To the device and from it.
    tables: [Table; 2],
    ways: Ways<'a, 'a>,
    policy: Policy,
    /// What the options say of the host memory.
    host: HostKind,
}

/// What the options ask for.
struct Helpers<'a> {
    parallel: Option<ParallelCopier>,
    agent: Option<PushAgent<'a>>,
}

impl<'a> Helpers<'a> {
    fn new(
        session: &Session,
        mapping: &Mapping<'_>,
        ranges: impl IntoIterator<Item = DeviceRange<'a>>,
        ordinal: usize,
        options: &AutoOptions,
    ) -> Result<Self> {
        let agent = options.agent.clone().map(|agent| PushAgent::start(session, ranges, agent.gpu(ordinal)));
        let parallel = options.parallel.clone().map(|copier| copier.gpu(mapping.facts().pci).build());
        Ok(Self { parallel: parallel.transpose()?, agent: agent.transpose()? })
    }
}

/// The buffer's GPU, where CUDA has it.
fn gpu(session: &Session, buffer: &DeviceBuffer) -> Option<usize> {
    (session.backend() != BackendKind::Emulated).then(|| buffer.ordinal())
}

impl<'a> AutoCopier<'a> {
    /// Measures, for about as long as [`AutoOptions::time`], on memory of its own; with an agent, which keeps what it was
    /// started with, that memory stays allocated, page-locked memory too. The calling thread measures, so keep it on a CPU
    /// near the GPU first.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for options out of range; what [`Session::alloc_on`], [`Session::pin`], [`PushAgent::start`] and
    /// [`ParallelCopierBuilder::build`](crate::ParallelCopierBuilder::build) return.
    pub fn new(session: &Session, buffer: &'a DeviceBuffer, options: AutoOptions) -> Result<Self> {
        policy::sizes("auto", options.largest)?;
        let largest = options.largest.min(buffer.len().max(64).next_power_of_two());
        let sizes = policy::sizes("auto", largest)?;
        let mapping = session.pin(buffer)?.map()?;
        let scratch = Arc::new(session.alloc_on(buffer.ordinal(), largest)?);
        let ranges: [DeviceRange<'a>; 2] = [DeviceRange::from(buffer), DeviceRange::from(&scratch)];
        let Helpers { parallel, agent } = Helpers::new(session, &mapping, ranges, buffer.ordinal(), &options)?;
        let gpu = gpu(session, buffer);
        let pinned = session.pin(&*scratch)?.map()?;
        let mut ways = Ways { mapping: pinned, buffer: &scratch, parallel, agent, range: 1, gpu };
        let host = Host::new(&mut ways, options.is_page_locked)?;
        let mut trial = Trial { ways, host };

        let tables = policy::tables(&mut trial, &sizes, options.time, |_, _| ())?;
        let policy = Policy::measured(MeasuredOn::now(session, buffer.ordinal(), &mapping)?, tables)?;

        let Trial { ways: Ways { parallel, agent, .. }, .. } = trial;
        Ok(Self::follow(Ways { mapping, buffer, parallel, agent, range: 0, gpu }, policy, options.is_page_locked))
    }

    /// Follows this policy, and measures nothing. Where its best method is not to be had, because the options do not ask for
    /// an agent or a parallel copier, or for one of fewer threads than the policy was measured with, the best of the row's
    /// other candidates is used.
    ///
    /// Let it be a policy of this machine ([`Policy::mismatches`]). [`Session::calibrate`] makes one that has the agent with
    /// [`Calibration::agent`](policy::Calibration::agent). The [built-in one](Policy::built_in) knows neither agent nor
    /// parallel copies.
    ///
    /// # Errors
    ///
    /// What [`Session::pin`], [`PushAgent::start`] and [`ParallelCopierBuilder::build`](crate::ParallelCopierBuilder::build)
    /// return.
    pub fn with_policy(
        session: &Session,
        buffer: &'a DeviceBuffer,
        policy: Policy,
        options: AutoOptions,
    ) -> Result<Self> {
        let mapping = session.pin(buffer)?.map()?;
        let ranges = [DeviceRange::from(buffer)];
        let Helpers { parallel, agent } = Helpers::new(session, &mapping, ranges, buffer.ordinal(), &options)?;
        let ways = Ways { mapping, buffer, parallel, agent, range: 0, gpu: gpu(session, buffer) };
        Ok(Self::follow(ways, policy, options.is_page_locked))
    }

    fn follow(ways: Ways<'a, 'a>, policy: Policy, is_page_locked: bool) -> Self {
        let host = if is_page_locked { HostKind::PageLocked } else { HostKind::Ordinary };
        let offer = ways.offer(host);
        let directions = [CopyDirection::HostToDevice, CopyDirection::DeviceToHost];
        let tables = directions.map(|direction| Table::new(&policy, direction, offer));
        Self { tables, ways, policy, host }
    }

    /// Reads `to.len()` bytes from byte `offset`.
    ///
    /// # Errors
    ///
    /// `OutOfBounds`, `WrongProcess`: `to` is untouched then. What the method returns otherwise.
    #[inline]
    pub fn read(&mut self, offset: usize, to: &mut [u8]) -> Result<()> {
        let [_, to_host] = &self.tables;
        let method = to_host.method(to.len(), || self.ways.reaches(to));
        self.ways.read(method, offset, to)
    }

    /// Writes `from` at byte `offset`.
    ///
    /// # Errors
    ///
    /// As [`AutoCopier::read`].
    #[inline]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result<()> {
        let [to_device, _] = &self.tables;
        let method = to_device.method(from.len(), || self.ways.reaches(from));
        self.ways.write(method, offset, from)
    }

    /// Page-locked, zeroed memory to copy from and to: every method reaches it, and the agent, if there is one, without a copy
    /// on the CPU's side.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for 0 bytes, `OutOfMemory`, `WrongProcess`.
    pub fn host_buffer(&mut self, bytes: usize) -> Result<HostBuffer> {
        // Whose process it is.
        self.ways.mapping.at("host buffer", 0, 0)?;
        self.ways.host_buffer(bytes)
    }

    /// Lets this copier's agent reach page-locked memory of the program's, as [`PushAgent::register_host`] does; without an agent there
    /// is nothing to do, for the copy engine reaches such memory by itself.
    ///
    /// # Errors
    ///
    /// As [`PushAgent::register_host`].
    ///
    /// # Safety
    ///
    /// As [`PushAgent::register_host`]: the memory stays allocated and page-locked until it is
    /// [taken back](Self::unregister_host) or the copier has been dropped.
    pub unsafe fn register_host(&mut self, memory: *mut u8, bytes: usize) -> Result<()> {
        match &mut self.ways.agent {
            // SAFETY: the caller's duty.
            Some(agent) => unsafe { agent.register_host(memory, bytes) },
            None => Ok(()),
        }
    }

    /// Takes such memory back, by its first byte.
    ///
    /// # Errors
    ///
    /// As [`PushAgent::unregister_host`].
    pub fn unregister_host(&mut self, memory: *const u8) -> Result<()> {
        self.ways.agent.as_mut().map_or(Ok(()), |agent| agent.unregister_host(memory))
    }

    /// What it does with a copy of so many bytes, why, and how that keeps the [promise](Self#ordering). With
    /// [`AutoOptions::page_locked`] and an agent it is about memory that the agent reaches, which is what was measured with;
    /// [`explain_with`](Self::explain_with) is about any.
    #[must_use]
    pub fn explain(&self, direction: CopyDirection, bytes: usize) -> AutoChoice<'_> {
        self.choice(direction, bytes, self.host == HostKind::PageLocked && self.ways.agent.is_some())
    }

    /// As [`AutoCopier::explain`], of a copy from or to this memory.
    #[must_use]
    pub fn explain_with(&self, direction: CopyDirection, host: &[u8]) -> AutoChoice<'_> {
        self.choice(direction, host.len(), self.ways.reaches(host))
    }

    fn choice(&self, direction: CopyDirection, bytes: usize, is_reached: bool) -> AutoChoice<'_> {
        let [to_device, to_host] = &self.tables;
        let table = match direction {
            CopyDirection::HostToDevice => to_device,
            CopyDirection::DeviceToHost => to_host,
        };
        AutoChoice {
            choice: self.policy.explain(direction, bytes),
            bytes,
            method: table.method(bytes, || is_reached),
            host: if is_reached { HostKind::Reached } else { self.host },
            has_agent: self.ways.agent.is_some(),
        }
    }

    /// The policy that it follows.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The agent, where the options asked for one; the buffer is its range 0. Its `read_into` and `write_from` make many
    /// pieces one request, and its `submit` has several requests in flight.
    pub fn agent(&mut self) -> Option<&mut PushAgent<'a>> {
        self.ways.agent.as_mut()
    }

    /// The mapping that it copies through, for single stores and loads in between.
    #[must_use]
    pub fn mapping(&self) -> &Mapping<'a> {
        &self.ways.mapping
    }
}

impl fmt::Debug for AutoCopier<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AutoCopier")
            .field("buffer", self.ways.buffer)
            .field("policy", &self.policy.source())
            .field("agent", &self.ways.agent)
            .field("parallel", &self.ways.parallel)
            .finish_non_exhaustive()
    }
}
