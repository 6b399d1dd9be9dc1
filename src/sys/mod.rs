//! The only module that talks to the operating system: system calls, device files, address space.
//!
//! Everything above deals in `Result`s and owned values.

#![allow(unsafe_code, reason = "system calls and raw address space are this module's whole purpose")]

pub(crate) mod cpu;
pub(crate) mod date;
pub(crate) mod gdrdrv;
pub(crate) mod ioctl;
pub(crate) mod num;
pub(crate) mod process;
#[cfg(feature = "cuda")]
pub(crate) mod rm;
pub(crate) mod window;
