//! AVX-512: a line is one register, and a part of a line is one masked instruction.
//!
//! Uses `zmm16`-`zmm31` and `k1` only.

mod load;

use std::arch::asm;

use self::load::{Edges, load_some};
use super::Line;
use crate::copy::fence;
use crate::copy::fixed::LineStore;
use crate::copy::kernel::{Leaf, Need, load_in_parts};
use crate::copy::plan::LINE_BYTES;

pub(in crate::copy) struct Avx512;

/// Copies one line per register, all loads before all stores, so that the loads of a block are in flight together.
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
    (8, $($how:tt)+) => {
        block!($($how)+, "zmm16" 0 "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448)
    };
}

/// Loads so many whole lines, and stores each in two halves.
///
/// With one store for a line the processor's store buffer (112 entries, Golden Cove) takes in the stores of more than 4 KiB whose
/// loads are still out. A load then meets a store of the same lower 12 address bits that has no data yet, and, it seems, gives up
/// its fill buffer. Half stores end its view at 56 lines. Two processes in turn beside an H200, medians: 2 KiB 2.20 us against
/// 2.78, 4 KiB 4.52 against 5.35, 64 KiB 68.6 against 79.6.
macro_rules! load_whole {
    ($dst:expr, $src:expr, $($register:tt $half:tt $at:literal $upper:literal)+) => {
        asm!(
            $(concat!("vmovntdqa ", $register, ", [{src} + ", $at, "]"),)+
            $(
                concat!("vmovdqu64 [{dst} + ", $at, "], ", $half),
                concat!("vextracti64x4 [{dst} + ", $upper, "], ", $register, ", 1"),
            )+
            dst = in(reg) $dst,
            src = in(reg) $src,
            $(out($register) _,)+
            options(nostack, preserves_flags),
        )
    };
}

/// [`load_whole!`] of a given number of lines.
macro_rules! whole_lines {
    (1, $dst:expr, $src:expr) => { load_whole!($dst, $src, "zmm16" "ymm16" 0 32) };
    (4, $dst:expr, $src:expr) => {
        load_whole!(
            $dst, $src,
            "zmm16" "ymm16" 0 32 "zmm17" "ymm17" 64 96 "zmm18" "ymm18" 128 160 "zmm19" "ymm19" 192 224
        )
    };
    (8, $dst:expr, $src:expr) => {
        load_whole!(
            $dst, $src,
            "zmm16" "ymm16" 0 32 "zmm17" "ymm17" 64 96 "zmm18" "ymm18" 128 160 "zmm19" "ymm19" 192 224
            "zmm20" "ymm20" 256 288 "zmm21" "ymm21" 320 352 "zmm22" "ymm22" 384 416 "zmm23" "ymm23" 448 480
        )
    };
    (16, $dst:expr, $src:expr) => {
        load_whole!(
            $dst, $src,
            "zmm16" "ymm16" 0 32 "zmm17" "ymm17" 64 96 "zmm18" "ymm18" 128 160 "zmm19" "ymm19" 192 224
            "zmm20" "ymm20" 256 288 "zmm21" "ymm21" 320 352 "zmm22" "ymm22" 384 416 "zmm23" "ymm23" 448 480
            "zmm24" "ymm24" 512 544 "zmm25" "ymm25" 576 608 "zmm26" "ymm26" 640 672 "zmm27" "ymm27" 704 736
            "zmm28" "ymm28" 768 800 "zmm29" "ymm29" 832 864 "zmm30" "ymm30" 896 928 "zmm31" "ymm31" 960 992
        )
    };
}

