//! dma-buf: whether the driver could map memory by that road.

use crate::cuda::nvml::Nvml;
use crate::tool::doctor::finding::Finding;
use crate::tool::doctor::root::Root;
use crate::tool::doctor::scene::Scene;

const AREA: &str = "dma-buf";
/// From this CUDA driver on, the CPU can map what is exported: 13.3.
const MAPPABLE: (u32, u32) = (13, 3);

pub(super) fn check(root: &Root, scene: &Scene) -> Vec<Finding> {
    let Some(driver) = &scene.driver else { return Vec::new() };
    let cuda = if root.is_made_up() { None } else { Nvml::get().and_then(Nvml::cuda_version) };
    let export = if driver.is_open {
        "the open kernel modules export dma-bufs"
    } else {
        "the proprietary kernel modules export no dma-bufs"
    };
    let Some((major, minor)) = cuda else {
        let what = format!("{export}; which CUDA version the driver has is not known (NVML is not there)");
        return vec![Finding::ok(AREA, what).read("/proc/driver/nvidia/version")];
    };
    let can =
        if (major, minor) >= MAPPABLE { "can be mapped by the CPU" } else { "cannot be mapped by the CPU before 13.3" };
    let what =
        format!("{export}; with CUDA {major}.{minor} they {can}; this version of gdrcopy has no backend for them");
    vec![Finding::ok(AREA, what).read("/proc/driver/nvidia/version, nvmlSystemGetCudaDriverVersion")]
}
