//! What only a real GPU can show: backends `rm` and `vulkan` on the stock NVIDIA driver.
//!
//! Without a GPU every test prints `SKIPPED` with the reason and passes. Some start kernels that occupy the device, so
//! run them one at a time: `RUST_TEST_THREADS=1`.
#![cfg(feature = "cuda")]
#![allow(unsafe_code, missing_docs, reason = "tests call the CUDA driver beside the library")]
#![allow(clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block, reason = "driver calls of tests")]
#![allow(clippy::as_conversions, clippy::unwrap_used, reason = "tests may panic and convert freely")]

mod costs;
mod memory;
mod refusals;
mod support;
mod teardown;
mod threads;
#[cfg(feature = "vulkan")]
mod vulkan;
