//! What an automatic copier copies with.

use std::time::Duration;

use super::method::AutoMethod;
use super::table::{HostKind, Offer};
use crate::agent::{HostBuffer, PushAgent};
use crate::buffer::DeviceBuffer;
use crate::copy::ParallelCopier;
use crate::error::Result;
use crate::mapping::Mapping;
use crate::policy::{Block, CopyDirection, CopyMethod, Subject, are_shared, rest, warm_up};

/// One buffer, and every way to it.
pub(super) struct Ways<'a, 'b> {
    pub(super) mapping: Mapping<'b>,
    pub(super) buffer: &'b DeviceBuffer,
    pub(super) parallel: Option<ParallelCopier>,
    pub(super) agent: Option<PushAgent<'a>>,
    /// The buffer's place among the agent's ranges.
    pub(super) range: usize,
    /// The GPU's CUDA ordinal, where there is one.
    pub(super) gpu: Option<usize>,
}

impl Ways<'_, '_> {
    pub(super) fn offer(&self, host: HostKind) -> Offer {
        // One thread is no copier.
        let threads = self.parallel.as_ref().map(ParallelCopier::threads).filter(|&threads| threads > 1);
        Offer { threads, has_agent: self.agent.is_some(), host }
    }

    /// Whether the agent reaches this memory.
    #[inline]
    pub(super) fn reaches(&self, host: &[u8]) -> bool {
        self.agent.as_ref().is_some_and(|agent| agent.reaches(host))
    }

    /// Page-locked memory, which the agent reaches if there is one.
    pub(super) fn host_buffer(&mut self, bytes: usize) -> Result<HostBuffer> {
        match &mut self.agent {
            Some(agent) => agent.host_buffer(bytes),
            None => HostBuffer::of_no_agent(self.gpu, bytes),
        }
    }

    #[inline]
    pub(super) fn read(&mut self, method: AutoMethod, offset: usize, to: &mut [u8]) -> Result<()> {
        match method {
            AutoMethod::Bar1 => self.mapping.read(offset, to),
            _ => self.read_by(method, offset, to),
        }
    }

    #[inline]
    pub(super) fn write(&mut self, method: AutoMethod, offset: usize, from: &[u8]) -> Result<()> {
        match method {
            AutoMethod::Bar1 => self.mapping.write(offset, from),
            _ => self.write_by(method, offset, from),
        }
    }

    /// By what takes a microsecond at least, and so is not inlined with the rest.
    fn read_by(&mut self, method: AutoMethod, offset: usize, to: &mut [u8]) -> Result<()> {
        match (method, &self.parallel, &mut self.agent) {
            (AutoMethod::Parallel, Some(copier), _) => copier.read(&self.mapping, offset, to),
            (AutoMethod::Agent, _, Some(agent)) => agent.read(self.range, offset, to),
            (AutoMethod::CopyEngine, _, _) => {
                self.mapping.settle_for_copy_engine()?;
                self.buffer.download(offset, to)
            }
            _ => self.mapping.read(offset, to),
        }
    }

    fn write_by(&mut self, method: AutoMethod, offset: usize, from: &[u8]) -> Result<()> {
        match (method, &self.parallel, &mut self.agent) {
            (AutoMethod::Parallel, Some(copier), _) => copier.write(&self.mapping, offset, from),
            // The doorbell follows an SFENCE and comes to the kernel after whatever this thread wrote before it, so that
            // nothing of that arrives after the kernel's own writes.
            (AutoMethod::Agent, _, Some(agent)) => agent.write(self.range, offset, from),
            (AutoMethod::CopyEngine, _, _) => {
                // Nothing of what was written before arrives after the engine's own writes.
                self.mapping.settle_for_copy_engine()?;
                self.buffer.upload(offset, from)
            }
            _ => self.mapping.write(offset, from),
        }
    }
}

/// Host memory to measure with.
pub(super) enum Host {
    Ordinary(Vec<u8>),
    /// Reached by the agent, if there is one.
    PageLocked(HostBuffer),
}

impl Host {
    /// As long as the buffer.
    pub(super) fn new(ways: &mut Ways<'_, '_>, is_page_locked: bool) -> Result<Self> {
        let bytes = ways.buffer.len();
        if is_page_locked { ways.host_buffer(bytes).map(Self::PageLocked) } else { Ok(Self::Ordinary(vec![1; bytes])) }
    }

    fn is_page_locked(&self) -> bool {
        matches!(self, Self::PageLocked(_))
    }

    fn bytes(&mut self, bytes: usize) -> &mut [u8] {
        match self {
            Self::Ordinary(memory) => &mut memory[..bytes],
            Self::PageLocked(memory) => &mut memory.as_mut_slice()[..bytes],
        }
    }
}

/// The ways, measured by the very calls that a copier makes.
pub(super) struct Trial<'a, 'b> {
    pub(super) ways: Ways<'a, 'b>,
    pub(super) host: Host,
}

impl Subject for Trial<'_, '_> {
    fn methods(&self, direction: CopyDirection, bytes: usize) -> Vec<CopyMethod> {
        let is_page_locked = self.host.is_page_locked();
        let offer = self.ways.offer(if is_page_locked { HostKind::PageLocked } else { HostKind::Ordinary });
        let routines = self.ways.mapping.routines;
        let routine = match direction {
            CopyDirection::HostToDevice => routines.store(bytes),
            CopyDirection::DeviceToHost => routines.load(bytes),
        };
        let mut methods = vec![CopyMethod::Routine(routine.name())];
        methods.extend(offer.threads.filter(|_| are_shared(direction, bytes)).map(CopyMethod::Parallel));
        methods.extend(offer.has_agent.then_some(CopyMethod::Agent));
        methods.extend((offer.has_agent && is_page_locked).then_some(CopyMethod::AgentPinned));
        methods.push(if is_page_locked { CopyMethod::CopyEnginePinned } else { CopyMethod::CopyEngine });
        methods
    }

    fn block(&mut self, method: CopyMethod, direction: CopyDirection, bytes: usize, block: Block) -> Result<Duration> {
        let Self { ways, host } = self;
        let host = host.bytes(bytes);
        let range = ways.range;
        if let (CopyMethod::Agent | CopyMethod::AgentPinned, Some(agent)) = (method, &mut ways.agent) {
            // So that the kernel is on the GPU.
            agent.read(range, 0, &mut [0])?;
        }
        let taken = match (method, &mut ways.agent) {
            // As with memory that the kernel does not reach.
            (CopyMethod::Agent, Some(agent)) => block.time(|| match direction {
                CopyDirection::HostToDevice => agent.write_by_bounce(range, 0, host),
                CopyDirection::DeviceToHost => agent.read_by_bounce(range, 0, host),
            }),
            _ => {
                let way = AutoMethod::of(method);
                let mut once = || match direction {
                    CopyDirection::HostToDevice => ways.write(way, 0, host),
                    CopyDirection::DeviceToHost => ways.read(way, 0, host),
                };
                if way == AutoMethod::Parallel {
                    warm_up(&mut once)?;
                }
                let taken = block.time(&mut once);
                if let (AutoMethod::Parallel, Some(copier)) = (way, &ways.parallel) {
                    rest(copier);
                }
                taken
            }
        };
        ways.mapping.flush()?;
        taken
    }
}
