//! One leaf per instruction set, and the detection that the standard library lacks.
//!
//! The leaves are inline assembly throughout: device memory is touched by the very instructions that are written here.
//! None leaves the upper halves of `ymm0`-`ymm15` dirty, so code that uses SSE afterwards pays nothing: SSE4.1 does not
//! reach them, AVX2 ends with VZEROUPPER, AVX-512 keeps to `zmm16`-`zmm31`, which SSE cannot name.

mod avx2;
mod avx512;
mod movdir64b;
mod sse41;

use std::arch::x86_64::{__cpuid_count, CpuidResult};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

pub(super) use avx2::Avx2;
pub(super) use avx512::Avx512;
pub(super) use movdir64b::Movdir64b;
pub(super) use sse41::Sse41;

use super::kernel::Leaf;
use super::plan::LINE_BYTES;

/// CPUID. Every x86-64 has it; leaves past the maximum return meaningless values, hence `None`.
fn cpuid(leaf: u32) -> Option<CpuidResult> {
    #[allow(unused_unsafe, reason = "the intrinsic is unsafe in the oldest supported compiler, and safe in newer ones")]
    // SAFETY: x86-64 has the instruction, and leaf 0 always exists.
    let highest = unsafe { __cpuid_count(0, 0) }.eax;
    #[allow(unused_unsafe, reason = "as above")]
    // SAFETY: as above; a leaf that does not exist is not asked for.
    (leaf <= highest).then(|| unsafe { __cpuid_count(leaf, 0) })
}

/// Whether the processor calls itself `GenuineIntel`.
pub(super) fn vendor_is_intel() -> bool {
    let Some(leaf) = cpuid(0) else { return false };
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

/// CPUID leaf 7, sub-leaf 0, ECX bit 28 (Intel SDM volume 2, CPUID). The instruction uses general-purpose registers
/// only, so there is no operating system state to ask about.
pub(super) fn has_movdir64b() -> bool {
    // CPUID traps to the hypervisor in a virtual machine: ask once.
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| cpuid(7).is_some_and(|leaf| leaf.ecx & (1 << 28) != 0))
}

/// A line on the stack, for instructions that move whole lines where only a part may be touched.
#[repr(align(64))]
struct Line([MaybeUninit<u8>; LINE_BYTES]);

impl Line {
    const UNUSED: Self = Self([MaybeUninit::uninit(); LINE_BYTES]);

    #[inline(always)]
    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    #[inline(always)]
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    /// Sets `len` bytes from lane `skip` on.
    ///
    /// # Safety
    ///
    /// `len` bytes at `src` are readable, and `skip + len <= 64`.
    #[inline(always)]
    unsafe fn keep(&mut self, skip: usize, src: *const u8, len: usize) {
        // SAFETY: inside the line by contract, and this line is exclusively borrowed, so it does not overlap `src`.
        unsafe { ptr::copy_nonoverlapping(src, self.as_mut_ptr().wrapping_add(skip), len) };
    }

    /// Copies out `len` bytes from lane `skip` on.
    ///
    /// # Safety
    ///
    /// Those lanes have been set, `len` bytes at `dst` are writable, and `skip + len <= 64`.
    #[inline(always)]
    unsafe fn give(&self, skip: usize, dst: *mut u8, len: usize) {
        // SAFETY: inside the line by contract; this line is on our stack, so it does not overlap `dst`.
        unsafe { ptr::copy_nonoverlapping(self.as_ptr().wrapping_add(skip), dst, len) };
    }

    /// [`Leaf::load_part`] for leaves without masks: the whole line into a [`Line`], the part from there.
    ///
    /// # Safety
    ///
    /// As for [`Leaf::load_part`].
    #[inline(always)]
    unsafe fn load_part<L: Leaf>(dst: *mut u8, src: *const u8, len: usize) {
        let skip = src.addr() % LINE_BYTES;
        let mut line = Self::UNUSED;
        // SAFETY: the line around the part is loadable by contract, and has room here.
        unsafe { L::load_lines(line.as_mut_ptr(), src.wrapping_sub(skip), 1) };
        // SAFETY: the whole line has just been set; a part lies inside one line; the rest is the contract.
        unsafe { line.give(skip, dst, len) };
    }
}
