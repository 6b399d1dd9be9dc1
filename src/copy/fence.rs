//! Fences for write-combined memory.
//!
//! They act for the calling core only. Write-combined memory is weakly ordered (Intel SDM volume 3, "Memory Ordering"):
//! lines leave their buffers in any order, and loads may overtake earlier stores. Each of these is an instruction and
//! a compiler barrier in one, so neither the processor nor the compiler moves a memory access across it in the
//! direction that it guards.

use std::arch::asm;

/// SFENCE: every earlier store of this core, non-temporal ones included, is visible before any later store.
///
/// The caller does not wait for the stores to arrive; a later *store* does. It also pushes out a partly filled line,
/// which may otherwise stay in its buffer for any length of time.
#[inline]
pub fn store() {
    // SAFETY: SFENCE is baseline on x86-64; it touches no register, no flag and no stack.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) }
}

/// MFENCE: every earlier load and store of this core is globally visible before any later load or store.
///
/// Unlike [`store`] it keeps a later load from being answered before earlier stores have left, and the caller waits.
#[inline]
pub fn full() {
    // SAFETY: MFENCE is baseline on x86-64; it touches no register, no flag and no stack.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) }
}

/// LFENCE: every earlier load of this core has its value before any later instruction starts.
///
/// Non-temporal loads are weakly ordered; this is what orders them against the loads that follow.
#[inline]
pub fn load() {
    // SAFETY: LFENCE is baseline on x86-64; it touches no register, no flag and no stack.
    unsafe { asm!("lfence", options(nostack, preserves_flags)) }
}
