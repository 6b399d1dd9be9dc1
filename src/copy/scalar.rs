//! Single accesses of 1, 2, 4 and 8 bytes, and the routine that is made of nothing else.
//!
//! The accesses are inline assembly: one instruction of that width, which the compiler can neither split, merge,
//! repeat, drop nor reorder against other accesses, and which is no data race when other threads or the device touch
//! the same bytes.

use std::arch::asm;

use super::fence;
use super::fixed::LineStore;
use super::kernel::{Leaf, Need};
use super::plan::{LINE_BYTES, for_each_piece};

const WORD_BYTES: usize = 8;

macro_rules! single_accesses {
    ($($bytes:literal $int:ident $class:ident $modifier:literal $width:literal $store:ident $load:ident;)+) => { $(
        #[doc = concat!("Stores ", $bytes, " byte(s) to device memory with one instruction. No fence.")]
        ///
        /// # Safety
        ///
        #[doc = concat!("- `dst` is valid for a store of ", $bytes, " byte(s) and naturally aligned;")]
        /// - the bytes are not borrowed as a Rust reference anywhere.
        #[inline]
        pub unsafe fn $store(dst: *mut $int, value: $int) {
            debug_assert!(dst.is_aligned(), "device store of {} bytes at {dst:p}", $bytes);
            // SAFETY: the caller vouches for the address; one MOV, no flags, no stack.
            unsafe {
                asm!(
                    concat!("mov ", $width, " ptr [{dst}], {value", $modifier, "}"),
                    dst = in(reg) dst,
                    value = in($class) value,
                    options(nostack, preserves_flags),
                );
            }
        }

        #[doc = concat!("Loads ", $bytes, " byte(s) of device memory with one instruction. No fence.")]
        ///
        /// # Safety
        ///
        #[doc = concat!("- `src` is valid for a load of ", $bytes, " byte(s) and naturally aligned;")]
        /// - the bytes are not borrowed as a mutable Rust reference anywhere.
        #[inline]
        #[must_use]
        pub unsafe fn $load(src: *const $int) -> $int {
            debug_assert!(src.is_aligned(), "device load of {} bytes at {src:p}", $bytes);
            let value: $int;
            // SAFETY: the caller vouches for the address; one MOV, no flags, no stack.
            unsafe {
                asm!(
                    concat!("mov {value", $modifier, "}, ", $width, " ptr [{src}]"),
                    src = in(reg) src,
                    value = out($class) value,
                    options(nostack, preserves_flags),
                );
            }
            value
        }
    )+ };
}

single_accesses! {
    1 u8 reg_byte "" "byte" store_u8 load_u8;
    2 u16 reg ":x" "word" store_u16 load_u16;
    4 u32 reg ":e" "dword" store_u32 load_u32;
    8 u64 reg ":r" "qword" store_u64 load_u64;
}

/// Stores one naturally aligned piece of 1, 2, 4 or 8 bytes with one instruction.
///
/// # Safety
///
/// - `size` is 1, 2, 4 or 8, and `dst` is a multiple of it and valid for a store of that many bytes;
/// - `src` is valid for a read of `size` bytes.
#[inline(always)]
pub(super) unsafe fn store_piece(dst: *mut u8, src: *const u8, size: usize) {
    macro_rules! store {
        ($int:ident, $store:ident) => {{
            // SAFETY: the caller vouches for `size` bytes at `src`, of any alignment.
            let value = unsafe { src.cast::<$int>().read_unaligned() };
            // SAFETY: the caller vouches for `dst` and its alignment.
            unsafe { $store(dst.cast(), value) }
        }};
    }
    match size {
        1 => store!(u8, store_u8),
        2 => store!(u16, store_u16),
        4 => store!(u32, store_u32),
        _ => store!(u64, store_u64),
    }
}

