//! The kernel on a GPU: `src/ptx/push.cu`, or with bulk copies `src/ptx/push_bulk.cu`.

use std::ffi::OsStr;
use std::path::Path;
use std::ptr::NonNull;
use std::time::Duration;

use super::bulk;
use super::engine::Launch;
use super::memory::HostMemory;
use crate::cuda::context::Device;
use crate::cuda::driver::Driver;
use crate::cuda::near;
use crate::cuda::pointer::{self, Block, Pools};
use crate::cuda::{Kernel, Module, Priority, Stream};
use crate::error::{Error, ErrorKind, Feature, Result};
use crate::range::GpuAddr;

pub(super) const PTX: &str = include_str!("../ptx/push.ptx");

/// Threads of the kernel `push`; a larger block is `push_wide`'s.
const NARROW: u32 = 512;

/// `CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT`.
const ATTRIBUTE_WATCHDOG: i32 = 17;
/// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`.
const ATTRIBUTE_MPS: i32 = 133;

/// Where the MPS control daemon listens unless `CUDA_MPS_PIPE_DIRECTORY` names another folder.
const MPS_PIPES: &str = "/tmp/nvidia-mps";

/// Whether the process runs under MPS. Drivers from before CUDA 12.3 do not know that attribute; then a daemon's pipe says so,
/// for every CUDA program that finds one goes by MPS.
fn is_under_mps(device: &Device) -> bool {
    device.attribute(ATTRIBUTE_MPS).map_or_else(
        || {
            let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").filter(|folder| !folder.is_empty());
            Path::new(folder.as_deref().unwrap_or(OsStr::new(MPS_PIPES))).join("control").exists()
        },
        |on| on != 0,
    )
}

/// Whether a kernel may stay on this GPU.
pub(super) fn check_gpu(ordinal: usize) -> Result<()> {
    let device = Device::new(Driver::get()?, ordinal)?;
    if is_under_mps(&device) {
        return Err(Error::new(
            "agent",
            ErrorKind::UnsupportedFeature(Feature::Mps),
            "the process runs under MPS, where a kernel that stays would hold up other processes",
        )
        .remedy("start the process without MPS (unset CUDA_MPS_PIPE_DIRECTORY, or stop the control daemon)"));
    }
    if device.attribute(ATTRIBUTE_WATCHDOG).is_some_and(|on| on != 0) {
        return Err(Error::new(
            "agent",
            ErrorKind::UnsupportedFeature(Feature::Operation),
            format!("GPU {ordinal} drives a display, whose watchdog ends kernels that stay"),
        )
        .remedy("use a GPU without a display"));
    }
    Ok(())
}

/// Whether the kernel can reach the memory at `addr`: a wrong address would end the whole context.
pub(super) fn check_address(ordinal: usize, addr: GpuAddr) -> Result<()> {
    let driver = Driver::get()?;
    let block = Block::of(driver, addr, Pools::Fine)?;
    let refuse = |cause: String, remedy| Err(Error::new("agent", ErrorKind::InvalidArgument, cause).remedy(remedy));
    if block.ordinal != ordinal {
        let cause = format!("{addr} is on GPU {}, the agent on GPU {ordinal}", block.ordinal);
        return refuse(cause, "start an agent for each GPU");
    }
    if !block.is_in(&Device::new(driver, ordinal)?.retain_primary()?) {
        let cause = format!("{addr} was allocated in another context than the GPU's primary one, where the agent is");
        return refuse(cause, "allocate in the primary context (as the CUDA runtime does), or with Session::alloc");
    }
    Ok(())
}

/// Where the kernel finds page-locked host memory.
pub(super) fn host_address(ordinal: usize, memory: *const u8, bytes: usize) -> Result<u64> {
    pointer::of_page_locked(ordinal, memory, bytes).map(GpuAddr::raw)
}

