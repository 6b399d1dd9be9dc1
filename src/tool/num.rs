//! Conversions between integers and floating point, for display and for reports.

#![allow(
    clippy::as_conversions,
    reason = "there is no From between 64-bit integers and f64; rounding is what is wanted here"
)]

/// Nearest `f64`; exact up to 2^53.
pub(crate) fn f64_of(n: u64) -> f64 {
    n as f64
}

/// Rounded, saturating; 0 for NaN.
pub(crate) fn u64_of_f64(x: f64) -> u64 {
    x.round() as u64
}

/// Rounded, saturating; 0 for NaN.
pub(crate) fn i32_of_f64(x: f64) -> i32 {
    x.round() as i32
}
