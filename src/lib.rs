//! CPU stores into and loads from GPU memory.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_arch = "x86_64")))]
compile_error!("gdrcopy runs on 64-bit x86 Linux only so far: the copy routines for other processors are not written");

pub mod copy;
mod error;
mod sys;
#[cfg(feature = "tools")]
#[doc(hidden)]
pub mod tool;

pub use error::{Error, ErrorKind, Feature, MemoryKind, Result};
