//! Reads faster than a CPU's loads: a block that stays on the GPU pushes data into host memory.
//!
//! A CPU core has about a kilobyte of loads in flight over the bus, so reading 64 KiB through BAR1 takes tens of
//! microseconds; `cudaMemcpy` takes microseconds before the first byte moves. A [`PushAgent`] keeps one block of threads
//! on the GPU that waits for a doorbell: one line that the CPU stores into GPU memory. The block then copies from device
//! memory to page-locked host memory, at the bus's own speed, and sets a flag there that the CPU polls. It also fetches
//! what lies in such memory: the pull agent is the same kernel.
//!
//! It is opt-in, for it takes an SM, and while its kernel runs some CUDA calls block: see [`PushAgent`].

#![allow(unsafe_code, reason = "host memory that a kernel writes is reached through raw pointers and atomics")]

mod bounce;
#[cfg(feature = "cuda")]
mod bulk;
mod copies;
mod engine;
#[cfg(feature = "cuda")]
mod gpu;
mod link;
mod memory;
mod options;
mod push;
mod reach;
mod request;
mod standin;
mod wire;

#[doc(hidden)]
pub use bounce::Bounce;
pub use memory::HostBuffer;
pub use options::AgentOptions;
#[doc(hidden)]
pub use options::Fault;
pub use push::PushAgent;
pub use request::{Segment, SubmitError, Ticket};
