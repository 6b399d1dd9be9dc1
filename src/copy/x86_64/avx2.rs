//! AVX2: a line is two registers.
//!
//! Every copy ends with VZEROUPPER: code that uses SSE afterwards would otherwise merge with the upper halves.

use std::arch::asm;

use super::Line;
use super::sse41::store_part_by_16;
use crate::copy::fixed::LineStore;
use crate::copy::kernel::{Leaf, Need};
use crate::copy::plan::LINE_BYTES;

pub(in crate::copy) struct Avx2;

/// Copies half a line per register, all loads before all stores, so that the loads of a block are in flight together.
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

/// VZEROUPPER, once for all the blocks of a copy.
#[inline(always)]
fn clear_upper_halves() {
    // SAFETY: touches the declared registers alone; the leaf is used where there is AVX.
    unsafe {
        asm!(
            "vzeroupper",
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nomem, nostack, preserves_flags),
        );
    }
}

/// [`block!`] of a given number of lines.
macro_rules! lines {
    (1, $($how:tt)+) => { block!($($how)+, "ymm0" 0 "ymm1" 32) };
    (4, $($how:tt)+) => {
        block!(
            $($how)+,
            "ymm0" 0 "ymm1" 32 "ymm2" 64 "ymm3" 96 "ymm4" 128 "ymm5" 160 "ymm6" 192 "ymm7" 224
        )
    };
    (8, $($how:tt)+) => {
        block!(
            $($how)+,
            "ymm0" 0 "ymm1" 32 "ymm2" 64 "ymm3" 96 "ymm4" 128 "ymm5" 160 "ymm6" 192 "ymm7" 224
            "ymm8" 256 "ymm9" 288 "ymm10" 320 "ymm11" 352 "ymm12" 384 "ymm13" 416 "ymm14" 448 "ymm15" 480
        )
    };
}

impl Leaf for Avx2 {
    const NAME: &'static str = "avx2";
    const LINE: LineStore = LineStore::QUARTERS;
    const NEEDS: &'static [Need] = &[Need { name: "AVX2", present: || is_x86_feature_detected!("avx2") }];

    #[inline(always)]
    unsafe fn store_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
        macro_rules! store {
            ($count:tt) => {
                // SAFETY: so many lines are left in both ranges; `dst` is a multiple of 64; the registers are declared.
                unsafe { lines!($count, "vmovdqu", "vmovntdq", dst, src) };
                (dst, src) = (dst.wrapping_add($count * LINE_BYTES), src.wrapping_add($count * LINE_BYTES));
                lines -= $count;
            };
        }
        while lines >= 4 {
            store!(4);
        }
        while lines > 0 {
            store!(1);
        }
        clear_upper_halves();
    }

    #[inline(always)]
    unsafe fn store_part(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the same contract; AVX2 implies SSE4.1.
        unsafe { store_part_by_16(dst, src, len) }
    }

    #[inline(always)]
    unsafe fn load_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
        macro_rules! load {
            ($count:tt) => {
                // SAFETY: so many lines are left in both ranges; `src` is a multiple of 64; the registers are declared.
                unsafe { lines!($count, "vmovntdqa", "vmovdqu", dst, src) };
                (dst, src) = (dst.wrapping_add($count * LINE_BYTES), src.wrapping_add($count * LINE_BYTES));
                lines -= $count;
            };
        }
        // Eight lines fill the registers. Nothing here waits for what is loaded, so the loads of the next block go out
        // before the stores of this one: 16 lines are 72 instructions, and the smallest reorder buffer beside AVX2 holds
        // 192 (Haswell; Intel optimization manual).
        while lines >= 8 {
            load!(8);
        }
        if lines >= 4 {
            load!(4);
        }
        while lines > 0 {
            load!(1);
        }
        clear_upper_halves();
    }

    #[inline(always)]
    unsafe fn load_part(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the same contract.
        unsafe { Line::load_part::<Self>(dst, src, len) }
    }
}
