//! How the GPU hangs on the machine: BAR1, link, IOMMU, and the CPUs next to it.

use std::path::Path;

use crate::cuda::nvml::Nvml;
use crate::tool::cpu::{self, CpuList};
use crate::tool::doctor::finding::Finding;
use crate::tool::doctor::root::Root;
use crate::tool::doctor::scene::{Gpu, Scene};
use crate::tool::flags::size_in_words;

/// What GPUs have without Resizable BAR.
const SMALL_BAR1: u64 = 256 << 20;

pub(super) fn check(root: &Root, scene: &Scene) -> Vec<Finding> {
    let mut findings = Vec::new();
    for gpu in &scene.gpus {
        findings.extend(bar1(root, gpu));
        findings.extend(link(root, gpu));
        findings.extend(near(root, gpu));
        findings.extend(iommu(root, gpu));
    }
    findings
}

/// Size of BAR1: the GPU's second region.
fn bar1_bytes(resource: &str) -> Option<u64> {
    let number = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let mut words = resource.lines().nth(1)?.split_whitespace();
    let (start, end) = (number(words.next()?)?, number(words.next()?)?);
    (end > start).then(|| end - start + 1)
}

/// The largest size that the GPU could have its BAR1 in: a bit for each power of two from 1 MiB on, in hexadecimal.
fn largest_bar1(resizes: &str) -> Option<u64> {
    let sizes = u64::from_str_radix(resizes.trim().trim_start_matches("0x"), 16).ok().filter(|sizes| *sizes != 0)?;
    1_u64.checked_shl(20 + sizes.ilog2())
}

fn bar1(root: &Root, gpu: &Gpu) -> Option<Finding> {
    let file = gpu.file("resource");
    let total = root.text(&file).and_then(|text| bar1_bytes(&text))?;
    let known = if root.is_made_up() { None } else { gpu.pci.parse().ok().and_then(|pci| Nvml::get()?.bar1(pci)) };
    let used = known.map_or_else(String::new, |bar1| format!(", {} in use", size_in_words(bar1.used_bytes)));
    let read = format!("{}: second line", file.display());
    let finding = if known.is_some_and(|bar1| bar1.used_bytes > bar1.total_bytes / 10 * 9) {
        let what = format!("BAR1 of {} is nearly full: {}{used}", gpu.name(), size_in_words(total));
        Finding::warning("bar1", what, "end or unmap what other processes have mapped; map smaller ranges")
    } else if total <= SMALL_BAR1 {
        let what = format!(
            "BAR1 of {} is small: {}{used}; no more can be mapped at one time",
            gpu.name(),
            size_in_words(total)
        );
        let larger =
            root.line(gpu.file("resource1_resize")).and_then(|text| largest_bar1(&text)).filter(|size| *size > total);
        let remedy = match larger {
            Some(size) => format!(
                "enable Resizable BAR and Above 4G Decoding in the firmware: the GPU offers up to {}",
                size_in_words(size)
            ),
            None => {
                "enable Resizable BAR and Above 4G Decoding in the firmware; on workstation GPUs switch the display \
                     mode off (NVIDIA's displaymodeselector)"
                    .to_owned()
            }
        };
        Finding::warning("bar1", what, remedy)
    } else {
        Finding::ok("bar1", format!("BAR1 of {}: {}{used}", gpu.name(), size_in_words(total)))
    };
    Some(finding.read(read))
}

/// A link: PCIe generation and lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pcie {
    generation: u32,
    width: u32,
}

/// The generation that has this rate, as `/sys` writes it: `16.0 GT/s PCIe`.
fn generation(speed: &str) -> Option<u32> {
    let rates = ["2.5", "5", "8", "16", "32", "64"];
    let rate = speed.split_whitespace().next()?.trim_end_matches(".0");
    (1..).zip(rates).find(|(_, known)| *known == rate).map(|(generation, _)| generation)
}

fn pcie(root: &Root, folder: &Path, which: &str) -> Option<Pcie> {
    let line = |what: &str| root.line(folder.join(format!("{which}_link_{what}")));
    let generation = generation(&line("speed")?)?;
    // 0 and 255 stand for what is not known, in virtual machines above all.
    let width = line("width")?.parse().ok().filter(|width| (1..=64).contains(width))?;
    Some(Pcie { generation, width })
}

