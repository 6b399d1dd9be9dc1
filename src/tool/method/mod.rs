//! The ways of copying that are compared. Each call here is what a timed region contains.

mod agent;
mod auto;
mod bar1;
mod cuda;

pub use agent::{Agent, AgentPinned};
pub use auto::Auto;
pub use bar1::{Bar1, Parallel, Posted};
pub use cuda::{CudaMemcpy, HostSide};

use super::cpu;
use super::report::{Direction, Metric};
use crate::error::Result;

/// A way to copy between host memory and the device buffer.
pub trait Method {
    /// As in the report.
    fn name(&self) -> &'static str;

    /// Threads that share a copy, where that is the method.
    fn threads(&self) -> Option<usize> {
        None
    }

    /// Nanoseconds that every single call contains and that are not the copy's.
    fn deducted_ns(&self) -> f64 {
        0.0
    }

    /// What a call does, in words.
    fn describe(&self, direction: Direction) -> &'static str;

    /// Whether calls back to back are worth a figure of their own. They are not where every call waits for the GPU's
    /// answer, so that nothing of one is left when the next begins.
    fn sustains(&self) -> bool {
        true
    }

    /// What is known of a single call: one loop for each, in this order.
    fn singles(&self, direction: Direction) -> &'static [Metric];

    /// Host to device, at `offset` of the buffer.
    fn write(&self, offset: usize, from: &[u8]) -> Result<()>;

    /// Device to host.
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()>;

    /// Before the copies of a row, and not timed: a method that copies from and to host memory of its own makes that
    /// hold what `host` does, from its start on.
    fn lend(&self, _host: &[u8]) {}

    /// After the copies of a row of reads, and not timed: such a method says what that memory holds now.
    fn give_back(&self, _host: &mut [u8]) {}

    /// Puts the host's side of the next copy, which is `host`, out of all caches; not timed.
    fn chill(&self, host: &[u8]) {
        cpu::flush_lines(host);
    }

    /// Ends a row of writes that were timed together; timed as well.
    fn close(&self) {}

    /// A single write until it has got as far as `metric` says.
    #[inline(always)]
    fn single_write(&self, metric: Metric, offset: usize, from: &[u8]) -> Result<()> {
        self.write(offset, from)?;
        if metric == Metric::Drained {
            cpu::mfence();
        }
        Ok(())
    }

    /// Makes sure that all writes have arrived.
    fn settle(&self) -> Result<()>;
}
