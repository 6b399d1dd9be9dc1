//! SSE4.1: a line is four registers. The first instruction set with a non-temporal load.
//!
//! The instructions are SSE-encoded also where this crate is compiled for AVX, so the upper halves of `ymm` registers
//! stay as they are.

use std::arch::asm;

use super::Line;
use crate::copy::fixed::LineStore;
use crate::copy::kernel::{Leaf, Need};
use crate::copy::plan::{LINE_BYTES, for_each_piece};
use crate::copy::scalar::store_piece;

pub(in crate::copy) struct Sse41;

/// Copies a quarter of a line per register, all loads before all stores, so that the loads of a block are in flight together.
macro_rules! block {
    ($load:literal, $store:literal, $dst:expr, $src:expr, $($register:tt $at:literal)+) => {
        asm!(
            $(concat!($load, " ", $register, ", [{src} + ", $at, "]"),)+
            $(concat!($store, " [{dst} + ", $at, "], ", $register),)+
            dst = in(reg) $dst,
            src = in(reg) $src,
            $(out($register) _,)+
            options(nostack, preserves_flags),
        )
    };
}

/// [`block!`] of a given number of lines.
macro_rules! lines {
    (1, $($how:tt)+) => { block!($($how)+, "xmm0" 0 "xmm1" 16 "xmm2" 32 "xmm3" 48) };
    (4, $($how:tt)+) => {
        block!(
            $($how)+,
            "xmm0" 0 "xmm1" 16 "xmm2" 32 "xmm3" 48 "xmm4" 64 "xmm5" 80 "xmm6" 96 "xmm7" 112
            "xmm8" 128 "xmm9" 144 "xmm10" 160 "xmm11" 176 "xmm12" 192 "xmm13" 208 "xmm14" 224 "xmm15" 240
        )
    };
}

/// Stores naturally aligned pieces of up to 16 bytes, as few as there can be.
///
/// Ordinary stores: write-combined memory combines them like non-temporal ones, and on ordinary memory a partly filled
/// line of non-temporal stores costs a trip to DRAM.
///
/// # Safety
///
/// As for [`Leaf::store_part`].
#[inline(always)]
pub(super) unsafe fn store_part_by_16(dst: *mut u8, src: *const u8, len: usize) {
    for_each_piece::<16>(dst.addr(), len, |at, size| {
        let (dst, src) = (dst.wrapping_add(at), src.wrapping_add(at));
        if size == 16 {
            // SAFETY: 16 bytes of both ranges, `dst` a multiple of 16; the register is declared.
            unsafe { block!("movdqu", "movdqa", dst, src, "xmm0" 0) };
        } else {
            // SAFETY: the piece lies inside both ranges and is aligned on the device side.
            unsafe { store_piece(dst, src, size) };
        }
    });
}

impl Leaf for Sse41 {
    const NAME: &'static str = "sse41";
    const LINE: LineStore = LineStore::QUARTERS;
    const NEEDS: &'static [Need] = &[Need { name: "SSE4.1", present: || is_x86_feature_detected!("sse4.1") }];

    #[inline(always)]
    unsafe fn store_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
        while lines > 0 {
            // SAFETY: a line is left in both ranges; `dst` is a multiple of 64; the registers are declared.
            unsafe { lines!(1, "movdqu", "movntdq", dst, src) };
            (dst, src) = (dst.wrapping_add(LINE_BYTES), src.wrapping_add(LINE_BYTES));
            lines -= 1;
        }
    }

    #[inline(always)]
    unsafe fn store_part(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the same contract.
        unsafe { store_part_by_16(dst, src, len) }
    }

    #[inline(always)]
    unsafe fn load_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
        macro_rules! load {
            ($count:tt) => {
                // SAFETY: so many lines are left in both ranges; `src` is a multiple of 64; the registers are declared.
                unsafe { lines!($count, "movntdqa", "movdqu", dst, src) };
                (dst, src) = (dst.wrapping_add($count * LINE_BYTES), src.wrapping_add($count * LINE_BYTES));
                lines -= $count;
            };
        }
        // Four lines fill the registers; the loads of the blocks that follow go out meanwhile, as with AVX2.
        while lines >= 4 {
            load!(4);
        }
        while lines > 0 {
            load!(1);
        }
    }

    #[inline(always)]
    unsafe fn load_part(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the same contract.
        unsafe { Line::load_part::<Self>(dst, src, len) }
    }
}
