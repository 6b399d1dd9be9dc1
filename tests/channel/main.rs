//! Channels on emulated GPUs, where a thread plays the kernel: once in Rust, once as the very header and kernels that are
//! compiled for GPUs (`ffi/include/gdrcopy_channel.cuh`, `tests/ptx/channel.cu`, `tests/ptx/rings.cu`), compiled as C++.
#![allow(unsafe_code, missing_docs, reason = "tests call C++ and hand addresses to threads")]
#![allow(clippy::unwrap_used, reason = "tests may panic")]

#[path = "../common/mod.rs"]
mod common;
mod kernels;
mod latest;
mod limits;
mod mailbox;
mod rings;

use std::time::Duration;

use gdrcopy::emulated::EmulatedConfig;
use gdrcopy::{BackendKind, Session};

pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn session() -> Session {
    let builder = Session::builder().ignore_env().backend(BackendKind::Emulated);
    builder.emulated(EmulatedConfig::default()).open().unwrap()
}

/// Numbers of first lines: the usual one, and some that run over the end of 32 bits.
pub(crate) const STARTS: [u32; 3] = [0, u32::MAX - 40, 0x8000_0000 - 32];
