//! Copies to and from write-combined memory.

#![allow(unsafe_code, reason = "every access to device memory is an instruction written here, on the caller's pointer")]

pub mod fence;
mod kernel;
mod plan;
mod scalar;
#[cfg(test)]
mod tests;
mod x86_64;

pub use kernel::{Routine, by_name, preferred, routines};
pub use scalar::{load_u8, load_u16, load_u32, load_u64, store_u8, store_u16, store_u32, store_u64};