/// The loaded kernel and its stream.
pub(super) struct Gpu {
    kernel: Kernel<'static>,
    stream: Stream<'static>,
    threads: u32,
    /// Of shared memory, for bulk copies.
    bulk_bytes: u32,
    /// Declared after those that refer to it, so it goes last.
    module: Loaded,
}

/// A module at an address of its own, unloaded on drop.
struct Loaded(NonNull<Module>);

// SAFETY: an owned module, which is Send.
unsafe impl Send for Loaded {}

impl Loaded {
    fn get(&self) -> &'static Module {
        // SAFETY: lives until this value is dropped, which `Gpu` does after all that refers to it.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: made by Box::leak in `Gpu::new`, and dropped once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Gpu {
    /// `stages`: of bulk copies, where the GPU has these.
    pub(super) fn new(ordinal: usize, threads: u32, stages: u32) -> Result<Self> {
        let (module, has_bulk) = bulk::module(ordinal, stages)?;
        let module = Loaded(NonNull::from(Box::leak(Box::new(module))));
        let name = if threads <= NARROW { c"push" } else { c"push_wide" };
        let kernel = module.get().kernel(name)?;
        let bulk_bytes = if has_bulk { bulk::allow_stages(&kernel, stages) } else { 0 };
        let stream = module.get().stream(Priority::High)?;
        Ok(Self { kernel, stream, threads, bulk_bytes, module })
    }

    /// Where in `memory`, 64 KiB of it, the kernel should poll: offsets, the nearest first, one for each half of the L2 cache.
    /// `report` is not in use yet.
    pub(super) fn nearest(&self, memory: GpuAddr, report: &HostMemory) -> Result<Vec<usize>> {
        debug_assert!(report.len() >= near::REPORT_BYTES, "room for the report");
        // SAFETY: the caller's memory is 64 KiB of this GPU's; `report` is larger, and freeing it waits for kernels.
        let places = unsafe { near::by_distance(self.module.get(), memory, (report.ptr(), report.addr())) };
        let [nearest, .., farthest] = places?;
        let other = near::are_apart(nearest, farthest).then_some(farthest.1);
        Ok(std::iter::once(nearest.1).chain(other).collect())
    }

    pub(super) fn launch(&mut self, launch: Launch) -> Result<()> {
        let words = words(&launch);
        self.kernel.take_shared(if launch.bulk { self.bulk_bytes } else { 0 });
        // SAFETY: the kernel's one parameter is these words; ring, control lines and every address in a doorbell stay
        // allocated until `finish` has said that the kernel has ended, or for ever.
        unsafe { self.kernel.launch(&self.stream, 1, self.threads, &words) }
    }

    pub(super) fn bulk_bytes(&self) -> u32 {
        self.bulk_bytes
    }

    pub(super) fn has_ended(&self) -> Result<bool> {
        self.stream.is_idle()
    }

    pub(super) fn finish(&self, limit: Duration) -> Result<()> {
        self.stream.finish(limit)
    }
}

/// `struct Push`.
fn words(launch: &Launch) -> [u64; 9] {
    [
        launch.rings[0],
        launch.rings[1],
        0,
        launch.control,
        launch.idle_ns,
        launch.residency_ns,
        u64::from(launch.mask),
        u64::from(launch.next),
        u64::from(launch.generation),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameter_has_the_kernels_size() {
        let (rings, next, generation, bulk) = ([1, 8], u32::MAX, 7, true);
        let launch = Launch { rings, control: 2, idle_ns: 3, residency_ns: 4, mask: 5, next, generation, bulk };
        let words = words(&launch);
        assert_eq!(words, [1, 8, 0, 2, 3, 4, 5, u64::from(u32::MAX), 7]);
        for kernel in ["push", "push_wide"] {
            for ptx in [PTX, bulk::PTX] {
                assert_eq!(crate::cuda::parameter_bytes(ptx, kernel), Some(size_of_val(&words)), "{kernel}");
            }
        }
    }
}
