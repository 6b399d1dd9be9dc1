//! What a channel is asked for.

use std::sync::Arc;
use std::time::Duration;

use super::layout::BLOCK_LINES;
use super::memory::{Asked, Shared};
use super::receiver::Receiver;
use super::sender::Sender;
use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;

/// Lines that a ring may have.
const MIN_LINES: u32 = 32;
const MAX_LINES: u32 = 1 << 20;

/// Settings of a channel. The default: rings of 1024 lines (64 KiB) each way, one warp that receives, 10 seconds.
#[derive(Clone, Debug)]
pub struct ChannelBuilder {
    asked: Asked,
    limit: Duration,
}

impl Default for ChannelBuilder {
    fn default() -> Self {
        let asked = Asked {
            ordinal: None,
            in_lines: 1024,
            in_start: 0,
            out_lines: 1024,
            out_start: 0,
            readers: 1,
            limit_ns: 0,
            far_in_host: false,
        };
        Self { asked, limit: Duration::from_secs(10) }
    }
}

impl ChannelBuilder {
    /// The default.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The GPU, by CUDA ordinal; otherwise that of the calling thread's context, or GPU 0.
    #[must_use]
    pub fn gpu(mut self, ordinal: usize) -> Self {
        self.asked.ordinal = Some(ordinal);
        self
    }

    /// Lines of 64 bytes in the ring to the GPU, which is GPU memory: a power of two, 32 to 1048576, and at least 32 for
    /// each reader.
    ///
    /// 32 lines are for latency: such a ring has several places in GPU memory, and the kernel takes the nearest when it starts.
    /// A line is at home in one half of a large GPU's L2 cache, by pages of 4 KiB, and on an H200 the far half costs a round
    /// trip 0.1 to 0.25 us more; a longer ring has pages in both. A sender that began before the kernel did stays in the
    /// first place, so wait for [`Sender::kernel_has_started`].
    #[must_use]
    pub fn lines_to_gpu(mut self, lines: u32) -> Self {
        self.asked.in_lines = lines;
        self
    }

    /// Lines of 64 bytes in the ring to the CPU, which is pinned host memory: a power of two, 32 to 1048576.
    #[must_use]
    pub fn lines_to_host(mut self, lines: u32) -> Self {
        self.asked.out_lines = lines;
        self
    }

    /// How many warps receive; 1 by default. With more, only [`Sender::send_line`], [`Sender::try_send_line`] and
    /// [`Sender::try_send_lines`] can be used, and the warps take blocks of 32 lines in turn.
    #[must_use]
    pub fn readers(mut self, readers: u32) -> Self {
        self.asked.readers = readers;
        self
    }

    /// How long after its start the kernel ends by itself, whatever happens to this process; 10 seconds by default. Until
    /// then a forgotten kernel holds up calls such as `cudaFree` and `cudaDeviceSynchronize`.
    #[must_use]
    pub fn kernel_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Numbers of the first lines, so that tests reach the end of 32 bits.
    #[doc(hidden)]
    #[must_use]
    pub fn first_lines(mut self, to_gpu: u32, to_host: u32) -> Self {
        (self.asked.in_start, self.asked.out_start) = (to_gpu, to_host);
        self
    }

    /// Puts the ring to the GPU in pinned host memory, where the kernel polls it over the bus: what BAR1 is compared with.
    #[doc(hidden)]
    #[must_use]
    pub fn ring_in_host_memory(mut self) -> Self {
        self.asked.far_in_host = true;
        self
    }

    /// Allocates and maps the rings. Do it before the kernel is launched; nothing here waits for running kernels, but
    /// dropping both ends does.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a number of lines or readers out of range; `UnsupportedFeature` for a processor without AVX,
    /// without a whole-line store for write-combined memory, or a build without `cuda`; otherwise as
    /// [`Session::alloc_on`], [`Session::pin`] and [`Pinned::map`](crate::Pinned::map).
    pub fn open(self, session: &Session) -> Result<(Sender, Receiver)> {
        let Self { mut asked, limit } = self;
        for (name, lines) in [("lines_to_gpu", asked.in_lines), ("lines_to_host", asked.out_lines)] {
            if !(lines.is_power_of_two() && (MIN_LINES..=MAX_LINES).contains(&lines)) {
                let cause = format!("{name} is {lines}");
                return Err(Error::new("open channel", ErrorKind::InvalidArgument, cause)
                    .remedy(format!("ask for a power of two from {MIN_LINES} to {MAX_LINES}")));
            }
        }
        let most = asked.in_lines / BLOCK_LINES;
        if !(1..=most).contains(&asked.readers) {
            let cause = format!("{} readers of a ring of {} lines", asked.readers, asked.in_lines);
            return Err(Error::new("open channel", ErrorKind::InvalidArgument, cause)
                .remedy(format!("ask for 1 to {most} readers, or for {BLOCK_LINES} lines for each of them")));
        }
        asked.limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let shared = Arc::new(Shared::new(session, &asked)?);
        Ok((Sender::new(Arc::clone(&shared)), Receiver::new(shared)))
    }
}
