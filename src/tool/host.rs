//! What a figure was measured on: read once, printed and stored with every result.

use std::fs;

use serde::Serialize;
use serde_json::Value;

use super::cpu::{self, CpuList};
use crate::sys::cpu::{cpuinfo_field, first_line, local_to};
use crate::sys::date;

/// The machine, as far as it tells.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Host {
    /// Model name of the CPU.
    pub cpu_model: Option<String>,
    /// CPU that the measuring thread was kept on.
    pub cpu: Option<u32>,
    /// Frequency governor of that CPU.
    pub cpu_governor: Option<String>,
    /// The CPU runs under a hypervisor, which interrupts at will: tails are its, too.
    pub virtual_machine: bool,
    /// Kernel release.
    pub kernel: Option<String>,
    /// The clock that took the times.
    pub clock: Option<String>,
    /// Product name of the GPU.
    pub gpu: Option<String>,
    /// Its CUDA ordinal.
    pub gpu_ordinal: Option<u64>,
    /// Its PCI address.
    pub pci: Option<String>,
    /// CPUs on its side of the machine.
    pub gpu_local_cpus: Option<String>,
    /// PCIe generation of its link.
    pub link_generation: Option<u32>,
    /// Lanes of its link.
    pub link_width: Option<u32>,
    /// Highest generation GPU and slot agree on.
    pub link_max_generation: Option<u32>,
    /// Most lanes GPU and slot agree on.
    pub link_max_width: Option<u32>,
    /// Size of the BAR1 aperture.
    pub bar1_bytes: Option<u64>,
    /// Version of the GPU driver.
    pub driver: Option<String>,
    /// Level of backend `rm`.
    pub rm_level: Option<String>,
    /// How the device memory was allocated.
    pub allocator: Option<String>,
    /// When the run began.
    pub time_utc: Option<String>,
}

impl Host {
    /// Reads what `/proc` tells.
    #[must_use]
    pub fn read() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            cpu_model: cpuinfo_field(&cpuinfo, "model name").map(str::to_owned),
            virtual_machine: cpuinfo_field(&cpuinfo, "flags").is_some_and(|f| f.split(' ').any(|f| f == "hypervisor")),
            kernel: first_line("/proc/sys/kernel/osrelease"),
            time_utc: date::now(),
            ..Self::default()
        }
    }

    /// Notes the CPU that the thread is kept on.
    pub fn set_cpu(&mut self, cpu: u32) {
        self.cpu = Some(cpu);
        self.cpu_governor = first_line(&format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"));
    }

    /// Every fact by name; empty text for what is not known.
    #[must_use]
    pub fn facts(&self) -> Vec<(String, String)> {
        let Ok(Value::Object(fields)) = serde_json::to_value(self) else { return Vec::new() };
        let text = |value| match value {
            Value::Null => String::new(),
            Value::String(text) => text,
            other => other.to_string(),
        };
        fields.into_iter().map(|(name, value)| (name, text(value))).collect()
    }
}

/// The CPUs next to a PCI device, as the kernel lists them.
#[must_use]
pub fn local_cpus(pci: &str) -> Option<CpuList> {
    local_to(pci)
}

/// The CPU to measure on unless the user names one: where the thread is, or the first CPU it may use next to the GPU.
#[must_use]
pub fn preferred_cpu(local: Option<&CpuList>) -> Option<u32> {
    let here = cpu::current();
    match (local, here) {
        (Some(local), Some(here)) if !local.contains(here) => {
            cpu::allowed().and_then(|allowed| local.first_in(&allowed)).or(Some(here))
        }
        _ => here,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_tells_its_kernel_and_cpu() {
        let host = Host::read();
        assert!(host.kernel.is_some() && host.cpu_model.is_some() && host.time_utc.is_some());
    }

    #[test]
    fn facts_are_the_fields_known_or_not() {
        let host = Host { cpu: Some(3), gpu: Some("H200".to_owned()), virtual_machine: true, ..Host::default() };
        let facts = host.facts();
        let fact = |name: &str| facts.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
        assert_eq!(fact("cpu"), Some("3"));
        assert_eq!(fact("gpu"), Some("H200"));
        assert_eq!(fact("virtual_machine"), Some("true"));
        assert_eq!(fact("driver"), Some(""), "unknown is empty, not absent");
    }

    #[test]
    fn without_a_list_the_thread_stays_where_it_is() {
        std::thread::spawn(|| {
            let here = cpu::current().unwrap();
            cpu::pin_to(here).unwrap();
            assert_eq!(preferred_cpu(None), Some(here));
            assert_eq!(preferred_cpu(Some(&CpuList::default())), Some(here), "no allowed CPU is local");
        })
        .join()
        .unwrap();
        assert_eq!(local_cpus("no such device"), None);
    }
}
