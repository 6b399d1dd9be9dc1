//! The CPU a measurement runs on: affinity, fences, cache flushes.

#![allow(unsafe_code, reason = "affinity system calls, fences and CLFLUSH")]

use std::arch::asm;
use std::fmt;
use std::io;
use std::mem;

use super::fail::Failure;
use crate::sys::num::usize_of;

/// Bytes of a cache line on every x86 CPU with CLFLUSH in use today.
const LINE: usize = 64;

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
        cpus.sort_unstable();
        cpus.dedup();
        Some(Self(cpus))
    }

    /// Whether `cpu` is one of them.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// The lowest CPU that is in both lists.
    #[must_use]
    pub fn first_in(&self, other: &Self) -> Option<u32> {
        self.0.iter().copied().find(|&cpu| other.contains(cpu))
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
#[must_use]
pub fn current() -> Option<u32> {
    // SAFETY: takes no argument.
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).ok()
}

/// The CPUs this thread may run on.
#[must_use]
pub fn allowed() -> Option<CpuList> {
    // SAFETY: a cpu_set_t is a bit array; all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: `set` is live and of the size given; 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } != 0 {
        return None;
    }
    // SAFETY: the macro reads one bit of `set`; the range ends at its size.
    let member = |cpu: &u32| unsafe { libc::CPU_ISSET(usize_of(u64::from(*cpu)), &set) };
    Some(CpuList((0..libc::CPU_SETSIZE.unsigned_abs()).filter(member).collect()))
}

fn set_affinity(cpus: &[u32]) -> io::Result<()> {
    // SAFETY: as in `allowed`.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for &cpu in cpus {
        // SAFETY: sets one bit of `set`, or panics by the slice's own bounds check; callers refuse such numbers.
        unsafe { libc::CPU_SET(usize_of(u64::from(cpu)), &mut set) };
    }
    // SAFETY: `set` is live and of the size given; 0 is the calling thread.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets the calling thread run on any of `cpus` but `taken`, or on all of them if that leaves none.
///
/// # Errors
///
/// What the system reports.
pub fn move_away(cpus: &CpuList, taken: u32) -> io::Result<()> {
    let others: Vec<u32> = cpus.0.iter().copied().filter(|&cpu| cpu != taken).collect();
    set_affinity(if others.is_empty() { &cpus.0 } else { &others })
}

/// Keeps the calling thread on `cpu`.
///
/// # Errors
///
/// The machine has no such CPU, or this process may not use it.
pub fn pin_to(cpu: u32) -> Result<(), Failure> {
    let pinned = if cpu < libc::CPU_SETSIZE.unsigned_abs() {
        set_affinity(&[cpu])
    } else {
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    };
    pinned.map_err(|error| {
        let usable = allowed().map_or_else(String::new, |list| format!("; this process may use CPUs {list}"));
        Failure::run(format!("cannot run on CPU {cpu} ({error}){usable}"))
    })
}

/// MFENCE: earlier stores have left the core's buffers, earlier loads are done.
#[inline(always)]
pub fn mfence() {
    // SAFETY: a fence; it touches no register and no memory.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) };
}

/// Puts every line of `bytes` out of all caches.
pub fn flush_lines(bytes: &[u8]) {
    // The slice need not start on a line: its last byte may lie on one more than the steps reach.
    bytes.iter().step_by(LINE).chain(bytes.last()).for_each(flush_line);
    mfence();
}

#[inline(always)]
fn flush_line(byte: &u8) {
    // SAFETY: CLFLUSH of a readable address changes no architectural state.
    unsafe { asm!("clflush [{}]", in(reg) byte, options(nostack, preserves_flags)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_notation_round_trips() {
        for text in ["0", "0-3", "0-3,8", "1,3,5-6", "0-15,32-47"] {
            assert_eq!(CpuList::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(CpuList::parse("3,1-2,2\n").unwrap().to_string(), "1-3");
        assert_eq!(CpuList::parse("").unwrap().to_string(), "");
    }

    #[test]
    fn garbage_is_no_list() {
        for text in ["x", "1-", "-1", "3-1", "0-4294967295", "1;2"] {
            assert_eq!(CpuList::parse(text), None, "{text}");
        }
    }

    #[test]
    fn first_in_both() {
        let local = CpuList::parse("8-15").unwrap();
        assert_eq!(local.first_in(&CpuList::parse("0-3,10-11").unwrap()), Some(10));
        assert_eq!(local.first_in(&CpuList::parse("0-3").unwrap()), None);
    }

    #[test]
    fn a_pinned_thread_stays() {
        std::thread::spawn(|| {
            let cpu = allowed().unwrap().0[0];
            pin_to(cpu).unwrap();
            assert_eq!(current(), Some(cpu));
            assert_eq!(allowed().unwrap(), CpuList(vec![cpu]));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_moves_away_where_it_can() {
        std::thread::spawn(|| {
            let all = allowed().unwrap();
            move_away(&all, all.0[0]).unwrap();
            let left = allowed().unwrap();
            assert_eq!(left.contains(all.0[0]), all.0.len() == 1, "{left}");
            move_away(&CpuList(vec![all.0[0]]), all.0[0]).unwrap();
            assert_eq!(allowed().unwrap(), CpuList(vec![all.0[0]]), "there is no other");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_cpu_that_is_not_there_is_named() {
        for cpu in [libc::CPU_SETSIZE.unsigned_abs() - 1, u32::MAX] {
            let line = pin_to(cpu).unwrap_err().to_string();
            assert!(line.contains(&format!("CPU {cpu} ")) && line.contains("may use CPUs"), "{line}");
        }
    }

    #[test]
    fn flushing_changes_nothing() {
        let bytes: Vec<u8> = (0..=255).collect();
        flush_lines(&bytes[3..201]);
        assert!(bytes.iter().copied().eq(0..=255));
        flush_lines(&[]);
    }
}
