//! What several checks look at: the GPUs, their driver, the container, who asks.

use std::path::{Path, PathBuf};

use super::root::{Root, User, parent};

/// PCI vendor of NVIDIA.
const NVIDIA: &str = "0x10de";
/// PCI classes of GPUs: display controller, VGA or 3D.
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// A GPU on the bus.
#[derive(Debug, Clone)]
pub(super) struct Gpu {
    pub(super) pci: String,
    /// Its folder in `/sys/devices`, links resolved.
    pub(super) folder: PathBuf,
    /// The kernel driver that has it.
    pub(super) bound: Option<String>,
    pub(super) model: Option<String>,
    /// Number of its device file.
    pub(super) minor: Option<u32>,
}

impl Gpu {
    /// The file of this name in the GPU's folder.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The folder of the port that the GPU hangs on.
    pub(super) fn port(&self) -> PathBuf {
        parent(&self.folder)
    }

    pub(super) fn name(&self) -> String {
        match &self.model {
            Some(model) => format!("{model} at {}", self.pci),
            None => format!("the GPU at {}", self.pci),
        }
    }
}

/// The NVIDIA driver in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Driver {
    pub(super) version: String,
    pub(super) is_open: bool,
    /// The line it says so in.
    pub(super) line: String,
}

impl Driver {
    /// From `/proc/driver/nvidia/version`.
    pub(super) fn of(text: &str) -> Option<Self> {
        let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
        let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
        let version = line.split_whitespace().find(is_version)?.to_owned();
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        Some(Self { version, is_open: line.contains("Open Kernel Module"), line })
    }

    /// The branch: the first number of the version.
    pub(super) fn branch(&self) -> u32 {
        self.version.split('.').next().and_then(|number| number.parse().ok()).unwrap_or(0)
    }
}

/// Everything that is read once.
#[derive(Debug, Clone)]
pub(super) struct Scene {
    pub(super) gpus: Vec<Gpu>,
    pub(super) driver: Option<Driver>,
    /// What shows that this is a container.
    pub(super) container: Option<String>,
    pub(super) user: User,
    pub(super) kernel: String,
}

impl Scene {
    pub(super) fn read(root: &Root) -> Self {
        Self {
            gpus: gpus(root),
            driver: root.text("/proc/driver/nvidia/version").and_then(|text| Driver::of(&text)),
            container: container(root),
            user: root.user(),
            kernel: root.kernel(),
        }
    }
}

fn gpus(root: &Root) -> Vec<Gpu> {
    let bus = Path::new("/sys/bus/pci/devices");
    let found = root.names(bus).into_iter().filter_map(|pci| {
        let folder = bus.join(&pci);
        let is = |name: &str, fits: &dyn Fn(&str) -> bool| root.line(folder.join(name)).is_some_and(|line| fits(&line));
        if !is("vendor", &|line| line == NVIDIA)
            || !is("class", &|line| GPU_CLASSES.iter().any(|c| line.starts_with(c)))
        {
            return None;
        }
        let information = root.text(format!("/proc/driver/nvidia/gpus/{pci}/information")).unwrap_or_default();
        let field = |name: &str| {
            information
                .lines()
                .find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
                .filter(|t| !t.is_empty())
        };
        Some(Gpu {
            bound: root.link_name(folder.join("driver")),
            model: field("Model:"),
            minor: field("Device Minor:").and_then(|number| number.parse().ok()),
            folder: root.real(&folder).unwrap_or(folder),
            pci,
        })
    });
    found.collect()
}

fn container(root: &Root) -> Option<String> {
    for file in ["/.dockerenv", "/run/.containerenv"] {
        if root.exists(file) {
            return Some(format!("{file} exists"));
        }
    }
    let groups = root.text("/proc/1/cgroup").unwrap_or_default();
    let sign = ["docker", "kubepods", "containerd", "libpod", "lxc"].into_iter().find(|sign| groups.contains(sign))?;
    Some(format!("/proc/1/cgroup names {sign}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_s_flavour_and_version() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)  Tue\nGCC version:  gcc version 12.2.0\n";
        let driver = Driver::of(text).unwrap();
        assert_eq!((driver.version.as_str(), driver.is_open, driver.branch()), ("580.159.04", true, 580));
        let text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n";
        let driver = Driver::of(text).unwrap();
        assert_eq!((driver.version.as_str(), driver.is_open, driver.branch()), ("535.183.01", false, 535));
        assert_eq!(Driver::of("nonsense"), None);
    }
}
