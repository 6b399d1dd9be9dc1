//! Integer conversions that cannot fail on the 64-bit targets this crate builds for.

#![allow(clippy::as_conversions, reason = "usize and u64 have the same width here; the crate refuses other targets")]

pub(crate) const fn u64_of(n: usize) -> u64 {
    n as u64
}

pub(crate) const fn usize_of(n: u64) -> usize {
    n as usize
}

/// The number behind an `errno`.
pub(crate) const fn raw_errno(errno: nix::Error) -> i32 {
    errno as i32
}
