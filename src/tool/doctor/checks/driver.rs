//! The NVIDIA driver: in the kernel, its device files, its library.

use super::loader::Loader;
use super::modules::{Built, built, refusal};
use crate::tool::doctor::finding::Finding;
use crate::tool::doctor::root::{Node, Root};
use crate::tool::doctor::scene::{Driver, Scene};

const AREA: &str = "driver";
const VERSION: &str = "/proc/driver/nvidia/version";
/// What backend `rm` was written for, from here on.
const OLDEST: u32 = 535;

pub(super) fn check(root: &Root, scene: &Scene) -> Vec<Finding> {
    let mut findings = vec![gpus(scene)];
    match &scene.driver {
        None => findings.push(no_driver(root, scene)),
        Some(driver) => {
            findings.push(version(driver));
            findings.extend(nodes(root, scene));
            findings.push(library(root, scene, driver));
        }
    }
    findings
}

fn gpus(scene: &Scene) -> Finding {
    let read = "/sys/bus/pci/devices/*/vendor and class";
    match (scene.gpus.as_slice(), &scene.driver) {
        ([], Some(_)) => {
            let what = "the driver is loaded, but no NVIDIA GPU shows on the PCI bus";
            Finding::note("gpu", what, "mount /sys into the container or sandbox, so that link and BAR1 can be looked at")
        }
        ([], None) => Finding::problem(
            "gpu",
            "there is no NVIDIA GPU on the PCI bus",
            "check lspci; give a virtual machine its GPU; without one, GDRCOPY_BACKEND=emulated is there for trying things out",
        ),
        (gpus, _) => {
            let names: Vec<_> = gpus.iter().map(|gpu| gpu.name()).collect();
            Finding::ok("gpu", names.join("; "))
        }
    }
    .read(read)
}

fn no_driver(root: &Root, scene: &Scene) -> Finding {
    let bound = |name: &str| scene.gpus.iter().find(|gpu| gpu.bound.as_deref() == Some(name));
    let finding = if let Some(gpu) = bound("nouveau") {
        let remedy = "blacklist nouveau (echo blacklist nouveau > /etc/modprobe.d/no-nouveau.conf), rebuild the initramfs, \
                      install NVIDIA's driver 535 or newer, reboot";
        let what = format!("{} is driven by nouveau, which this library cannot use", gpu.name());
        Finding::problem(AREA, what, remedy).read(format!("/sys/bus/pci/devices/{}/driver", gpu.pci))
    } else if let Some(gpu) = bound("vfio-pci") {
        let what = format!("{} is reserved for a virtual machine (vfio-pci)", gpu.name());
        Finding::problem(AREA, what, "run inside that machine, or bind the GPU to the nvidia driver")
            .read(format!("/sys/bus/pci/devices/{}/driver", gpu.pci))
    } else {
        match built(root, scene, "nvidia") {
            Built::Here(path) => match refusal(root, &path) {
                Some(refusal) => {
                    let what = format!("the NVIDIA driver is installed and not loaded: {}", refusal.because);
                    Finding::problem(AREA, what, refusal.remedy).read(refusal.evidence)
                }
                None => Finding::problem(AREA, "the NVIDIA driver is installed and not loaded", "modprobe nvidia")
                    .read(path),
            },
            Built::Elsewhere(release) => {
                let what = format!("the NVIDIA driver was built for kernel {release}, and {} is running", scene.kernel);
                let remedy = "install this kernel's headers and run dkms autoinstall, or boot that kernel";
                Finding::problem(AREA, what, remedy).read(format!("/lib/modules/{release}/modules.dep"))
            }
            Built::Nowhere => Finding::problem(
                AREA,
                "no NVIDIA driver is loaded",
                "install NVIDIA's driver, 535 or newer, with its open kernel modules where the GPU has them",
            ),
        }
    };
    finding.read(format!("{VERSION} is not there"))
}

