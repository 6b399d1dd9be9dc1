//! Measuring the candidates.

#![allow(unsafe_code, reason = "routines are run on the mapping's own window, one after the other")]

use std::time::Duration;

#[cfg(feature = "cuda")]
use super::rival::PageLocked;
use super::{Block, CopyDirection, CopyMethod, MeasuredOn, Policy, Subject, rest, warm_up};
use crate::agent::{AgentOptions, HostBuffer, PushAgent};
use crate::backend::MappingType;
use crate::buffer::DeviceBuffer;
use crate::copy::{self, ParallelCopier, ParallelCopierBuilder, Routine, fence};
use crate::error::{Error, ErrorKind, Result};
use crate::mapping::Mapping;
use crate::session::Session;

/// What is measured by [`Session::calibrate`], and for how long.
///
/// The calling thread measures, so keep it on a CPU near the GPU first.
#[derive(Clone, Debug)]
pub struct Calibration {
    gpu: usize,
    time: Duration,
    largest: usize,
    threads: Vec<usize>,
    copier: ParallelCopierBuilder,
    agent: Option<AgentOptions>,
}

/// How far a calibration has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Sizes that were measured for the first time; what is open is measured further after the last.
    pub done: usize,
    /// Such sizes in all, of both directions.
    pub of: usize,
    /// The one that comes next.
    pub direction: CopyDirection,
    /// Its size in bytes.
    pub bytes: usize,
}

impl Default for Calibration {
    fn default() -> Self {
        Self {
            gpu: 0,
            time: Duration::from_secs(5),
            largest: 64 << 20,
            threads: vec![2, 3, 4, 8],
            copier: ParallelCopier::builder(),
            agent: None,
        }
    }
}

impl Calibration {
    /// Every routine this processor has, parallel copies with 2, 3, 4 and 8 threads as far as there are CPUs, the GPU's
    /// copy engine and `cuMemcpy`; 1 byte to 64 MiB in steps of 2, and in between where the best changes; on GPU 0; in 5 s
    /// or so.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Measures on the GPU with this ordinal.
    #[must_use]
    pub fn gpu(mut self, ordinal: usize) -> Self {
        self.gpu = ordinal;
        self
    }

    /// About how long it may take. Every way is tried some four times at each size in any case, unless it is far behind: at
    /// large sizes that can be a second.
    #[must_use]
    pub fn time(mut self, time: Duration) -> Self {
        self.time = time;
        self
    }

    /// Measures sizes up to this one, in bytes; at least 64. It allocates and maps so much device memory.
    #[must_use]
    pub fn largest(mut self, bytes: usize) -> Self {
        self.largest = bytes;
        self
    }

    /// Measures parallel copies of these numbers of threads; none at all where the list is empty. Numbers for which there
    /// are not enough CPUs are left out, and so are sizes at which the copier would copy with one.
    #[must_use]
    pub fn threads(mut self, threads: impl IntoIterator<Item = usize>) -> Self {
        self.threads = threads.into_iter().filter(|&threads| threads > 1).collect();
        self
    }

    /// Places the workers of parallel copies as this builder says; its numbers of threads do not count.
    #[must_use]
    pub fn copier(mut self, copier: ParallelCopierBuilder) -> Self {
        self.copier = copier;
        self
    }

    /// Measures a [`PushAgent`], too, with these settings; its GPU is [`Calibration::gpu`].
    #[must_use]
    pub fn agent(mut self, options: AgentOptions) -> Self {
        self.agent = Some(options);
        self
    }

