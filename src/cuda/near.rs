//! Which of several places in device memory a kernel reaches soonest.
//!
//! A line is at home in one half of the L2 cache of a large GPU, and to poll one that is at home in the far half costs a round
//! trip 0.1 to 0.25 us more (H200). No rule tells the halves apart from outside, so a kernel measures it: see `near.cuh`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::kernel::{Module, Priority};
use crate::error::Result;
use crate::range::GpuAddr;
use crate::sys::num::u64_of;

/// Places that are compared: pages of one allocation of 64 KiB.
pub const PLACES: usize = 16;
/// How far apart they are: the half does not change within a page.
pub const STRIDE: usize = 4096;
/// Bytes of host memory that the kernel reports in.
pub const REPORT_BYTES: usize = 4 * PLACES;
/// How long it may take on a busy GPU.
const PATIENCE: Duration = Duration::from_secs(5);

/// A place: the cycles to it and back, and its offset.
pub type Place = (u32, usize);

/// Places in `memory` in the order in which the SM of the next small block reaches them, the nearest first; offsets are multiples
/// of [`STRIDE`]. `module` has the kernel `near`, which reports in host memory.
///
/// On a GPU that is otherwise idle, a single block runs on the same SM every time, so it is the SM of a kernel that is launched
/// next. Elsewhere the answer is as good as any.
///
/// # Errors
///
/// What CUDA reports.
///
/// # Safety
///
/// `memory` is device memory of the module's GPU, [`PLACES`] times [`STRIDE`] bytes of it. `report` is [`REPORT_BYTES`] of host
/// memory that nobody else uses, with its address for the GPU.
pub unsafe fn by_distance(module: &Module, memory: GpuAddr, report: (*mut u8, u64)) -> Result<[Place; PLACES]> {
    let kernel = module.kernel(c"near")?;
    let stream = module.stream(Priority::High)?;
    let words = [memory.raw(), u64_of(STRIDE), u64_of(PLACES), 0, report.1];
    // SAFETY: the parameter's layout is held to the kernel's by a test; the memory is the caller's duty, and freeing it waits
    // for the kernel where this gives up.
    unsafe { kernel.launch(&stream, 1, 32, &words)? };
    stream.finish(PATIENCE)?;
    let mut places = std::array::from_fn(|place| {
        // SAFETY: inside `report`, a multiple of 4; the kernel has ended.
        let cycles = unsafe { AtomicU32::from_ptr(report.0.wrapping_add(4 * place).cast()) }.load(Ordering::Acquire);
        (cycles, STRIDE * place)
    });
    places.sort_unstable();
    Ok(places)
}

/// Whether two places are in different halves: on an H200 330 and 540 cycles for each trip, and 310 to 350 within a half.
pub fn are_apart(near: Place, far: Place) -> bool {
    far.0 > near.0 + near.0 / 4
}

#[cfg(test)]
mod tests {

    #[test]
    fn the_parameter_has_the_kernels_size() {
        let push = [include_str!("../ptx/push.ptx"), include_str!("../ptx/push_bulk.ptx")];
        for ptx in push.into_iter().chain([include_str!("../ptx/answer.ptx")]) {
            assert_eq!(super::super::parameter_bytes(ptx, "near"), Some(5 * 8));
        }
    }
}
