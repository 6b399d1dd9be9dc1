//! Loads with nothing to guess on the way: each number of lines up to 16 is a straight run of instructions of its own.

use std::arch::asm;

use super::{Part, load_lanes};
use crate::copy::fence;
use crate::copy::plan::LINE_BYTES;

/// A range of device memory as the lines around it.
pub(super) struct Edges {
    /// Bytes of the first line in front of the range.
    pub(super) skip: usize,
    pub(super) lines: usize,
    /// Lanes of the first and the last line that belong to the range, where it is more than one line.
    pub(super) first: u64,
    pub(super) last: u64,
}

impl Edges {
    /// `None` for nothing, and where the window around the first or the last part leaves its pages on the host's side.
    #[inline(always)]
    pub(super) fn new(dst: usize, src: usize, len: usize) -> Option<Self> {
        if len == 0 {
            return None;
        }
        let skip = src % LINE_BYTES;
        let end = skip + len;
        let lines = end.div_ceil(LINE_BYTES);
        let first = Part::new(src, len.min(LINE_BYTES - skip));
        let tail = (end - 1) % LINE_BYTES + 1;
        let last_len = tail.min(len);
        let last = Part { skip: 0, mask: u64::MAX >> (LINE_BYTES - tail) };
        let is_inside = first.window_stays_in_its_pages(dst, len.min(LINE_BYTES - skip))
            && (lines == 1 || last.window_stays_in_its_pages(dst + len - last_len, last_len));
        is_inside.then_some(Self { skip, lines, first: first.mask, last: last.mask })
    }
}

/// A line on both sides: where it goes, and a multiple of 64.
pub(super) type At = (*mut u8, *const u8);

/// Loads 1 to 16 lines with nothing to guess behind the LFENCE of `FENCED`: the one at `head`, and those that would follow one
/// at `before`. First all loads, then the stores, of the first line the lanes in `first`, of the last those in `last`.
///
/// # Safety
///
/// The lines are loadable, the lanes writable; one line is `first` and `last`.
#[inline(always)]
pub(super) unsafe fn load_some<const FENCED: bool>(head: At, before: At, lines: usize, first: u64, last: u64) {
    let ((head_dst, head_src), (dst, src)) = (head, before);
    macro_rules! some {
        ($last:tt $last_at:literal; $($mid:tt $at:literal)*) => {{
            if FENCED {
                fence::load();
            }
            // SAFETY: as many lines as there are, at a multiple of 64; lanes outside the masks are neither written nor checked
            // for access; the registers are declared.
            unsafe {
            asm!(
                "vmovntdqa zmm16, [{head_src}]",
                $(concat!("vmovntdqa ", $mid, ", [{src} + ", $at, "]"),)*
                concat!("vmovntdqa ", $last, ", [{src} + ", $last_at, "]"),
                "kmovq k1, {first}",
                "kmovq k2, {last}",
                "vmovdqu8 [{head_dst}] {{k1}}, zmm16",
                $(concat!("vmovdqu64 [{dst} + ", $at, "], ", $mid),)*
                concat!("vmovdqu8 [{dst} + ", $last_at, "] {{k2}}, ", $last),
                head_dst = in(reg) head_dst,
                head_src = in(reg) head_src,
                dst = in(reg) dst,
                src = in(reg) src,
                first = in(reg) first,
                last = in(reg) last,
                out("k1") _,
                out("k2") _,
                out("zmm16") _,
                $(out($mid) _,)*
                out($last) _,
                options(nostack, preserves_flags),
            )
            }
        }};
    }
    match lines {
        1 => {
            if FENCED {
                fence::load();
            }
            // SAFETY: the line is loadable, and the lanes of both masks are writable.
            unsafe { load_lanes(head_dst, head_src, first & last) };
        }
        2 => some!("zmm17" 64;),
        3 => some!("zmm18" 128; "zmm17" 64),
        4 => some!("zmm19" 192; "zmm17" 64 "zmm18" 128),
        5 => some!("zmm20" 256; "zmm17" 64 "zmm18" 128 "zmm19" 192),
        6 => some!("zmm21" 320; "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256),
        7 => some!("zmm22" 384; "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320),
        8 => some!("zmm23" 448; "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384),
        9 => some!("zmm24" 512; "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448),
        10 => some!(
            "zmm25" 576;
            "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448 "zmm24" 512
        ),
        11 => some!(
            "zmm26" 640;
            "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448 "zmm24" 512
            "zmm25" 576
        ),
        12 => some!(
            "zmm27" 704;
            "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448 "zmm24" 512
            "zmm25" 576 "zmm26" 640
        ),
        13 => some!(
            "zmm28" 768;
            "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448 "zmm24" 512
            "zmm25" 576 "zmm26" 640 "zmm27" 704
        ),
        14 => some!(
            "zmm29" 832;
            "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448 "zmm24" 512
            "zmm25" 576 "zmm26" 640 "zmm27" 704 "zmm28" 768
        ),
        15 => some!(
            "zmm30" 896;
            "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448 "zmm24" 512
            "zmm25" 576 "zmm26" 640 "zmm27" 704 "zmm28" 768 "zmm29" 832
        ),
        _ => some!(
            "zmm31" 960;
            "zmm17" 64 "zmm18" 128 "zmm19" 192 "zmm20" 256 "zmm21" 320 "zmm22" 384 "zmm23" 448 "zmm24" 512
            "zmm25" 576 "zmm26" 640 "zmm27" 704 "zmm28" 768 "zmm29" 832 "zmm30" 896
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_hold_the_range_and_nothing_else() {
        for skip in 0..LINE_BYTES {
            for len in 1..200 {
                // In the middle of a page, so that no window leaves it.
                let edges = Edges::new(1 << 20 | 2048, (1 << 21) + skip, len).expect("inside");
                let lanes = |line: usize| {
                    let first = if line == 0 { edges.first } else { u64::MAX };
                    let last = if line == edges.lines - 1 { edges.last } else { u64::MAX };
                    first & last
                };
                for lane in 0..edges.lines * LINE_BYTES {
                    let wanted = (skip..skip + len).contains(&lane);
                    assert_eq!(lanes(lane / LINE_BYTES) >> (lane % LINE_BYTES) & 1 == 1, wanted, "{skip} {len} {lane}");
                }
                assert!(edges.skip == skip && (edges.lines - 1) * LINE_BYTES < skip + len, "{skip} {len}");
            }
        }
        assert!(Edges::new(4096, 4096, 0).is_none());
    }

    #[test]
    fn windows_that_leave_the_pages_of_their_part_are_refused() {
        assert!(Edges::new(8192 - 100, 64, 100).is_none(), "the tail's window reaches into the next page");
        assert!(Edges::new(8192, 64 + 10, 200).is_none(), "the head's window begins in the page before");
        assert!(Edges::new(8192 - 128, 64, 128).is_some());
    }
}
