//! CPU stores into and loads from GPU memory.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_arch = "x86_64")))]
compile_error!("gdrcopy runs on 64-bit x86 Linux only so far: the copy routines for other processors are not written");

mod backend;
mod buffer;
pub mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod gpu;
mod mapping;
mod pinned;
mod range;
mod session;
mod sys;
#[cfg(feature = "tools")]
#[doc(hidden)]
pub mod tool;

pub use backend::emulated;
pub use backend::{AfterFree, Allocator, BackendKind, MappingType, RmLevel, Semantics};
pub use buffer::DeviceBuffer;
pub use error::{Error, ErrorKind, Feature, MemoryKind, Result};
pub use gpu::{Bar1, GpuInfo, Link, PciAddress};
pub use mapping::{Batch, Flag, Mapping, MappingFacts};
pub use pinned::{Pinned, UnpinError};
pub use range::{DeviceRange, GpuAddr};
pub use session::{CloseError, ProbeReport, Session, SessionBuilder};
