//! Bulk copies: the kernel for GPUs that have them, and the shared memory that they go through. `src/ptx/bulk.cuh`.

use super::gpu;
use crate::cuda::context::Device;
use crate::cuda::driver::Driver;
use crate::cuda::{Kernel, Module};
use crate::error::Result;

pub(super) const PTX: &str = include_str!("../ptx/push_bulk.ptx");

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`, and the first that has bulk copies.
const ATTRIBUTE_CAPABILITY: i32 = 75;
const HOPPER: i32 = 9;

/// Bytes of a stage.
const CHUNK: u32 = 16 << 10;
/// What the stages start at a multiple of.
const ALIGN: u32 = 128;
/// Stages if nobody asks for another number: 160 KiB. Three of them wait for stores; the others keep 112 KiB under way, and the
/// link of an H200 needs 51 GB/s times 1.9 us, 97 KiB.
pub(super) const STAGES: u32 = 10;
/// With as many, more is under way than 256 threads have by their own loads, 32 KiB.
const FEWEST: u32 = 5;

/// The kernel's module, and whether it is the one with bulk copies.
///
/// A driver that does not take that one, or a GPU that lacks bulk copies, gets the common one. So does who asks for no stages.
pub(super) fn module(ordinal: usize, stages: u32) -> Result<(Module, bool)> {
    let capability = Device::new(Driver::get()?, ordinal)?.attribute(ATTRIBUTE_CAPABILITY);
    if stages > 0 && capability.is_some_and(|major| major >= HOPPER) {
        match Module::load(ordinal, PTX) {
            Ok(module) => return Ok((module, true)),
            Err(error) => tracing::debug!(%error, "the agent fetches without bulk copies"),
        }
    }
    Ok((Module::load(ordinal, gpu::PTX)?, false))
}

/// Allows the kernel shared memory for so many stages, or as many as there is room for: bytes. Launched with none it copies
/// as the common one does.
pub(super) fn allow_stages(kernel: &Kernel<'_>, stages: u32) -> u32 {
    let allowed = kernel.most_shared().and_then(|room| {
        let stages = stages.min(room.saturating_sub(ALIGN) / CHUNK);
        let bytes = if stages < FEWEST { 0 } else { stages * CHUNK + ALIGN };
        kernel.allow_shared(bytes).map(|()| bytes)
    });
    allowed.unwrap_or_else(|error| {
        tracing::debug!(%error, "the agent fetches without bulk copies");
        0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_has_chunks_of_the_same_size() {
        let kernel = include_str!("../ptx/bulk.cuh");
        assert!(kernel.contains(&format!(" CHUNK = {CHUNK},")));
        assert!(kernel.contains(&format!("extern __shared__ __align__({ALIGN}) ")));
    }

    #[test]
    fn both_kernels_have_the_same_entries() {
        let entries = |ptx: &str| {
            let mut names: Vec<_> =
                ptx.lines().filter_map(|line| line.strip_prefix(".visible .entry ").map(str::to_owned)).collect();
            names.sort();
            names
        };
        assert_eq!(entries(PTX), entries(gpu::PTX));
        assert!(entries(PTX).len() >= 3);
        assert!(PTX.contains("cp.async.bulk") && !gpu::PTX.contains("cp.async.bulk"));
    }
}
