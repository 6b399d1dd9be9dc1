//! AVX-512: a line is one register, and a part of a line is one masked instruction.
//!
//! Uses `zmm16`-`zmm31` and `k1` only.

use std::arch::asm;

use super::Line;
use crate::copy::kernel::{Leaf, Need};
use crate::copy::plan::LINE_BYTES;

pub(in crate::copy) struct Avx512;

/// Copies one line per register, all loads before all stores: a store that waits for its data cannot hold back a load
/// of the same block, whatever addresses the two have in common.
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
    (1, $($how:tt)+) => { block!($($how)+, "zmm16" 0) };
    (2, $($how:tt)+) => { block!($($how)+, "zmm16" 0 "zmm17" 64) };
    (4, $($how:tt)+) => { block!($($how)+, "zmm16" 0 "zmm17" 64 "zmm18" 128 "zmm19" 192) };
    (8, $($how:tt)+) => {
        block!($($how)+, "zmm16" 0 "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448)
    };
    (16, $($how:tt)+) => {
        block!(
            $($how)+,
            "zmm16" 0 "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448
            "zmm24" 512 "zmm25" 576 "zmm26" 640 "zmm27" 704 "zmm28" 768 "zmm29" 832 "zmm30" 896 "zmm31" 960
        )
    };
}

/// A part of a line as the 64-byte window around it on the host side, lane for lane with the device's line.
#[derive(Clone, Copy)]
struct Part {
    /// Bytes of the line in front of the part.
    skip: usize,
    /// The lanes that belong to the part.
    mask: u64,
}

impl Part {
    /// The part of `len` bytes, 1 to 63, at device address `addr`.
    #[inline(always)]
    fn new(addr: usize, len: usize) -> Self {
        let skip = addr % LINE_BYTES;
        Self { skip, mask: (u64::MAX >> (LINE_BYTES - len)) << skip }
    }

    /// Whether the window around the part at host address `addr` stays in the pages that the part itself is in.
    ///
    /// Lanes that are masked off never fault, but where one lies in a page without access the processor takes a
    /// microcode assist of hundreds of cycles, or more if the page could be faulted in (Intel optimization manual,
    /// "Masked loads and stores").
    #[inline(always)]
    fn window_stays_in_its_pages(self, addr: usize, len: usize) -> bool {
        const PAGE_BYTES: usize = 4096;
        let window = addr.wrapping_sub(self.skip);
        let same_page = |a: usize, b: usize| a / PAGE_BYTES == b / PAGE_BYTES;
        same_page(window, addr) && same_page(window.wrapping_add(LINE_BYTES - 1), addr.wrapping_add(len - 1))
    }
}

impl Leaf for Avx512 {
    const NAME: &'static str = "avx512";
    const NEEDS: &'static [Need] = &[
        Need { name: "AVX-512F", present: || is_x86_feature_detected!("avx512f") },
        Need { name: "AVX-512BW", present: || is_x86_feature_detected!("avx512bw") },
        Need { name: "AVX-512VL", present: || is_x86_feature_detected!("avx512vl") },
    ];

    #[inline(always)]
    unsafe fn store_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
        while lines >= 8 {
            // SAFETY: eight lines are left in both ranges; `dst` is a multiple of 64; the registers are declared.
            unsafe { lines!(8, "vmovdqu64", "vmovntdq", dst, src) };
            (dst, src) = (dst.wrapping_add(8 * LINE_BYTES), src.wrapping_add(8 * LINE_BYTES));
            lines -= 8;
        }
        while lines > 0 {
            // SAFETY: a line is left in both ranges; `dst` is a multiple of 64; the register is declared.
            unsafe { lines!(1, "vmovdqu64", "vmovntdq", dst, src) };
            (dst, src) = (dst.wrapping_add(LINE_BYTES), src.wrapping_add(LINE_BYTES));
            lines -= 1;
        }
    }

    /// An ordinary masked store, since there is no non-temporal one: write-combined memory combines it all the same.
    #[inline(always)]
    unsafe fn store_part(dst: *mut u8, src: *const u8, len: usize) {
        let part = Part::new(dst.addr(), len);
        let mut line = Line::UNUSED;
        let window = if part.window_stays_in_its_pages(src.addr(), len) {
            src.wrapping_sub(part.skip)
        } else {
            // SAFETY: `len` bytes are readable at `src` by contract, and `skip + len <= 64` since a part lies in a line.
            unsafe { line.keep(part.skip, src, len) };
            line.as_ptr()
        };
        // SAFETY: only lanes of the part are read or written: those are valid on both sides by contract (in the bounce
        // line: just written). The registers are declared.
        unsafe {
            asm!(
                "kmovq k1, {mask}",
                "vmovdqu8 zmm16 {{k1}} {{z}}, [{window}]",
                "vmovdqu8 [{line}] {{k1}}, zmm16",
                mask = in(reg) part.mask,
                window = in(reg) window,
                line = in(reg) dst.wrapping_sub(part.skip),
                out("k1") _,
                out("zmm16") _,
                options(nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn load_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
        macro_rules! load {
            ($count:tt) => {
                // SAFETY: so many lines are left in both ranges; `src` is a multiple of 64; the registers are declared.
                unsafe { lines!($count, "vmovntdqa", "vmovdqu64", dst, src) };
                (dst, src) = (dst.wrapping_add($count * LINE_BYTES), src.wrapping_add($count * LINE_BYTES));
                lines -= $count;
            };
        }
        // Sixteen is also the number of fill buffers, so that a block is one round trip.
        while lines >= 16 {
            load!(16);
        }
        if lines >= 8 {
            load!(8);
        }
        if lines >= 4 {
            load!(4);
        }
        while lines > 0 {
            load!(1);
        }
    }

    #[inline(always)]
    unsafe fn load_part(dst: *mut u8, src: *const u8, len: usize) {
        let part = Part::new(src.addr(), len);
        let line = src.wrapping_sub(part.skip);
        let mut bounce = Line::UNUSED;
        let direct = part.window_stays_in_its_pages(dst.addr(), len);
        let window = if direct { dst.wrapping_sub(part.skip) } else { bounce.as_mut_ptr() };
        // SAFETY: the line around the part is loadable by contract; only lanes of the part are written, which are in
        // the host range or in the bounce line. The registers are declared.
        unsafe {
            asm!(
                "kmovq k1, {mask}",
                "vmovntdqa zmm16, [{line}]",
                "vmovdqu8 [{window}] {{k1}}, zmm16",
                mask = in(reg) part.mask,
                window = in(reg) window,
                line = in(reg) line,
                out("k1") _,
                out("zmm16") _,
                options(nostack, preserves_flags),
            );
        }
        if !direct {
            // SAFETY: the lanes of the part were just written, and `len` bytes are writable at `dst` by contract.
            unsafe { bounce.give(part.skip, dst, len) };
        }
    }
}
