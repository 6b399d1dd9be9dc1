//! Which CPUs there are, which of them a thread may use, and which are near a device.

#![cfg_attr(not(feature = "tools"), allow(dead_code, reason = "the tools ask for more than the library does"))]

use std::fmt;
use std::fs;
use std::io;
use std::mem;
use std::os::unix::thread::JoinHandleExt;
use std::str::FromStr;
use std::thread::JoinHandle;

use super::num::usize_of;
use crate::error::{Error, ErrorKind, Result};

/// A set of CPUs, in the notation of `/sys`: `0-3,8`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuList(Vec<u32>);

impl CpuList {
    /// Reads the kernel's notation; `None` for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut cpus = Vec::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
            if first > last || last >= libc::CPU_SETSIZE.unsigned_abs() {
                return None;
            }
            cpus.extend(first..=last);
        }
        Some(cpus.into_iter().collect())
    }

    /// Whether `cpu` is one of them.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// The lowest CPU that is in both lists.
    #[must_use]
    pub fn first_in(&self, other: &Self) -> Option<u32> {
        self.iter().find(|&cpu| other.contains(cpu))
    }

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        let mut cpus: Vec<_> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }
}

impl FromStr for CpuList {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text).ok_or_else(|| {
            Error::new("parse", ErrorKind::InvalidArgument, format!("'{text}' is not a list of CPUs"))
                .remedy("write it as 0-3,8")
        })
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if n == 0 { "" } else { "," };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

/// The CPU this thread is on at the moment.
pub(crate) fn current() -> Option<u32> {
    // SAFETY: takes no argument.
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).ok()
}

/// The CPUs this thread may run on.
pub(crate) fn allowed() -> Option<CpuList> {
    // SAFETY: a cpu_set_t is a bit array; all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: `set` is live and of the size given; 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } != 0 {
        return None;
    }
    // SAFETY: the macro reads one bit of `set`; the range ends at its size.
    let member = |cpu: &u32| unsafe { libc::CPU_ISSET(usize_of(u64::from(*cpu)), &set) };
    Some((0..libc::CPU_SETSIZE.unsigned_abs()).filter(member).collect())
}

/// Keeps the calling thread on `cpu`, as far as its cpuset has it.
pub(crate) fn pin_to(cpu: u32) -> io::Result<()> {
    keep_on(&[cpu].into_iter().collect())
}

/// These CPUs as the system wants them; `EINVAL` for a number that is none.
fn set_of(cpus: &CpuList) -> io::Result<libc::cpu_set_t> {
    // SAFETY: as in `allowed`.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for cpu in cpus.iter() {
        if cpu >= libc::CPU_SETSIZE.unsigned_abs() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: sets one bit of `set`, whose size was checked above.
        unsafe { libc::CPU_SET(usize_of(u64::from(cpu)), &mut set) };
    }
    Ok(set)
}

/// Keeps the calling thread on these CPUs, as far as its cpuset has them.
pub(crate) fn keep_on(cpus: &CpuList) -> io::Result<()> {
    let set = set_of(cpus)?;
    // SAFETY: `set` is live and of the size given; 0 is the calling thread.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The first line of a file in `/sys` or `/proc`, unless it is empty.
pub(crate) fn first_line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}

/// The CPUs next to a PCI device, as the kernel lists them.
pub(crate) fn local_to(pci: &str) -> Option<CpuList> {
    let list = first_line(&format!("/sys/bus/pci/devices/{pci}/local_cpulist"))?;
    CpuList::parse(&list).filter(|list| !list.is_empty())
}

/// The CPUs of the physical core that `cpu` belongs to; itself alone where the kernel does not tell.
pub(crate) fn siblings(cpu: u32) -> CpuList {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let list = first_line(&path).and_then(|list| CpuList::parse(&list));
    list.filter(|list| list.contains(cpu)).unwrap_or_else(|| CpuList(vec![cpu]))
}

/// Keeps another thread, whose handle shows that it has been neither joined nor detached, on `cpu`.
pub(crate) fn pin_thread<T>(thread: &JoinHandle<T>, cpu: u32) -> io::Result<()> {
    let set = set_of(&[cpu].into_iter().collect())?;
    // SAFETY: `set` is live and of the size given, and the handle stands for a thread that can still be joined.
    match unsafe { libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// A field of the first processor in `/proc/cpuinfo`.
pub(crate) fn cpuinfo_field<'a>(cpuinfo: &'a str, name: &str) -> Option<&'a str> {
    cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The model name of the CPU.
pub(crate) fn model() -> Option<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").ok()?;
    cpuinfo_field(&cpuinfo, "model name").map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_notation_round_trips() {
        for text in ["0", "0-3", "0-3,8", "1,3,5-6", "0-15,32-47"] {
            assert_eq!(text.parse::<CpuList>().unwrap().to_string(), text);
        }
        assert_eq!(CpuList::parse("3,1-2,2\n").unwrap().to_string(), "1-3");
        assert_eq!(CpuList::parse("").unwrap().to_string(), "");
    }

    #[test]
    fn garbage_is_no_list() {
        for text in ["x", "1-", "-1", "3-1", "0-4294967295", "1;2"] {
            assert_eq!(CpuList::parse(text), None, "{text}");
        }
        let error = "0;1".parse::<CpuList>().unwrap_err().to_string();
        assert_eq!(error, "parse: '0;1' is not a list of CPUs; write it as 0-3,8");
    }

    #[test]
    fn first_in_both() {
        let local = CpuList::parse("8-15").unwrap();
        assert_eq!(local.first_in(&CpuList::parse("0-3,10-11").unwrap()), Some(10));
        assert_eq!(local.first_in(&CpuList::parse("0-3").unwrap()), None);
    }

    #[test]
    fn a_cpu_is_its_own_sibling() {
        for cpu in allowed().unwrap().iter() {
            assert!(siblings(cpu).contains(cpu));
        }
        assert_eq!(siblings(u32::MAX), CpuList(vec![u32::MAX]));
    }

    #[test]
    fn a_device_that_is_not_there_has_no_neighbours() {
        assert_eq!(local_to("no such device"), None);
    }

    #[test]
    fn cpuinfo() {
        let text =
            "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: fpu hypervisor\n\nmodel name\t: Other\n";
        assert_eq!(cpuinfo_field(text, "model name"), Some("Some CPU @ 2.0GHz"));
        assert_eq!(cpuinfo_field(text, "flags"), Some("fpu hypervisor"));
        assert_eq!(cpuinfo_field(text, "model"), None);
    }
}
