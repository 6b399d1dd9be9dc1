//! The NVIDIA driver, its files and its library.

use super::broken;
use crate::tree::{KERNEL, LIBS, PCI, Tree};

#[test]
fn no_driver() {
    let remedy = "install NVIDIA's driver, 535 or newer";
    broken(|tree| tree.no_driver(), "problem", "driver", &["no NVIDIA driver is loaded", remedy]);
}

#[test]
fn nouveau_has_the_gpu() {
    let breaking = |tree: &mut Tree| {
        tree.no_driver();
        let driver = format!("sys/devices/pci0000:00/0000:00:01.0/{PCI}/driver");
        tree.link(&driver, "../../../../bus/pci/drivers/nouveau");
    };
    broken(breaking, "problem", "driver", &["driven by nouveau", "echo blacklist nouveau"]);
}

#[test]
fn a_driver_for_another_kernel() {
    let breaking = |tree: &mut Tree| {
        tree.no_driver();
        tree.built("6.1.0-old", "nvidia");
    };
    broken(
        breaking,
        "problem",
        "driver",
        &["built for kernel 6.1.0-old, and 6.12.0-test is running", "dkms autoinstall"],
    );
}

#[test]
fn a_driver_that_is_not_loaded() {
    let breaking = |tree: &mut Tree| {
        tree.no_driver();
        tree.built(KERNEL, "nvidia");
    };
    broken(breaking, "problem", "driver", &["is installed and not loaded", "modprobe nvidia"]);
}

#[test]
fn an_old_driver() {
    let breaking = |tree: &mut Tree| {
        tree.driver("470.57.02");
        tree.cuda("470.57.02");
    };
    broken(breaking, "warning", "driver", &["470.57.02 is older than backend rm knows", "update to 535"]);
}

#[test]
fn two_halves_of_a_driver() {
    let remedy = "reboot or reload the nvidia modules";
    broken(|tree| tree.cuda("575.51.03"), "problem", "driver", &["libcuda is of driver 575.51.03", remedy]);
}

#[test]
fn no_cuda_library() {
    let breaking = |tree: &mut Tree| tree.remove(&format!("{LIBS}/libcuda.so.1"));
    broken(breaking, "problem", "driver", &["libcuda.so.1 is not on the loader's path", "libcuda1"]);
}

#[test]
fn driver_without_its_files() {
    let breaking = |tree: &mut Tree| tree.remove("dev/nvidia-uvm");
    broken(breaking, "problem", "driver", &["/dev/nvidia-uvm is not there", "nvidia-modprobe -u -c 0"]);
}

#[test]
fn a_gpu_closed_to_this_user() {
    let breaking = |tree: &mut Tree| tree.node("nvidia0", 195, 0, 0o660);
    broken(breaking, "problem", "driver", &["may not open /dev/nvidia0", "add this user to group 44"]);
}

#[test]
fn a_container_without_the_gpu() {
    let breaking = |tree: &mut Tree| {
        tree.container();
        for name in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
            tree.remove(&format!("dev/{name}"));
        }
    };
    let parts = [
        "this container lacks /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0",
        "--gpus all",
        "nvidia.com/gpu",
        "--device /dev/nvidiactl",
        "/.dockerenv exists",
    ];
    broken(breaking, "problem", "driver", &parts);
}
