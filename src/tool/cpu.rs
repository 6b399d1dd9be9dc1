//! The CPU a measurement runs on: affinity, fences, cache flushes.

#![allow(unsafe_code, reason = "fences and CLFLUSH")]

use std::arch::asm;
use std::io;

use super::fail::Failure;
pub use crate::CpuList;
use crate::sys::cpu as system;

/// Bytes of a cache line on every x86 CPU with CLFLUSH in use today.
const LINE: usize = 64;

/// The CPU this thread is on at the moment.
#[must_use]
pub fn current() -> Option<u32> {
    system::current()
}

/// The CPUs this thread may run on.
#[must_use]
pub fn allowed() -> Option<CpuList> {
    system::allowed()
}

/// Moves the calling thread to `cpu`, and leaves it free to run, and to start threads, where it could before.
///
/// # Errors
///
/// What the system reports.
pub fn visit(cpu: u32) -> io::Result<()> {
    let free = allowed();
    system::pin_to(cpu)?;
    free.map_or(Ok(()), |free| system::keep_on(&free))
}

/// Lets the calling thread run on any of `cpus` but `taken`, or on all of them if that leaves none.
///
/// # Errors
///
/// What the system reports.
pub fn move_away(cpus: &CpuList, taken: u32) -> io::Result<()> {
    let others: CpuList = cpus.iter().filter(|&cpu| cpu != taken).collect();
    system::keep_on(if others.is_empty() { cpus } else { &others })
}

/// Keeps the calling thread on `cpu`.
///
/// # Errors
///
/// The machine has no such CPU, or this process may not use it.
pub fn pin_to(cpu: u32) -> Result<(), Failure> {
    system::pin_to(cpu).map_err(|error| {
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
    fn a_pinned_thread_stays() {
        std::thread::spawn(|| {
            let cpu = allowed().unwrap().iter().next().unwrap();
            pin_to(cpu).unwrap();
            assert_eq!(current(), Some(cpu));
            assert_eq!(allowed().unwrap(), CpuList::from_iter([cpu]));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_moves_away_where_it_can() {
        std::thread::spawn(|| {
            let all = allowed().unwrap();
            let first: CpuList = all.iter().take(1).collect();
            let taken = first.iter().next().unwrap();
            move_away(&all, taken).unwrap();
            let left = allowed().unwrap();
            assert_eq!(left.contains(taken), all.len() == 1, "{left}");
            move_away(&first, taken).unwrap();
            assert_eq!(allowed().unwrap(), first, "there is no other");
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

    #[test]
    fn a_visit_leaves_the_thread_free() {
        std::thread::spawn(|| {
            let free = allowed().unwrap();
            let last = free.iter().last().unwrap();
            visit(last).unwrap();
            assert_eq!(allowed().unwrap(), free);
            assert!(visit(u32::MAX).is_err());
            assert_eq!(allowed().unwrap(), free);
        })
        .join()
        .unwrap();
    }
}