fn version(driver: &Driver) -> Finding {
    let flavour = if driver.is_open { "open" } else { "proprietary" };
    if driver.branch() < OLDEST {
        let what = format!("NVIDIA driver {} is older than backend rm knows", driver.version);
        return Finding::warning(AREA, what, format!("update to {OLDEST} or newer"))
            .read(format!("{VERSION}: {}", driver.line));
    }
    let what = format!("NVIDIA driver {}, {flavour} kernel modules", driver.version);
    Finding::ok(AREA, what).read(format!("{VERSION}: {}", driver.line))
}

/// The files through which CUDA, and backend `rm`, reach the GPU.
fn nodes(root: &Root, scene: &Scene) -> Vec<Finding> {
    let minors: Vec<u32> = scene.gpus.iter().filter_map(|gpu| gpu.minor).collect();
    let mut wanted = vec!["/dev/nvidiactl".to_owned(), "/dev/nvidia-uvm".to_owned()];
    wanted.extend(minors.iter().map(|minor| format!("/dev/nvidia{minor}")));
    let (mut missing, mut closed) = (Vec::new(), Vec::new());
    for path in &wanted {
        match root.node(path) {
            Node::Missing | Node::NotADevice => missing.push(path.clone()),
            Node::Char(access) if !scene.user.may_use(&access) => closed.push((path.clone(), access)),
            Node::Char(_) => {}
        }
    }
    // A container may have been given some GPUs and not others.
    let has_a_gpu = minors.is_empty() || minors.iter().any(|minor| !missing.contains(&format!("/dev/nvidia{minor}")));
    missing.retain(|path| !has_a_gpu || !path.trim_start_matches("/dev/nvidia").chars().all(|c| c.is_ascii_digit()));
    let mut findings = Vec::new();
    if !missing.is_empty() {
        let names = missing.join(", ");
        findings.push(match &scene.container {
            Some(sign) => {
                let devices: String = missing.iter().map(|path| format!(" --device {path}")).collect();
                Finding::problem(
                    AREA,
                    format!("the host's driver is loaded, but this container lacks {names}"),
                    format!("start it with --gpus all (Kubernetes: request nvidia.com/gpu), or pass{devices}"),
                )
                .read(sign.clone())
            }
            None => Finding::problem(
                AREA,
                format!("the driver is loaded, but {names} is not there"),
                "run nvidia-smi once as root, or nvidia-modprobe -u -c 0, which make the files",
            )
            .read(VERSION),
        });
    }
    for (path, access) in &closed {
        let group = if access.mode & 0o060 == 0o060 {
            format!("add this user to group {}", access.gid)
        } else {
            format!("chmod 0666 {path}")
        };
        findings.push(
            Finding::problem(AREA, format!("this user may not open {path}"), format!("{group}, or run as its owner"))
                .read(format!("{path}: {access}; own uid {}", scene.user.uid)),
        );
    }
    if findings.is_empty() {
        findings.push(Finding::ok(AREA, format!("{} are there for this user", wanted.join(", "))));
    }
    findings
}

/// CUDA's half of the driver, which has to be the kernel's very version.
fn library(root: &Root, scene: &Scene, driver: &Driver) -> Finding {
    let loader = Loader::read(root);
    let Some(found) = loader.find(root, "libcuda.so.1") else {
        let remedy = match &scene.container {
            Some(_) => "start the container with --gpus all, and NVIDIA_DRIVER_CAPABILITIES=compute,utility (or all)",
            None => {
                "install the driver's CUDA library (packages libcuda1, nvidia-driver-cuda or nvidia-compute-utils), then ldconfig"
            }
        };
        return Finding::problem(AREA, "libcuda.so.1 is not on the loader's path", remedy).read(loader.in_words());
    };
    let real = root.real(&found).unwrap_or(found);
    let name = real.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match name.strip_prefix("libcuda.so.").filter(|version| version.contains('.')) {
        // NVIDIA's forward-compatibility packages bring a newer one on purpose.
        Some(version) if version != driver.version && !real.iter().any(|part| part == "compat") => Finding::problem(
            AREA,
            format!("libcuda is of driver {version}, the kernel's half of {}", driver.version),
            "reboot or reload the nvidia modules after an update; in a container let the host's toolkit mount the libraries",
        )
        .read(format!("{} and {VERSION}", real.display())),
        _ => Finding::ok(AREA, format!("libcuda.so.1 is {}", real.display())),
    }
}
