//! What a process and its GPU have in use.

use std::fs;

use cudarc::driver::sys;

use crate::support::check;

/// What must not grow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InUse {
    descriptors: usize,
    resident_kib: usize,
    areas: usize,
    gpu_kib: usize,
}

impl InUse {
    /// Of this process, and of the GPU of its current context, whoever uses that.
    pub(crate) fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        let (mut free, mut total) = (0, 0);
        unsafe { check(sys::cuMemGetInfo_v2(&mut free, &mut total)) };
        Self {
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            resident_kib: resident.split_whitespace().nth(1).unwrap().parse().unwrap(),
            areas: fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
            gpu_kib: (total - free) >> 10,
        }
    }

    /// Fails where something is held that was not held `before`. Allocators keep a little, whatever the number of cycles.
    pub(crate) fn assert_no_more_than(&self, before: &Self) {
        println!("in use before {before:?}, after {self:?}");
        assert!(self.descriptors <= before.descriptors, "open files");
        assert!(self.resident_kib <= before.resident_kib + (8 << 10), "memory of the process");
        assert!(self.areas <= before.areas + 16, "pieces of address space");
        assert!(self.gpu_kib <= before.gpu_kib + (4 << 10), "memory of the GPU");
    }
}
