//! The ways in which an automatic copier copies.

use std::fmt;

use crate::policy::{CopyDirection, CopyMethod};

/// A way in which an [`AutoCopier`](super::AutoCopier) copies.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AutoMethod {
    /// The calling thread's own loads and stores: [`Mapping::read`](crate::Mapping::read),
    /// [`Mapping::write`](crate::Mapping::write).
    Bar1,
    /// Those of several threads: [`ParallelCopier`](crate::ParallelCopier).
    Parallel,
    /// A block of threads on the GPU: [`PushAgent`](crate::agent::PushAgent).
    Agent,
    /// The GPU's copy engine: [`DeviceBuffer::download`](crate::DeviceBuffer::download),
    /// [`DeviceBuffer::upload`](crate::DeviceBuffer::upload).
    CopyEngine,
}

impl AutoMethod {
    /// The name that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bar1 => "bar1",
            Self::Parallel => "parallel",
            Self::Agent => "agent",
            Self::CopyEngine => "copy_engine",
        }
    }

    /// How such a copy keeps the [promise](super::AutoCopier#ordering) of an automatic copier, in one line.
    #[must_use]
    pub const fn ordering(self, direction: CopyDirection) -> &'static str {
        match (self, direction) {
            (Self::Bar1, CopyDirection::DeviceToHost) => {
                "MFENCE, loads by this thread, LFENCE: every byte is fetched after the call began"
            }
            (Self::Bar1, CopyDirection::HostToDevice) => {
                "stores by this thread, SFENCE: its later writes are seen after these bytes, which may still be on their \
                 way when the call returns"
            }
            (Self::Parallel, CopyDirection::DeviceToHost) => {
                "MFENCE, then loads by several threads, each between MFENCE and LFENCE: every byte is fetched after the \
                 call began"
            }
            (Self::Parallel, CopyDirection::HostToDevice) => {
                "SFENCE, then stores by several threads, each with its SFENCE: this thread's later writes are seen after \
                 these bytes, which may still be on their way when the call returns"
            }
            (Self::Agent, CopyDirection::DeviceToHost) => {
                "SFENCE and a request to a kernel, which reads after this thread's earlier writes arrived: the call \
                 returns with the kernel's answer, and every byte is fetched after it began"
            }
            (Self::Agent, CopyDirection::HostToDevice) => {
                "SFENCE and a request to a kernel, which writes after this thread's earlier writes arrived: the call \
                 returns with the kernel's answer, when the bytes are in device memory"
            }
            (Self::CopyEngine, CopyDirection::DeviceToHost) => {
                "SFENCE (a flush where the GPU does not order writes), so that this thread's earlier writes are there \
                 first, then a CUDA copy on a stream of its own, which is waited for: every byte is fetched after the \
                 call began"
            }
            (Self::CopyEngine, CopyDirection::HostToDevice) => {
                "SFENCE (a flush where the GPU does not order writes), so that this thread's earlier writes are there \
                 first, then a CUDA copy on a stream of its own, which is waited for: the bytes are in device memory \
                 when the call returns"
            }
        }
    }

    /// The way that a policy's method stands for.
    pub(super) const fn of(method: CopyMethod) -> Self {
        match method {
            CopyMethod::Routine(_) => Self::Bar1,
            CopyMethod::Parallel(_) => Self::Parallel,
            CopyMethod::Agent | CopyMethod::AgentPinned => Self::Agent,
            CopyMethod::CopyEngine | CopyMethod::CudaMemcpy | CopyMethod::CopyEnginePinned => Self::CopyEngine,
        }
    }
}

impl fmt::Display for AutoMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