/// Stores the whole of `src` with one instruction if it is empty or a naturally aligned 1, 2, 4 or 8 bytes; says
/// whether it did.
///
/// # Safety
///
/// `dst` is valid for a store of `src.len()` bytes.
#[inline(always)]
pub(crate) unsafe fn store_single(dst: *mut u8, src: &[u8]) -> bool {
    match src.len() {
        0 => true,
        size @ (1 | 2 | 4 | 8) if dst.addr().is_multiple_of(size) => {
            // SAFETY: size and alignment are those of this arm; the slice has `size` bytes; `dst` is the caller's word.
            unsafe { store_piece(dst, src.as_ptr(), size) };
            true
        }
        _ => false,
    }
}

/// Fills `dst` with one instruction if it is empty or a naturally aligned 1, 2, 4 or 8 bytes on the device side; says
/// whether it did.
///
/// # Safety
///
/// `src` is valid for a load of `dst.len()` bytes.
#[inline(always)]
pub(crate) unsafe fn load_single(dst: &mut [u8], src: *const u8) -> bool {
    macro_rules! load {
        ($load:ident) => {{
            // Which arm it is must be certain before the bus is asked; see `Leaf::load`.
            fence::load();
            // SAFETY: the caller vouches for `src`; its alignment was tested by the arm that got here.
            let value = unsafe { $load(src.cast()) };
            dst.copy_from_slice(&value.to_ne_bytes());
        }};
    }
    match dst.len() {
        0 => {}
        1 => load!(load_u8),
        2 if src.addr().is_multiple_of(2) => load!(load_u16),
        4 if src.addr().is_multiple_of(4) => load!(load_u32),
        8 if src.addr().is_multiple_of(8) => load!(load_u64),
        _ => return false,
    }
    true
}

/// General-purpose registers only: for any x86-64, and the reference for the others.
pub(super) struct Scalar;

impl Leaf for Scalar {
    const NAME: &'static str = "scalar";
    const LINE: LineStore = LineStore::WORDS;
    const NEEDS: &'static [Need] = &[];

    #[inline(always)]
    unsafe fn store_lines(dst: *mut u8, src: *const u8, lines: usize) {
        for at in (0..lines * LINE_BYTES).step_by(WORD_BYTES) {
            // SAFETY: both ranges are `lines` lines long by contract, and `dst` is a multiple of 64.
            unsafe { store_piece(dst.wrapping_add(at), src.wrapping_add(at), WORD_BYTES) };
        }
    }

    #[inline(always)]
    unsafe fn store_part(dst: *mut u8, src: *const u8, len: usize) {
        for_each_piece::<8>(dst.addr(), len, |at, size| {
            // SAFETY: the pieces lie inside both ranges and are aligned on the device side.
            unsafe { store_piece(dst.wrapping_add(at), src.wrapping_add(at), size) };
        });
    }

    #[inline(always)]
    unsafe fn load_lines(dst: *mut u8, src: *const u8, lines: usize) {
        for at in (0..lines * LINE_BYTES).step_by(WORD_BYTES) {
            // SAFETY: the device range is `lines` lines long by contract, and `src` is a multiple of 64.
            let word = unsafe { load_u64(src.wrapping_add(at).cast()) };
            // SAFETY: the host range is `lines` lines long by contract.
            unsafe { dst.wrapping_add(at).cast::<u64>().write_unaligned(word) };
        }
    }

    /// Each aligned word that holds a byte of the part is fetched once and whole.
    #[inline(always)]
    unsafe fn load_part(dst: *mut u8, src: *const u8, len: usize) {
        let mut at = 0;
        while at < len {
            let skip = src.wrapping_add(at).addr() % WORD_BYTES;
            let size = (WORD_BYTES - skip).min(len - at);
            // SAFETY: the word is aligned and holds a byte of the part, so it lies inside the part's line.
            let word = unsafe { load_u64(src.wrapping_add(at).wrapping_sub(skip).cast()) };
            let bytes = word.to_ne_bytes();
            // SAFETY: `skip + size <= 8`, and `at + size <= len` bytes of the host range.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().wrapping_add(skip), dst.wrapping_add(at), size) };
            at += size;
        }
    }
}
