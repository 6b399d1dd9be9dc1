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

use context::Device;
use driver::Driver;
use memory::CudaAllocation;
use nvml::Nvml;

use crate::backend::{Allocation, Allocator};
use crate::error::Result;
use crate::gpu::GpuInfo;

mod host;
mod kernel;
#[doc(hidden)]
pub mod near;
mod views;

pub use host::{PinnedHost, memcpy_to_device, memcpy_to_host};
#[doc(hidden)]
pub use kernel::{Kernel, Module, Priority, Stream, parameter_bytes};
pub use views::CudaLoan;

/// The GPUs that CUDA shows this process.
pub(crate) fn gpus() -> Result<Vec<GpuInfo>> {
    let driver = Driver::get()?;
    let nvml = Nvml::get();
    (0..Device::count(driver)?)
        .map(|ordinal| {
            let device = Device::new(driver, ordinal)?;
            let pci = device.pci()?;
            Ok(GpuInfo {
                ordinal,
                name: device.name()?,
                pci: Some(pci),
                total_bytes: device.bytes()?,
                bar1: nvml.and_then(|nvml| nvml.bar1(pci)),
                link: nvml.and_then(|nvml| nvml.link(pci)),
                driver: nvml.and_then(Nvml::driver_version),
            })
        })
        .collect()
}

/// Device memory on a GPU, or on that of the calling thread's context.
pub(crate) fn allocate(ordinal: Option<usize>, bytes: usize, how: Allocator) -> Result<Box<dyn Allocation>> {
    Ok(Box::new(CudaAllocation::new(device(ordinal)?, bytes, how)?))
}

/// The GPU with this ordinal, or that of the calling thread's context.
pub(crate) fn device(ordinal: Option<usize>) -> Result<Device> {
    let driver = Driver::get()?;
    match ordinal {
        Some(ordinal) => Device::new(driver, ordinal),
        None => Device::current_or_first(driver),
    }
}
