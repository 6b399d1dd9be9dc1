//! Importing and mapping on every device that Vulkan shows, a software one above all. The memory comes from Vulkan's own
//! export: what takes it from CUDA is for the suites that need a GPU.

use std::io::Write as _;
use std::os::fd::{FromRawFd, OwnedFd};
use std::slice;

use ash::vk;

use super::*;
use crate::sys::num::usize_of;
use crate::sys::process::in_forked_child;
use crate::sys::window::PAGE;

/// Set to `software-vulkan` where a software driver is known to be there: nothing may be skipped then.
const REQUIRE: &str = "GDRCOPY_TEST_REQUIRE";

const BYTES: usize = 4 << 20;

#[track_caller]
fn skip(name: &str, error: &Error) {
    let required = std::env::var(REQUIRE).is_ok_and(|name| name == "software-vulkan");
    assert!(!required, "{name}: {error}");
    // Past the harness, which swallows what a passing test prints.
    let _ = writeln!(std::io::stderr(), "SKIPPED vulkan, {name}: {error}");
}

/// Runs `check` on every device that can import memory.
fn on_each_gpu(check: impl Fn(&Arc<Gpu>)) {
    let instance = match Loader::open().and_then(|loader| Instance::new(&loader)) {
        Ok(instance) => instance,
        Err(error) => return skip("all devices", &error),
    };
    let devices = instance.devices().unwrap();
    if devices.is_empty() {
        skip("all devices", &choose::device(&[], [0; 16]).unwrap_err());
    }
    for (physical, identity) in devices {
        match Gpu::open(&instance, physical, &identity.name) {
            Ok(gpu) => check(&gpu),
            Err(error) => skip(&identity.name, &error),
        }
    }
}

/// Memory that Vulkan allocates and exports.
struct Exporter<'a> {
    gpu: &'a Gpu,
    memory: vk::DeviceMemory,
}

impl<'a> Exporter<'a> {
    fn new(gpu: &'a Gpu, bytes: usize) -> Self {
        let mut export =
            vk::ExportMemoryAllocateInfo::default().handle_types(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(u64_of(bytes))
            .memory_type_index(gpu.visible.index)
            .push_next(&mut export);
        // SAFETY: the device lives, and the chain outlives the call.
        let memory = unsafe { gpu.device.allocate_memory(&info, None) }.unwrap();
        Self { gpu, memory }
    }

    fn fd(&self) -> OwnedFd {
        let calls = ash::khr::external_memory_fd::Device::new(&self.gpu.instance.raw, &self.gpu.device);
        let info = vk::MemoryGetFdInfoKHR::default()
            .memory(self.memory)
            .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        // SAFETY: exportable memory of this device.
        let fd = unsafe { calls.get_memory_fd(&info) }.unwrap();
        // SAFETY: a fresh descriptor that the call made for us.
        unsafe { OwnedFd::from_raw_fd(fd) }
    }

    fn import(&self, bytes: usize) -> Arc<Objects> {
        Arc::new(Objects::import(&self.gpu_arc(), [Ok((self.fd(), bytes))].into_iter()).unwrap())
    }

    fn gpu_arc(&self) -> Arc<Gpu> {
        // SAFETY: every Gpu of these tests is in an Arc, of which this adds a count.
        unsafe { Arc::increment_strong_count(self.gpu) };
        // SAFETY: the count just added.
        unsafe { Arc::from_raw(self.gpu) }
    }
}

impl Drop for Exporter<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once, never mapped.
        unsafe { self.gpu.device.free_memory(self.memory, None) };
    }
}

/// The bytes of a share. Nothing else writes while they are looked at.
fn bytes_of(share: &Share) -> &mut [u8] {
    // SAFETY: the share is mapped, readable and writable, for as long as it lives.
    unsafe { slice::from_raw_parts_mut(share.at(0).as_ptr(), share.bytes()) }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