/// Loads the next lines, so many of those that are left, and goes on behind them.
macro_rules! load_next {
    ($count:tt, $dst:ident, $src:ident, $left:ident) => {
        // SAFETY: so many lines are left in both ranges; `$src` is a multiple of 64; the registers are declared.
        unsafe { whole_lines!($count, $dst, $src) };
        ($dst, $src) = ($dst.wrapping_add($count * LINE_BYTES), $src.wrapping_add($count * LINE_BYTES));
        $left -= $count;
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
    const LINE: LineStore = LineStore::WHOLE;
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

    #[inline(always)]
    unsafe fn store_part(dst: *mut u8, src: *const u8, len: usize) {
        let part = Part::new(dst.addr(), len);
        let line = dst.wrapping_sub(part.skip);
        if part.window_stays_in_its_pages(src.addr(), len) {
            // SAFETY: the lanes of the part are valid on both sides by contract, and `line` is a multiple of 64.
            unsafe { store_lanes(line, src.wrapping_sub(part.skip), part.mask) };
        } else {
            // SAFETY: as above; `skip + len <= 64` since a part lies inside one line.
            unsafe { store_part_by_way_of_the_stack(line, src, part, len) };
        }
    }

    #[inline(always)]
    unsafe fn load_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
        // Sixteen is also the number of fill buffers, so that a block is one round trip.
        while lines >= 16 {
            load_next!(16, dst, src, lines);
        }
        if lines >= 8 {
            load_next!(8, dst, src, lines);
        }
        if lines >= 4 {
            load_next!(4, dst, src, lines);
        }
        while lines > 0 {
            load_next!(1, dst, src, lines);
        }
    }

    #[inline(always)]
    unsafe fn load_part(dst: *mut u8, src: *const u8, len: usize) {
        let part = Part::new(src.addr(), len);
        let line = src.wrapping_sub(part.skip);
        if part.window_stays_in_its_pages(dst.addr(), len) {
            // SAFETY: the line around the part is loadable and the part's lanes are writable by contract.
            unsafe { load_lanes(dst.wrapping_sub(part.skip), line, part.mask) };
        } else {
            // SAFETY: as above; `skip + len <= 64` since a part lies inside one line.
            unsafe { load_part_by_way_of_the_stack(dst, line, part, len) };
        }
    }

    unsafe fn load(dst: *mut u8, src: *const u8, len: usize) {
        let Some(edges) = Edges::new(dst.addr(), src.addr(), len) else {
            // SAFETY: the same contract.
            return unsafe { load_in_parts::<Self>(dst, src, len) };
        };
        let Edges { skip, lines, first, last } = edges;
        let (mut dst, mut src) = (dst.wrapping_sub(skip), src.wrapping_sub(skip));
        let head = (dst, src);
        if lines <= 16 {
            // SAFETY: `edges` says which lanes of the lines around the range belong to it.
            return unsafe { load_some::<true>(head, head, lines, first, last) };
        }
        // The lines between the first and the last, which are whole, come before both. With the first line's masked store in
        // front of them, 8 KiB into memory that is not at a multiple of 64 took one round trip too many (H200: 9.49 us against
        // 8.61): presumably a load whose address ends in the same 12 bits waits for such a store, and gives up its buffer.
        (dst, src) = (dst.wrapping_add(LINE_BYTES), src.wrapping_add(LINE_BYTES));
        let mut left = lines - 1;
        // What comes behind the first block may be guessed wrong: the fill buffers are taken.
        if left > 16 {
            fence::load();
            load_next!(16, dst, src, left);
        } else {
            fence::load();
            load_next!(8, dst, src, left);
        }
        while left > 16 {
            load_next!(16, dst, src, left);
        }
        if left == 16 {
            load_next!(8, dst, src, left);
        }
        let before = (dst.wrapping_sub(LINE_BYTES), src.wrapping_sub(LINE_BYTES));
        // SAFETY: as above; 2 to 16 lines, the first and the last ones of the range.
        unsafe { load_some::<false>(head, before, left + 1, first, last) };
    }
}

