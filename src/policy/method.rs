//! Which way bytes go, and by which method.

use std::fmt;
use std::str::FromStr;

use super::OP;
use crate::copy;
use crate::error::{Error, ErrorKind, Result};

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "tools", derive(serde::Serialize))]
pub enum CopyDirection {
    /// Writes.
    #[cfg_attr(feature = "tools", serde(rename = "h2d"))]
    HostToDevice,
    /// Reads.
    #[cfg_attr(feature = "tools", serde(rename = "d2h"))]
    DeviceToHost,
}

impl CopyDirection {
    pub(super) const ALL: [Self; 2] = [Self::HostToDevice, Self::DeviceToHost];

    /// `h2d` or `d2h`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "h2d",
            Self::DeviceToHost => "d2h",
        }
    }

    /// `Host to device` or `Device to host`.
    #[must_use]
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::HostToDevice => "Host to device",
            Self::DeviceToHost => "Device to host",
        }
    }
}

impl fmt::Display for CopyDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A way to copy.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopyMethod {
    /// One core, with the routine of this name.
    Routine(&'static str),
    /// A [`ParallelCopier`](crate::ParallelCopier) of so many threads, the calling one among them.
    Parallel(usize),
    /// A [`PushAgent`](crate::agent::PushAgent), with host memory of any kind: its `read` and `write`, through page-locked
    /// memory of its own.
    Agent,
    /// The same with page-locked memory that its kernel reaches directly: a
    /// [host buffer](crate::agent::PushAgent::host_buffer), or memory
    /// [registered](crate::agent::PushAgent::register_host) with it.
    AgentPinned,
    /// The GPU's copy engine with ordinary host memory: an `SFENCE`, or a [flush](crate::Mapping::flush) where the GPU does not
    /// [order writes](crate::Mapping::publish_is_ordered), then [`DeviceBuffer::download`](crate::DeviceBuffer::download) or [`upload`](crate::DeviceBuffer::upload), as an
    /// [`AutoCopier`](crate::auto::AutoCopier) calls them.
    CopyEngine,
    /// A synchronous `cuMemcpy` from or to page-locked host memory, and nothing else.
    CudaMemcpy,
    /// As [`CopyMethod::CopyEngine`], with page-locked host memory.
    CopyEnginePinned,
}

const AGENT: &str = "agent";
const AGENT_PINNED: &str = "agent_pinned";
const COPY_ENGINE: &str = "copy_engine";
const CUDA_MEMCPY: &str = "cuda_memcpy_pinned";
const COPY_ENGINE_PINNED: &str = "copy_engine_pinned";
const PARALLEL: &str = "parallel-";

/// The methods without a number, and their names.
const NAMED: [(&str, CopyMethod); 5] = [
    (AGENT, CopyMethod::Agent),
    (AGENT_PINNED, CopyMethod::AgentPinned),
    (COPY_ENGINE, CopyMethod::CopyEngine),
    (CUDA_MEMCPY, CopyMethod::CudaMemcpy),
    (COPY_ENGINE_PINNED, CopyMethod::CopyEnginePinned),
];

impl CopyMethod {
    /// How much it takes beside the calling thread: of equals the least is best. Cores, more of them, an SM, a CUDA call; of
    /// either the one without page-locked memory.
    pub(crate) fn rank(self) -> (u32, usize) {
        match self {
            Self::Routine(_) => (0, 0),
            Self::Parallel(threads) => (1, threads),
            Self::Agent => (2, 0),
            Self::AgentPinned => (2, 1),
            Self::CopyEngine => (3, 0),
            Self::CudaMemcpy => (4, 0),
            Self::CopyEnginePinned => (5, 0),
        }
    }
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Routine(name) => f.pad(name),
            Self::Parallel(threads) => f.pad(&format!("{PARALLEL}{threads}")),
            Self::Agent => f.pad(AGENT),
            Self::AgentPinned => f.pad(AGENT_PINNED),
            Self::CopyEngine => f.pad(COPY_ENGINE),
            Self::CudaMemcpy => f.pad(CUDA_MEMCPY),
            Self::CopyEnginePinned => f.pad(COPY_ENGINE_PINNED),
        }
    }
}

impl FromStr for CopyMethod {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some((_, method)) = NAMED.iter().find(|(name, _)| *name == text) {
            return Ok(*method);
        }
        if let Some(threads) = text.strip_prefix(PARALLEL).and_then(|threads| threads.parse().ok()) {
            return Ok(Self::Parallel(threads));
        }
        let routines = copy::routines();
        let routine = routines.iter().find(|routine| routine.name() == text);
        routine.map(|routine| Self::Routine(routine.name())).ok_or_else(|| {
            let names = routines.iter().map(|routine| routine.name()).chain(NAMED.iter().map(|(name, _)| *name));
            let names = names.collect::<Vec<_>>().join(", ");
            Error::new(OP, ErrorKind::InvalidArgument, format!("there is no method {text:?}"))
                .remedy(format!("choose one of {names}, {PARALLEL}2 and so on"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_round_trip() {
        let others = ["scalar", "avx512", "movdir64b", "parallel-2", "parallel-16"];
        for text in others.into_iter().chain(NAMED.iter().map(|(name, _)| *name)) {
            assert_eq!(text.parse::<CopyMethod>().unwrap().to_string(), text);
        }
        for text in ["", "parallel-", "parallel", "AVX2", "cuda", "agent-2"] {
            let error = text.parse::<CopyMethod>().unwrap_err().to_string();
            assert!(error.contains(&format!("there is no method {text:?}")) && error.contains("avx2"), "{error}");
            assert!(error.contains("agent, agent_pinned, copy_engine, cuda_memcpy_pinned"), "{error}");
        }
    }

    #[test]
    fn of_equals_the_plainer_comes_first() {
        let plain_first =
            ["avx2", "parallel-2", "parallel-8", "agent", "agent_pinned", "copy_engine", "cuda_memcpy_pinned"];
        let ranks = plain_first.map(|name| name.parse::<CopyMethod>().unwrap().rank());
        assert!(ranks.is_sorted_by(|a, b| a < b), "{ranks:?}");
    }
}
