//! MOVDIR64B: a whole line by one instruction that is one 64-byte write by architecture.
//!
//! A direct store reads 64 bytes of memory and writes them, past the caches, as one write (Intel SDM volume 2,
//! MOVDIR64B). That is what a mailbox line wants. For bulk it is slower than AVX-512: its source read and its write are
//! one instruction, which keeps fewer lines moving.

use std::arch::asm;
use std::marker::PhantomData;

use super::has_movdir64b;
use crate::copy::fixed::LineStore;
use crate::copy::kernel::{Leaf, Need};
use crate::copy::plan::LINE_BYTES;

/// `Rest` does what MOVDIR64B cannot: parts of lines, and loads.
pub(in crate::copy) struct Movdir64b<Rest>(PhantomData<Rest>);

impl<Rest: Leaf> Leaf for Movdir64b<Rest> {
    const NAME: &'static str = "movdir64b";
    const NEEDS: &'static [Need] = &[Need { name: "MOVDIR64B", present: has_movdir64b }];
    const LINE: LineStore = LineStore::DIRECT;

    fn is_available() -> bool {
        has_movdir64b() && Rest::is_available()
    }

    #[inline(always)]
    unsafe fn store_lines(dst: *mut u8, src: *const u8, lines: usize) {
        for at in (0..lines * LINE_BYTES).step_by(LINE_BYTES) {
            // SAFETY: both ranges are `lines` lines long and `dst` is a multiple of 64 by contract; the instruction
            // touches no other memory, no register, no flag.
            unsafe {
                asm!(
                    "movdir64b {dst}, [{src}]",
                    dst = in(reg) dst.wrapping_add(at),
                    src = in(reg) src.wrapping_add(at),
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn store_part(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the same contract.
        unsafe { Rest::store_part(dst, src, len) }
    }

    #[inline(always)]
    unsafe fn load_lines(dst: *mut u8, src: *const u8, lines: usize) {
        // SAFETY: the same contract.
        unsafe { Rest::load_lines(dst, src, lines) }
    }

    #[inline(always)]
    unsafe fn load_part(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the same contract.
        unsafe { Rest::load_part(dst, src, len) }
    }
    unsafe fn load(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the same contract.
        unsafe { Rest::load(dst, src, len) }
    }
}