/// Stores the lanes in `mask` of the line at `line` from the window at `window`.
///
/// An ordinary masked store, since there is no non-temporal one: write-combined memory combines it all the same.
///
/// # Safety
///
/// `line` is a multiple of 64; the lanes are readable in the window and valid for a store in the line.
#[inline(always)]
unsafe fn store_lanes(line: *mut u8, window: *const u8, mask: u64) {
    // SAFETY: lanes outside the mask are neither read nor written nor checked for access; the registers are declared.
    unsafe {
        asm!(
            "kmovq k1, {mask}",
            "vmovdqu8 zmm16 {{k1}} {{z}}, [{window}]",
            "vmovdqu8 [{line}] {{k1}}, zmm16",
            mask = in(reg) mask,
            window = in(reg) window,
            line = in(reg) line,
            out("k1") _,
            out("zmm16") _,
            options(nostack, preserves_flags),
        );
    }
}

/// Loads the whole line at `line` once and sets the lanes in `mask` of the window at `window` from it.
///
/// # Safety
///
/// `line` is a multiple of 64 and the whole line is loadable; the lanes are writable in the window.
#[inline(always)]
unsafe fn load_lanes(window: *mut u8, line: *const u8, mask: u64) {
    // SAFETY: lanes outside the mask are neither written nor checked for access; the registers are declared.
    unsafe {
        asm!(
            "kmovq k1, {mask}",
            "vmovntdqa zmm16, [{line}]",
            "vmovdqu8 [{window}] {{k1}}, zmm16",
            mask = in(reg) mask,
            window = in(reg) window,
            line = in(reg) line,
            out("k1") _,
            out("zmm16") _,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
///
/// As for [`store_lanes`] with the lanes of `part`, and `len` bytes at `src` are readable.
#[cold]
#[inline(never)]
unsafe fn store_part_by_way_of_the_stack(line: *mut u8, src: *const u8, part: Part, len: usize) {
    let mut bounce = Line::UNUSED;
    // SAFETY: the caller vouches for `src`; a part ends inside its line.
    unsafe { bounce.keep(part.skip, src, len) };
    // SAFETY: the lanes of the part have just been set; the caller vouches for the line.
    unsafe { store_lanes(line, bounce.as_ptr(), part.mask) };
}

/// # Safety
///
/// As for [`load_lanes`] with the lanes of `part`, and `len` bytes at `dst` are writable.
#[cold]
#[inline(never)]
unsafe fn load_part_by_way_of_the_stack(dst: *mut u8, line: *const u8, part: Part, len: usize) {
    let mut bounce = Line::UNUSED;
    // SAFETY: a whole line of our own; the caller vouches for the device's.
    unsafe { load_lanes(bounce.as_mut_ptr(), line, part.mask) };
    // SAFETY: the lanes of the part have just been set; the caller vouches for `dst`.
    unsafe { bounce.give(part.skip, dst, len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_of_a_part() {
        for addr in 640..704 {
            for len in 1..=(704 - addr).min(63) {
                let part = Part::new(addr, len);
                let lanes: Vec<_> = (0..64).filter(|lane| part.mask & (1 << lane) != 0).collect();
                let wanted: Vec<_> = (addr - 640..addr - 640 + len).collect();
                assert_eq!(lanes, wanted);
                assert_eq!(part.skip, addr - 640);
            }
        }
    }

    #[test]
    fn a_window_may_only_touch_pages_of_its_part() {
        for skip in 0..64 {
            for len in 1..=(64 - skip).min(63) {
                for addr in (4096 - 130..4096 + 130).map(|at| 0x7000_0000_0000_usize + at) {
                    let pages = |first: usize, last: usize| first / 4096..=last / 4096;
                    let (window, part) = (pages(addr - skip, addr - skip + 63), pages(addr, addr + len - 1));
                    let stays = Part::new(skip, len).window_stays_in_its_pages(addr, len);
                    assert_eq!(stays, window == part, "{addr:#x} {skip} {len}");
                }
            }
        }
    }
}