    /// See [`Session::calibrate`].
    pub(crate) fn run(&self, session: &Session, mut progress: impl FnMut(Progress)) -> Result<Policy> {
        let sizes = super::sizes("calibrate", self.largest)?;
        let buffer = session.alloc_on(self.gpu, self.largest)?;
        let pinned = session.pin(&buffer)?;
        let mapping = pinned.map()?;
        let copiers = self.copiers(&mapping)?;
        // Page-locked memory is freed when the agent's kernel has ended, for freeing waits for it.
        #[cfg(feature = "cuda")]
        let locked = PageLocked::new(session, &buffer)?;
        let agent = self.agent.clone().map(|options| PushAgent::start(session, [&buffer], options.gpu(self.gpu)));
        let mut agent = agent.transpose()?;
        let reached = agent.as_mut().map(|agent| agent.host_buffer(self.largest)).transpose()?;
        let mut lab = Lab {
            agent,
            reached,
            mapping: &mapping,
            buffer: &buffer,
            routines: CopyDirection::ALL.map(|direction| routines(&mapping, direction)),
            copiers,
            host: vec![1; self.largest],
            #[cfg(feature = "cuda")]
            locked,
        };

        let of = 2 * sizes.len();
        let mut done = 0;
        let tables = super::tables(&mut lab, &sizes, self.time, |direction, bytes| {
            progress(Progress { done, of, direction, bytes });
            done += 1;
        })?;
        Policy::measured(MeasuredOn::now(session, self.gpu, &mapping)?, tables)
    }

    /// One for each number of threads there are CPUs for.
    fn copiers(&self, mapping: &Mapping<'_>) -> Result<Vec<ParallelCopier>> {
        let near = self.copier.clone().gpu(mapping.facts().pci);
        let mut copiers = Vec::new();
        for &threads in &self.threads {
            match near.clone().threads(threads).write_threads(threads).build() {
                Ok(copier) => copiers.push(copier),
                // Too few CPUs.
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {}
                Err(error) => return Err(error),
            }
        }
        Ok(copiers)
    }
}

/// The routines that are candidates. Not `scalar` beside others, whose loads are a round trip for each 8 bytes; and not
/// `movdir64b` for loads, which are those of the routine it is built on.
fn routines(mapping: &Mapping<'_>, direction: CopyDirection) -> Vec<&'static Routine> {
    if mapping.mapping_type() == MappingType::Device {
        return vec![copy::scalar_routine()];
    }
    let others = |routine: &&Routine| match routine.name() {
        "scalar" => false,
        "movdir64b" => direction == CopyDirection::HostToDevice,
        _ => true,
    };
    let usable = copy::routines().iter().copied().filter(|routine| routine.is_available()).filter(others);
    let usable: Vec<_> = usable.collect();
    if usable.is_empty() { vec![copy::scalar_routine()] } else { usable }
}

/// The ways there are between one device buffer and host memory.
struct Lab<'a> {
    agent: Option<PushAgent<'a>>,
    /// Of the agent's.
    reached: Option<HostBuffer>,
    mapping: &'a Mapping<'a>,
    buffer: &'a DeviceBuffer,
    /// To the device and from it.
    routines: [Vec<&'static Routine>; 2],
    copiers: Vec<ParallelCopier>,
    host: Vec<u8>,
    #[cfg(feature = "cuda")]
    locked: Option<PageLocked<'a>>,
}

impl Lab<'_> {
    fn routines(&self, direction: CopyDirection) -> &[&'static Routine] {
        let [to_device, to_host] = &self.routines;
        match direction {
            CopyDirection::HostToDevice => to_device,
            CopyDirection::DeviceToHost => to_host,
        }
    }

    /// A method that is none of `methods`.
    fn missing(method: CopyMethod) -> Error {
        Error::new("calibrate", ErrorKind::InvalidArgument, format!("method {method} is not set up"))
    }
}

