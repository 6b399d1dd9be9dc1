//! What runs the agent's kernel: a GPU, or threads that stand in for one.

use std::time::Duration;

use super::standin::StandIn;
use crate::error::Result;

/// What the kernel is told at each launch.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the stand-in knows addresses of its own"))]
pub(super) struct Launch {
    /// The rings' device addresses: the second is 0 where there is one ring.
    pub(super) rings: [u64; 2],
    /// The control lines' address as the device sees it.
    pub(super) control: u64,
    /// 0: for ever.
    pub(super) idle_ns: u64,
    pub(super) residency_ns: u64,
    /// Lines in the ring, less 1.
    pub(super) mask: u32,
    pub(super) next: u32,
    pub(super) generation: u32,
    /// Whether it takes what bulk copies need.
    pub(super) bulk: bool,
}

/// One block at a time, each launched once the one before has announced that it leaves.
pub(super) enum Engine<'a> {
    #[cfg(feature = "cuda")]
    Gpu(super::gpu::Gpu),
    StandIn(StandIn<'a>),
}

impl Engine<'_> {
    pub(super) fn launch(&mut self, launch: Launch) -> Result<()> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.launch(launch),
            Self::StandIn(threads) => threads.launch(launch),
        }
    }

    /// Whether nothing runs any more.
    pub(super) fn has_ended(&self) -> Result<bool> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.has_ended(),
            Self::StandIn(threads) => Ok(threads.has_ended()),
        }
    }

    /// Waits until nothing runs any more.
    pub(super) fn finish(&mut self, limit: Duration) -> Result<()> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.finish(limit),
            Self::StandIn(threads) => threads.finish(limit),
        }
    }

    /// Shared memory that a launch with bulk copies takes, in bytes; 0 where there are none.
    pub(super) fn bulk_bytes(&self) -> u32 {
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.bulk_bytes(),
            Self::StandIn(_) => 0,
        }
    }

    /// Lets the stand-in's threads have the processor; a GPU needs none.
    pub(super) fn give_way(&self) {
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => {}
            Self::StandIn(_) => std::thread::yield_now(),
        }
    }
}
