//! How a push agent is set up.

use std::time::Duration;

use super::bounce::Bounce;
use crate::error::{Error, ErrorKind, Result};

/// Bytes of the longest message that packets carry.
pub(super) const MAX_PACKET_BYTES: usize = 1024;

/// Settings of a [`PushAgent`](super::PushAgent).
#[derive(Clone, Debug)]
pub struct AgentOptions {
    pub(super) gpu: usize,
    pub(super) threads: u32,
    pub(super) ring: u32,
    pub(super) packet_bytes: usize,
    pub(super) idle_timeout: Option<Duration>,
    pub(super) residency: Option<Duration>,
    pub(super) deadline: Duration,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a stand-in has no bulk copies"))]
    pub(super) stages: u32,
    pub(super) stand_in: bool,
    pub(super) first_number: u32,
    pub(super) fault: Option<(u64, Fault)>,
    pub(super) bounce: Bounce,
}

/// How a stand-in kernel can fail, for tests.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It ends without a word, as a kernel does whose context died.
    Dies,
    /// It neither answers nor ends.
    Hangs,
    /// It does nothing for so long, and then goes on.
    Sleeps(Duration),
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            gpu: 0,
            threads: 256,
            ring: 64,
            packet_bytes: MAX_PACKET_BYTES,
            idle_timeout: Some(Duration::from_micros(200)),
            residency: Some(Duration::from_millis(10)),
            deadline: Duration::from_secs(1),
            #[cfg(feature = "cuda")]
            stages: super::bulk::STAGES,
            #[cfg(not(feature = "cuda"))]
            stages: 0,
            stand_in: false,
            first_number: 1,
            fault: None,
            bounce: Bounce::default(),
        }
    }
}

impl AgentOptions {
    /// The GPU by its CUDA ordinal; 0 by default. All ranges are on it.
    #[must_use]
    pub fn gpu(mut self, ordinal: usize) -> Self {
        self.gpu = ordinal;
        self
    }

    /// Threads of the resident block, a multiple of 32 from 64 to 1024; 256 by default.
    #[must_use]
    pub fn threads(mut self, threads: u32) -> Self {
        self.threads = threads;
        self
    }

    /// Doorbells in the ring, a power of two from 16 to 1024; 64 by default. Half of them can be in flight.
    #[must_use]
    pub fn ring(mut self, doorbells: u32) -> Self {
        self.ring = doorbells;
        self
    }

    /// [Reads](super::PushAgent::read) of up to so many bytes come as packets that carry their own sequence numbers, without
    /// a fence on the GPU; 0 to 1024, 1024 by default.
    #[must_use]
    pub fn packet_bytes(mut self, bytes: usize) -> Self {
        self.packet_bytes = bytes;
        self
    }

    /// The kernel ends after so long without a request, and the next one launches it again, which takes as long as a
    /// kernel launch; 200 us by default. This is the longest that one idle agent can hold up `cudaFree`,
    /// `cudaDeviceSynchronize` and the like. `None`: never.
    #[must_use]
    pub fn idle_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.idle_timeout = timeout;
        self
    }

    /// The kernel ends between two requests after so long however busy it is, so that calls which wait for it get their
    /// turn, and stays away for 100 us if a request waits by then; 10 ms by default. `None`: never.
    #[must_use]
    pub fn residency(mut self, limit: Option<Duration>) -> Self {
        self.residency = limit;
        self
    }

    /// For a GPU that nobody else uses: the kernel stays until the agent is dropped. Until then the calls listed at
    /// [`PushAgent`](super::PushAgent) block, in this process, for ever.
    #[must_use]
    pub fn dedicated(self) -> Self {
        self.idle_timeout(None).residency(None)
    }

    /// How long a request may take, and how long dropping the agent waits for the kernel to end; 1 s by default. A
    /// launch waits for a free SM.
    #[must_use]
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = limit;
        self
    }

    /// Lets threads of the CPU play the kernel, for programs that run on the emulated backend. Figures say nothing about
    /// a GPU then.
    #[must_use]
    pub fn cpu_stand_in(mut self) -> Self {
        self.stand_in = true;
        self
    }

    /// Stages of 16 KiB of shared memory for bulk copies from host memory, at most what the GPU has; 0: none, and no bulk
    /// copies. Fewer than 5 are none.
    #[doc(hidden)]
    #[must_use]
    pub fn bulk_stages(mut self, stages: u32) -> Self {
        self.stages = stages;
        self
    }

    /// The number of the first request, so that tests see the numbers wrap.
    #[doc(hidden)]
    #[must_use]
    pub fn first_number(mut self, number: u32) -> Self {
        self.first_number = number;
        self
    }

    /// How reads go into memory that the kernel does not reach, so that benches can compare.
    #[doc(hidden)]
    #[must_use]
    pub fn bounce(mut self, bounce: Bounce) -> Self {
        self.bounce = bounce;
        self
    }

    /// Lets the stand-in fail at the request after so many others.
    #[doc(hidden)]
    #[must_use]
    pub fn stand_in_fault(mut self, after: u64, fault: Fault) -> Self {
        self.fault = Some((after, fault));
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        let refuse = |cause: String, remedy| Err(Error::new("agent", ErrorKind::InvalidArgument, cause).remedy(remedy));
        if !self.threads.is_multiple_of(32) || !(64..=1024).contains(&self.threads) {
            return refuse(format!("a block of {} threads", self.threads), "ask for a multiple of 32 from 64 to 1024");
        }
        if !self.ring.is_power_of_two() || !(16..=1024).contains(&self.ring) {
            return refuse(format!("a ring of {} doorbells", self.ring), "ask for a power of two from 16 to 1024");
        }
        if self.packet_bytes > MAX_PACKET_BYTES {
            return refuse(format!("packets for messages of {} bytes", self.packet_bytes), "ask for at most 1024");
        }
        if self.idle_timeout.is_some_and(|limit| limit.is_zero()) || self.residency.is_some_and(|limit| limit.is_zero())
        {
            return refuse("a time limit of 0".to_owned(), "use None for no limit");
        }
        Ok(())
    }
}
