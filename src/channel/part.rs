//! The 16 bytes that are stored and loaded by one access.

use std::arch::asm;
use std::arch::x86_64::__m128i;

use super::layout::{LINE, LINE_PAYLOAD, PART, PART_PAYLOAD, PARTS};
use crate::error::{Error, ErrorKind, Feature, Result};

/// Refuses a processor for which a 16-byte access may be two.
pub(crate) fn require_avx(op: &'static str) -> Result<()> {
    if is_x86_feature_detected!("avx") {
        return Ok(());
    }
    let cause = "this processor does not promise 16-byte accesses to be whole: it has no AVX";
    Err(Error::new(op, ErrorKind::UnsupportedFeature(Feature::CopyRoutine), cause)
        .remedy("use a processor from 2011 or later, or Mapping::publish"))
}

/// Loads a part: MOVDQA, which is one access where there is AVX (Intel SDM volume 3A, 9.1.1).
///
/// # Safety
///
/// `at` is a multiple of 16 and valid for a load of 16 bytes of ordinary host memory, which are borrowed nowhere as a
/// mutable reference.
#[inline(always)]
unsafe fn load(at: *const u8) -> [u8; PART] {
    let value: __m128i;
    // SAFETY: one aligned load, which is the caller's word; no flags, no stack.
    unsafe {
        asm!("movdqa {value}, xmmword ptr [{at}]", at = in(reg) at, value = out(xmm_reg) value, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: both are 16 bytes without a forbidden pattern.
    unsafe { std::mem::transmute::<__m128i, [u8; PART]>(value) }
}

/// Stores a part: MOVDQA, one access as above.
///
/// # Safety
///
/// `at` is a multiple of 16 and valid for a store of 16 bytes, which are borrowed nowhere as a reference.
#[inline(always)]
unsafe fn store(at: *mut u8, part: [u8; PART]) {
    // SAFETY: both are 16 bytes without a forbidden pattern.
    let value = unsafe { std::mem::transmute::<[u8; PART], __m128i>(part) };
    // SAFETY: one aligned store, which is the caller's word; no flags, no stack.
    unsafe {
        asm!("movdqa xmmword ptr [{at}], {value}", at = in(reg) at, value = in(xmm_reg) value, options(nostack, preserves_flags));
    }
}

/// A part of line `number` with its share of the payload.
#[inline(always)]
fn part(number: u32, payload: &[u8; LINE_PAYLOAD], index: usize) -> [u8; PART] {
    let mut part = [0; PART];
    part[..4].copy_from_slice(&number.to_le_bytes());
    part[4..].copy_from_slice(&payload[index * PART_PAYLOAD..(index + 1) * PART_PAYLOAD]);
    part
}

/// The bytes of line `number`.
#[inline(always)]
pub(crate) fn line(number: u32, payload: &[u8; LINE_PAYLOAD]) -> [u8; LINE] {
    let mut line = [0; LINE];
    for index in 0..PARTS {
        line[index * PART..(index + 1) * PART].copy_from_slice(&part(number, payload, index));
    }
    line
}

/// Loads the line at `at` and puts its payload in `to`, if it is line `number` in all its parts.
///
/// # Safety
///
/// `at` is a multiple of 64 and valid for loads of 64 bytes of ordinary host memory, borrowed nowhere as a mutable
/// reference; the processor has AVX.
#[inline(always)]
pub(crate) unsafe fn load_line(at: *const u8, number: u32, to: &mut [u8; LINE_PAYLOAD]) -> bool {
    let mut is_there = true;
    for index in 0..PARTS {
        // SAFETY: a part of the caller's line.
        let part = unsafe { load(at.wrapping_add(index * PART)) };
        is_there &= part[..4] == number.to_le_bytes();
        to[index * PART_PAYLOAD..(index + 1) * PART_PAYLOAD].copy_from_slice(&part[4..]);
    }
    is_there
}

/// The number that the first part of the line at `at` carries.
///
/// # Safety
///
/// As [`load_line`].
#[inline(always)]
pub(crate) unsafe fn load_number(at: *const u8) -> u32 {
    // SAFETY: the first part of the caller's line.
    let [a, b, c, d, ..] = unsafe { load(at) };
    u32::from_le_bytes([a, b, c, d])
}

/// Stores line `number` part by part.
///
/// # Safety
///
/// `at` is a multiple of 64 and valid for stores of 64 bytes of ordinary host memory, borrowed nowhere as a reference; the
/// processor has AVX.
#[inline(always)]
pub(crate) unsafe fn store_line(at: *mut u8, number: u32, payload: &[u8; LINE_PAYLOAD]) {
    for index in 0..PARTS {
        // SAFETY: a part of the caller's line.
        unsafe { store(at.wrapping_add(index * PART), part(number, payload, index)) };
    }
}