impl Subject for Lab<'_> {
    fn methods(&self, direction: CopyDirection, bytes: usize) -> Vec<CopyMethod> {
        let mut methods: Vec<_> =
            self.routines(direction).iter().map(|routine| CopyMethod::Routine(routine.name())).collect();
        if super::are_shared(direction, bytes) {
            methods.extend(self.copiers.iter().map(|copier| CopyMethod::Parallel(copier.threads())));
        }
        if self.agent.is_some() {
            methods.extend([CopyMethod::Agent, CopyMethod::AgentPinned]);
        }
        methods.push(CopyMethod::CopyEngine);
        #[cfg(feature = "cuda")]
        if self.locked.is_some() {
            methods.extend([CopyMethod::CudaMemcpy, CopyMethod::CopyEnginePinned]);
        }
        methods
    }

    fn block(&mut self, method: CopyMethod, direction: CopyDirection, bytes: usize, block: Block) -> Result<Duration> {
        let mapping = self.mapping;
        let taken = match method {
            CopyMethod::Routine(name) => {
                let routine = self.routines(direction).iter().copied().find(|routine| routine.name() == name);
                let routine = routine.ok_or_else(|| Self::missing(method))?;
                let host = &mut self.host[..bytes];
                block.time(|| one_core(mapping, routine, direction, host))
            }
            CopyMethod::Parallel(threads) => {
                let copier = self.copiers.iter().find(|copier| copier.threads() == threads);
                let copier = copier.ok_or_else(|| Self::missing(method))?;
                let host = &mut self.host[..bytes];
                let mut once = || match direction {
                    CopyDirection::HostToDevice => copier.write(mapping, 0, host),
                    CopyDirection::DeviceToHost => copier.read(mapping, 0, host),
                };
                warm_up(&mut once)?;
                let taken = block.time(once);
                rest(copier);
                taken
            }
            CopyMethod::Agent | CopyMethod::AgentPinned => {
                let agent = self.agent.as_mut().ok_or_else(|| Self::missing(method))?;
                let host = match &mut self.reached {
                    Some(memory) if method == CopyMethod::AgentPinned => &mut memory.as_mut_slice()[..bytes],
                    _ => &mut self.host[..bytes],
                };
                // So that the kernel is on the GPU.
                agent.read(0, 0, &mut [0])?;
                match direction {
                    CopyDirection::HostToDevice => block.time(|| agent.write(0, 0, host)),
                    CopyDirection::DeviceToHost => block.time(|| agent.read(0, 0, host)),
                }
            }
            CopyMethod::CopyEngine => {
                let host = &mut self.host[..bytes];
                block.time(|| copy_engine(mapping, self.buffer, direction, host))
            }
            #[cfg(feature = "cuda")]
            CopyMethod::CudaMemcpy => {
                let locked = self.locked.as_mut().ok_or_else(|| Self::missing(method))?;
                block.time(|| locked.cuda_memcpy(direction, bytes))
            }
            #[cfg(feature = "cuda")]
            CopyMethod::CopyEnginePinned => {
                let locked = self.locked.as_mut().ok_or_else(|| Self::missing(method))?;
                let host = locked.host(bytes);
                block.time(|| copy_engine(mapping, self.buffer, direction, host))
            }
            #[cfg(not(feature = "cuda"))]
            _ => Err(Self::missing(method)),
        };
        mapping.flush()?;
        taken
    }
}

/// Copies with a routine, and with the fences of a plain copy.
#[inline]
fn one_core(mapping: &Mapping<'_>, routine: &Routine, direction: CopyDirection, host: &mut [u8]) -> Result<()> {
    let device = mapping.at("calibrate", 0, host.len())?;
    match direction {
        CopyDirection::HostToDevice => {
            // SAFETY: `at` proved that the bytes lie in the live window; host memory does not overlap it.
            unsafe { routine.store(device, host) };
            fence::store();
        }
        CopyDirection::DeviceToHost => {
            fence::full();
            // SAFETY: as above, and the window is whole pages and so whole lines.
            unsafe { routine.load(host, device) };
            fence::load();
        }
    }
    Ok(())
}

/// Copies as an automatic copier does by the copy engine.
fn copy_engine(mapping: &Mapping<'_>, buffer: &DeviceBuffer, direction: CopyDirection, host: &mut [u8]) -> Result<()> {
    mapping.settle_for_copy_engine()?;
    match direction {
        CopyDirection::HostToDevice => buffer.upload(0, host),
        CopyDirection::DeviceToHost => buffer.download(0, host),
    }
}