fn link(root: &Root, gpu: &Gpu) -> Vec<Finding> {
    let (Some(now), Some(own)) = (pcie(root, &gpu.folder, "current"), pcie(root, &gpu.folder, "max")) else {
        return Vec::new();
    };
    let slot = pcie(root, &gpu.port(), "max");
    let offered = slot
        .map_or(own, |slot| Pcie { generation: own.generation.min(slot.generation), width: own.width.min(slot.width) });
    let words = |link: Pcie| format!("Gen{} x{}", link.generation, link.width);
    let read = format!(
        "{}: current_link {}, max_link {}; its port: {}",
        gpu.folder.display(),
        words(now),
        words(own),
        slot.map_or_else(|| "not stated".to_owned(), words)
    );
    let mut findings = Vec::new();
    if now.width < offered.width {
        let what =
            format!("{} runs on {} lanes of the {} that GPU and slot have", gpu.name(), now.width, offered.width);
        let remedy = "seat the GPU again and check riser, cable and the firmware's bifurcation of the slot";
        findings.push(Finding::warning("link", what, remedy));
    }
    if offered != own {
        let what = format!("the slot of {} offers {}, the GPU could do {}", gpu.name(), words(offered), words(own));
        findings.push(Finding::note("link", what, "move the GPU to a wider or newer slot where bandwidth matters"));
    }
    if now.generation < offered.generation {
        let what = format!("the link of {} is at Gen{} of {} now", gpu.name(), now.generation, offered.generation);
        let remedy = "none if the GPU is idle, which slows the link; look again while gdrcopy_copylat runs";
        findings.push(Finding::note("link", what, remedy));
    }
    if findings.is_empty() {
        findings
            .push(Finding::ok("link", format!("{} runs at {}, all that GPU and slot have", gpu.name(), words(now))));
    }
    findings.into_iter().map(|finding| finding.read(read.clone())).collect()
}

/// The CPU this runs on: the 39th field of `/proc/self/stat`, counted from behind the name, which may contain anything.
fn current_cpu(root: &Root) -> Option<u32> {
    if !root.is_made_up() {
        return cpu::current();
    }
    root.text("/proc/self/stat")?.rsplit(')').next()?.split_whitespace().nth(36)?.parse().ok()
}

fn near(root: &Root, gpu: &Gpu) -> Option<Finding> {
    let file = gpu.file("local_cpulist");
    let local = root.line(&file).and_then(|text| CpuList::parse(&text)).filter(|list| *list != CpuList::default())?;
    let here = current_cpu(root)?;
    let node = root.line(gpu.file("numa_node")).filter(|node| !node.starts_with('-'));
    let node = node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
    let read = format!("{}: {local}{node}; CPU now: {here}", file.display());
    let finding = if local.contains(here) {
        Finding::ok("numa", format!("CPU {here} is next to {} (CPUs {local}{node})", gpu.name()))
    } else {
        let allowed = root.text("/proc/self/status").and_then(|status| {
            CpuList::parse(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)
        });
        let what = format!("this runs on CPU {here}, and {} is next to CPUs {local}{node}", gpu.name());
        match allowed {
            Some(allowed) if local.first_in(&allowed).is_none() => {
                let remedy =
                    format!("give this process or container CPUs of {local} (taskset, cpuset); it may use {allowed}");
                Finding::warning("numa", what, remedy)
            }
            _ => Finding::note(
                "numa",
                what,
                format!("start programs with taskset -c {local}: access across sockets is slower"),
            ),
        }
    };
    Some(finding.read(read))
}

fn iommu(root: &Root, gpu: &Gpu) -> Option<Finding> {
    let file = gpu.file("iommu_group/type");
    let finding = match root.line(&file) {
        Some(kind) => Finding::ok(
            "iommu",
            format!("the IOMMU treats {} as {kind}; CPU access through BAR1 does not pass it", gpu.name()),
        ),
        None if root.names("/sys/class/iommu").is_empty() => Finding::ok("iommu", "no IOMMU is in use"),
        None => Finding::ok("iommu", format!("an IOMMU is in use, {} in no group of it", gpu.name())),
    };
    Some(finding.read(format!("{}, /sys/class/iommu", file.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_and_sizes() {
        let resource = "0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\n\
                        0x0000380000000000 0x0000383fffffffff 0x000000000014220c\n\
                        0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(bar1_bytes(resource), Some(256 << 30));
        assert_eq!(bar1_bytes("0x0 0x0 0x0\n0x0 0x0 0x0\n"), None);
        assert_eq!(bar1_bytes(""), None);
        assert_eq!(largest_bar1("000000000001ffc0\n"), Some(64 << 30));
        assert_eq!(largest_bar1("0"), None);
    }

    #[test]
    fn generations() {
        let table =
            [("2.5 GT/s PCIe", 1), ("8.0 GT/s PCIe", 3), ("16.0 GT/s PCIe", 4), ("32.0 GT/s PCIe", 5), ("64 GT/s", 6)];
        for (speed, wanted) in table {
            assert_eq!(generation(speed), Some(wanted), "{speed}");
        }
        assert_eq!(generation("Unknown"), None);
    }
}
