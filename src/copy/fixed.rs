//! Stores of a size that the compiler knows: no call, no loop, no plan, only the stores.
//!
//! Everything that depends on the size is decided when the generic code is compiled. What is left for the run is whether
//! the address is aligned for the pieces that were chosen, one branch that a caller's own layout makes the same way every
//! time, and for pieces wider than 8 bytes whether the routine makes such accesses.

use std::arch::asm;
use std::arch::x86_64::{__m128i, _mm_loadu_si128};

use zerocopy::{Immutable, IntoBytes};

use super::plan::LINE_BYTES;

/// How a routine stores one whole line where the store is inlined.
///
/// Three flags rather than one of four values: the compiler makes a jump through a table of the latter, which costs more
/// than two branches that always go the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineStore {
    is_whole: bool,
    is_quarters: bool,
    is_direct: bool,
}

impl LineStore {
    const NONE: Self = Self { is_whole: false, is_quarters: false, is_direct: false };
    /// Accesses of up to 8 bytes only, here and everywhere.
    pub(super) const WORDS: Self = Self::NONE;
    /// Four 16-byte stores, non-temporal. Baseline x86-64, and shorter in a caller than two 32-byte ones with VZEROUPPER.
    pub(super) const QUARTERS: Self = Self { is_quarters: true, ..Self::NONE };
    /// One 64-byte store, non-temporal (AVX-512F).
    pub(super) const WHOLE: Self = Self { is_whole: true, ..Self::NONE };
    /// One 64-byte store, direct (MOVDIR64B).
    pub(super) const DIRECT: Self = Self { is_direct: true, ..Self::NONE };

    /// Whether accesses wider than 8 bytes are made at all.
    const fn is_wide(self) -> bool {
        self.is_whole || self.is_quarters || self.is_direct
    }
}

/// What inlined stores ask of a [`Routine`](super::Routine): the flags, and their sum so that one test answers for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inlined {
    pub(super) line: LineStore,
    is_wide: bool,
}

impl Inlined {
    pub(super) const fn new(line: LineStore) -> Self {
        Self { line, is_wide: line.is_wide() }
    }
}

/// A load from host memory, which the compiler may make from registers, and a store of the same bytes to the device.
macro_rules! piece {
    (16 $sse:literal $vex:literal, $dst:expr, $src:expr, $at:expr) => {{
        // SAFETY: the caller of this macro vouches for 16 readable bytes at `$src + $at`; SSE2 is baseline.
        let value: __m128i = unsafe { _mm_loadu_si128($src.wrapping_add($at).cast()) };
        store_16!($sse $vex, $dst, value, $at);
    }};
    ($int:ident $class:ident $modifier:literal $width:literal, $dst:expr, $src:expr, $at:expr) => {{
        // SAFETY: the caller of this macro vouches for the bytes at `$src + $at`, of any alignment.
        let value = unsafe { $src.wrapping_add($at).cast::<$int>().read_unaligned() };
        // SAFETY: the caller of this macro vouches for the bytes at `$dst + $at` and their alignment; one MOV.
        unsafe {
            asm!(
                concat!("mov ", $width, " ptr [{dst} + {at}], {value", $modifier, "}"),
                dst = in(reg) $dst,
                at = const $at,
                value = in($class) value,
                options(nostack, preserves_flags),
            );
        }
    }};
}

/// A 16-byte store, encoded as the rest of the caller's code is: an SSE encoding amid AVX code has to merge with the upper
/// halves that such code leaves behind.
macro_rules! store_16 {
    ($sse:literal $vex:literal, $dst:expr, $value:expr, $at:expr) => {
        #[cfg(target_feature = "avx")]
        store_16!(@ $vex, $dst, $value, $at);
        #[cfg(not(target_feature = "avx"))]
        store_16!(@ $sse, $dst, $value, $at);
    };
    (@ $mnemonic:literal, $dst:expr, $value:expr, $at:expr) => {
        // SAFETY: the caller of this macro vouches for 16 bytes at `$dst + $at`, a multiple of 16; one store.
        unsafe {
            asm!(
                concat!($mnemonic, " xmmword ptr [{dst} + {at}], {value}"),
                dst = in(reg) $dst,
                at = const $at,
                value = in(xmm_reg) $value,
                options(nostack, preserves_flags),
            );
        }
    };
}

