//! How an automatic copier is set up.

use std::time::Duration;

use crate::agent::AgentOptions;
use crate::copy::ParallelCopierBuilder;

/// Settings of an [`AutoCopier`](super::AutoCopier).
#[derive(Clone, Debug)]
pub struct AutoOptions {
    pub(super) agent: Option<AgentOptions>,
    pub(super) parallel: Option<ParallelCopierBuilder>,
    pub(super) largest: usize,
    pub(super) time: Duration,
    pub(super) is_page_locked: bool,
}

impl Default for AutoOptions {
    fn default() -> Self {
        Self { agent: None, parallel: None, largest: 64 << 20, time: Duration::from_millis(500), is_page_locked: false }
    }
}

impl AutoOptions {
    /// Lets a [`PushAgent`](crate::agent::PushAgent) copy where it is quickest. Its GPU is the buffer's.
    #[must_use]
    pub fn agent(mut self, options: AgentOptions) -> Self {
        self.agent = Some(options);
        self
    }

    /// Lets a [`ParallelCopier`](crate::ParallelCopier) copy where it is quickest.
    #[must_use]
    pub fn parallel(mut self, copier: ParallelCopierBuilder) -> Self {
        self.parallel = Some(copier);
        self
    }

    /// The host memory of the copies is page-locked (`cuMemHostAlloc`, `cuMemHostRegister`, PyTorch's pinned tensors): then
    /// the copy engine reaches it directly, and is measured so. An agent reaches it where it came from
    /// [`AutoCopier::host_buffer`](super::AutoCopier::host_buffer) or was
    /// [registered](super::AutoCopier::register_host), and is measured with such memory and with other. Any memory may be
    /// given all the same; ordinary memory takes the copy engine longer than was measured.
    ///
    /// Left out, ordinary memory is measured, which agent and driver copy to or from a place that the GPU reaches.
    #[must_use]
    pub fn page_locked(mut self) -> Self {
        self.is_page_locked = true;
        self
    }

    /// The largest size that is measured, in bytes; 64 MiB by default, at least 64, and no more than the next power of 2 of
    /// the buffer's length in any case. Larger copies are made like those.
    #[must_use]
    pub fn largest(mut self, bytes: usize) -> Self {
        self.largest = bytes;
        self
    }

    /// About how long measuring may take; 500 ms by default. Every method is tried some four times at each size in any case,
    /// unless it is far behind, which can take as long for a buffer of 64 MiB.
    #[must_use]
    pub fn time(mut self, time: Duration) -> Self {
        self.time = time;
        self
    }
}
