//! What this library asks of CUDA: allocation, facts about pointers, and the copies that ours are compared with.
//!
//! Nothing is linked. `libcuda.so.1` is opened when first needed; where it is missing, calls return `NoDriver`.

#![allow(unsafe_code, reason = "calls into the CUDA driver")]

pub(crate) mod context;
pub(crate) mod driver;
pub(crate) mod memory;
pub(crate) mod nvml;
pub(crate) mod pointer;
pub(crate) mod transfer;

mod host;
mod views;

pub use host::{PinnedHost, memcpy_to_device, memcpy_to_host};
pub use views::CudaLoan;