/// Stores one whole line with the instructions of `how`, if it has any; says whether it did.
///
/// # Safety
///
/// `dst` is a multiple of 64 and valid for a store of 64 bytes, `src` is readable for 64 bytes, and the processor has the
/// instructions of `how`.
#[inline(always)]
pub(crate) unsafe fn store_line(how: &Inlined, dst: *mut u8, src: *const u8) -> bool {
    if how.line.is_whole {
        // SAFETY: 64 bytes on both sides and alignment by contract; the register is declared.
        unsafe {
            asm!(
                "vmovdqu64 zmm16, [{src}]",
                "vmovntdq [{dst}], zmm16",
                src = in(reg) src,
                dst = in(reg) dst,
                out("zmm16") _,
                options(nostack, preserves_flags),
            );
        }
        return true;
    }
    if how.line.is_quarters {
        // All loads before all stores: what fills one write-combining buffer follows each other closely.
        // SAFETY: the contract covers each quarter; SSE2 is baseline.
        let quarters = [0, 16, 32, 48].map(|at| unsafe { _mm_loadu_si128(src.wrapping_add(at).cast()) });
        macro_rules! stream {
            ($($index:literal at $at:literal)+) => { $( store_16!("movntdq" "vmovntdq", dst, quarters[$index], $at); )+ };
        }
        stream!(0 at 0 1 at 16 2 at 32 3 at 48);
        return true;
    }
    if how.line.is_direct {
        // SAFETY: 64 bytes on both sides and alignment by contract.
        unsafe {
            asm!(
                "movdir64b {dst}, [{src}]",
                src = in(reg) src,
                dst = in(reg) dst,
                options(nostack, preserves_flags),
            );
        }
        return true;
    }
    false
}

/// How a value of type `T` is stored: decided by its size alone.
struct Shape<T>(T);

impl<T> Shape<T> {
    const BYTES: usize = size_of::<T>();
    /// 1 to 64 bytes are stored here, all others by a routine.
    const IS_FIXED: bool = Self::BYTES >= 1 && Self::BYTES <= LINE_BYTES;
    const IS_LINE: bool = Self::BYTES == LINE_BYTES;
    /// In 16-byte pieces where address and routine allow it.
    const IS_WIDE: bool = Self::IS_FIXED && !Self::IS_LINE && Self::BYTES.is_multiple_of(16);
    /// The largest of the pieces of 8, 4, 2 and 1 bytes, in which every size can be stored, largest first. Where the first
    /// is aligned, all are.
    const ALIGN: usize = match Self::BYTES {
        8.. => 8,
        4.. => 4,
        2.. => 2,
        _ => 1,
    };
}

/// Stores `value` at `dst` with inlined instructions if its size is 1 to 64 bytes, `dst` is aligned for them, and `how`
/// has them; says whether it did.
///
/// # Safety
///
/// `dst` is valid for a store of `size_of::<T>()` bytes, and the processor has the instructions of `how`.
#[inline(always)]
pub(crate) unsafe fn store_value<T: IntoBytes + Immutable>(how: &Inlined, dst: *mut u8, value: &T) -> bool {
    let src: *const u8 = value.as_bytes().as_ptr();
    if Shape::<T>::IS_LINE && dst.addr().is_multiple_of(LINE_BYTES) {
        // SAFETY: a line at a multiple of 64; the rest is the contract.
        if unsafe { store_line(how, dst, src) } {
            return true;
        }
    }
    if Shape::<T>::IS_WIDE && dst.addr().is_multiple_of(16) && how.is_wide {
        macro_rules! sixteens {
            ($($at:literal)+) => { $(
                if $at < Shape::<T>::BYTES {
                    piece!(16 "movdqa" "vmovdqa", dst, src, $at);
                }
            )+ };
        }
        sixteens!(0 16 32);
        return true;
    }
    if !Shape::<T>::IS_FIXED || !dst.addr().is_multiple_of(Shape::<T>::ALIGN) {
        return false;
    }
    // The pieces lie side by side in both ranges, and as `dst` is aligned to the largest, each is aligned.
    macro_rules! eights {
        ($($at:literal)+) => { $(
            if $at + 8 <= Shape::<T>::BYTES {
                piece!(u64 reg ":r" "qword", dst, src, $at);
            }
        )+ };
    }
    eights!(0 8 16 24 32 40 48 56);
    if Shape::<T>::BYTES & 4 != 0 {
        piece!(u32 reg ":e" "dword", dst, src, Shape::<T>::BYTES & !7);
    }
    if Shape::<T>::BYTES & 2 != 0 {
        piece!(u16 reg ":x" "word", dst, src, Shape::<T>::BYTES & !3);
    }
    if Shape::<T>::BYTES & 1 != 0 {
        piece!(u8 reg_byte "" "byte", dst, src, Shape::<T>::BYTES & !1);
    }
    true
}
