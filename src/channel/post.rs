//! How a line gets into the ring in GPU memory.

use std::arch::asm;

use super::layout::{LINE, LINE_PAYLOAD};
use super::part;
use crate::backend::MappingType;
use crate::copy::{self, Routine};
use crate::error::{Error, ErrorKind, Feature, Result};
use crate::mapping::Mapping;

/// A way of storing a line such that each part of 16 bytes arrives whole.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LineStore {
    /// Four aligned 16-byte stores, for cached memory.
    Parts,
    /// One AVX-512 store, the line put together in its register.
    Avx512,
    /// One direct store of a line put together in memory.
    Whole(&'static Routine),
}

fn available(name: &str) -> Option<&'static Routine> {
    copy::routines().iter().copied().find(|routine| routine.name() == name && routine.is_available())
}

fn is_whole(routine: &Routine) -> bool {
    ["avx512", "movdir64b"].contains(&routine.name())
}

impl LineStore {
    /// The mapping's own routine if it stores whole lines, else another one that does.
    pub(crate) fn choose(op: &'static str, mapping: &Mapping<'_>) -> Result<Self> {
        match mapping.mapping_type() {
            MappingType::Cached => return Ok(Self::Parts),
            MappingType::WriteCombining => {}
            other => {
                let cause = format!("a mapping of type '{other}' takes 8 bytes at a time, and a part of a line has 16");
                return Err(Error::new(op, ErrorKind::UnsupportedFeature(Feature::MappingType), cause)
                    .remedy("use a backend that maps write-combined"));
            }
        }
        let own = Some(mapping.routine()).filter(|routine| is_whole(routine));
        own.or_else(|| available("movdir64b")).or_else(|| available("avx512")).map(Self::of).ok_or_else(|| {
            let cause = "this processor has no store of a whole line, neither AVX-512 nor MOVDIR64B, and a line made of \
                         smaller stores may reach the GPU in pieces";
            Error::new(op, ErrorKind::UnsupportedFeature(Feature::CopyRoutine), cause)
                .remedy("use Mapping::publish, which fences")
        })
    }

    pub(crate) fn of(routine: &'static Routine) -> Self {
        if routine.name() == "avx512" { Self::Avx512 } else { Self::Whole(routine) }
    }

    /// Stores line `number` at `at`, without a fence.
    ///
    /// # Safety
    ///
    /// `at` is a multiple of 64 and valid for a store of 64 bytes, which are borrowed nowhere as a reference; the
    /// instructions are available, for [`LineStore::Parts`] AVX, and the memory is ordinary host memory then.
    #[inline(always)]
    pub(crate) unsafe fn line(self, at: *mut u8, number: u32, payload: &[u8; LINE_PAYLOAD]) {
        match self {
            // SAFETY: the caller's duties.
            Self::Parts => unsafe { part::store_line(at, number, payload) },
            // SAFETY: the caller's duties.
            Self::Avx512 => unsafe { avx512_line(at, number, payload) },
            // SAFETY: the caller's duties.
            Self::Whole(routine) => unsafe { routine.post_line(at, &part::line(number, payload)) },
        }
    }

    /// Stores a line that holds `value` in each of its words: whoever loads one finds it whole.
    ///
    /// # Safety
    ///
    /// As [`LineStore::line`].
    #[inline(always)]
    pub(crate) unsafe fn word(self, at: *mut u8, value: u32) {
        let payload = [value.to_le_bytes(); LINE_PAYLOAD / 4];
        let payload: &[u8; LINE_PAYLOAD] = payload.as_flattened().first_chunk().unwrap_or(&[0; LINE_PAYLOAD]);
        // SAFETY: the caller's duties.
        unsafe { self.line(at, value, payload) }
    }
}

/// The dwords of a line that hold payload: all but the first of each part.
const PAYLOAD_DWORDS: u32 = 0xeeee;

/// Every dword of the register is the number; then 12 dwords of payload are put in their places (VPEXPANDD with merging,
/// Intel SDM volume 2, reads as many dwords as the mask has bits).
///
/// # Safety
///
/// `at` is a multiple of 64 and valid for a store of 64 bytes; the processor has AVX-512F.
#[inline(always)]
unsafe fn avx512_line(at: *mut u8, number: u32, payload: &[u8; LINE_PAYLOAD]) {
    debug_assert!(at.addr().is_multiple_of(LINE), "line store at {at:p}");
    // SAFETY: 48 bytes are read from a live array and 64 stored where the caller says; the registers are declared. SSE
    // code cannot name zmm16, so no state is left that would slow it down.
    unsafe {
        asm!(
            "kmovw k1, {mask:e}",
            "vpbroadcastd zmm16, {number:e}",
            "vpexpandd zmm16 {{k1}}, zmmword ptr [{payload}]",
            "vmovntdq zmmword ptr [{at}], zmm16",
            mask = in(reg) PAYLOAD_DWORDS,
            number = in(reg) number,
            payload = in(reg) payload.as_ptr(),
            at = in(reg) at,
            out("zmm16") _,
            out("k1") _,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Lines([u8; 3 * LINE]);

    #[test]
    fn every_way_stores_the_same_line_and_no_other() {
        let payload: [u8; LINE_PAYLOAD] = std::array::from_fn(|n| u8::try_from(n * 5 + 1).unwrap());
        let number = 0xfeed_0123_u32;
        let mut wanted = [0x55; 3 * LINE];
        for part in 0..4 {
            let at = LINE + 16 * part;
            wanted[at..at + 4].copy_from_slice(&number.to_le_bytes());
            wanted[at + 4..at + 16].copy_from_slice(&payload[12 * part..12 * part + 12]);
        }
        let whole = copy::routines().iter().filter(|routine| is_whole(routine) && routine.is_available());
        for way in whole.map(|&routine| LineStore::of(routine)).chain([LineStore::Parts]) {
            let mut lines = Lines([0x55; 3 * LINE]);
            // SAFETY: the second of three lines of an aligned array; the instructions are available.
            unsafe { way.line(lines.0.as_mut_ptr().wrapping_add(LINE), number, &payload) };
            copy::fence::full();
            assert_eq!(lines.0, wanted, "{way:?}");
            let mut back = [0; LINE_PAYLOAD];
            // SAFETY: as above.
            assert!(unsafe { part::load_line(lines.0.as_ptr().wrapping_add(LINE), number, &mut back) });
            assert_eq!(back, payload);
            // SAFETY: as above.
            assert!(!unsafe { part::load_line(lines.0.as_ptr().wrapping_add(LINE), number + 1, &mut back) });
            // SAFETY: as above.
            unsafe { way.word(lines.0.as_mut_ptr().wrapping_add(LINE), 0x0102_0304) };
            copy::fence::full();
            assert_eq!(lines.0[LINE..2 * LINE], [4, 3, 2, 1].repeat(16));
        }
    }

    #[test]
    fn a_line_with_one_old_part_is_not_there() {
        let payload = [7; LINE_PAYLOAD];
        for old in 0..4 {
            let mut lines = Lines([0; 3 * LINE]);
            lines.0[..LINE].copy_from_slice(&part::line(9, &payload));
            lines.0[16 * old] = 8;
            // SAFETY: a line of an aligned array.
            assert!(!unsafe { part::load_line(lines.0.as_ptr(), 9, &mut [0; LINE_PAYLOAD]) });
        }
    }
}
