//! CPU stores into and loads from NVIDIA GPU memory, through the PCIe aperture called BAR1.
//!
//! `cudaMemcpy` costs microseconds before the first byte moves. A GPU's memory can instead be mapped into a process like
//! any device memory; a store into the mapping is posted in nanoseconds, and a load is one round trip of the bus, about a
//! microsecond. That wins for messages, flags, doorbells and small results; it loses for bulk data, which belongs to the
//! copy engines.
//!
//! # The path
//!
//! ```text
//! DeviceRange ──pin──► Pinned ──map──► Mapping ──write/read──► copy routine ──► BAR1 ──PCIe──► GPU memory
//! ```
//!
//! 1. [`Session::open`] picks a backend, once.
//! 2. [`Session::alloc`] makes a [`DeviceBuffer`], or a [`DeviceRange`] names memory you already have.
//! 3. [`Session::pin`] takes hold of the device memory, and [`Pinned::map`] makes it appear, at any address and length.
//! 4. [`Mapping`] is written and read. Nothing on that path calls CUDA or the kernel, takes a lock or allocates.
//!
//! One core of a recent Xeon reads 1 KiB in a round trip. For more than a few kilobytes [`ParallelCopier`] shares a copy
//! among several cores, [`agent`] lets a block on the GPU push the data, and [`auto`] takes whichever of all ways is quickest
//! for the size, as measured and kept in a [`policy`].
//!
//! ```
//! use gdrcopy::{BackendKind, Session};
//!
//! // Without `.backend(..)` the session takes what the machine has; the emulated one runs everywhere.
//! let session = Session::builder().backend(BackendKind::Emulated).open()?;
//! let buffer = session.alloc(4096)?;
//! let mapping = session.pin(&buffer)?.map()?;
//!
//! mapping.write(100, b"seen by a kernel")?;   // stored, then SFENCE
//! mapping.write_value(64, &[1_u64, 2, 3])?;   // a size the compiler knows: the stores are inlined
//! mapping.publish(256, b"payload", 512, 1u32)?; // whoever sees the flag sees the payload
//! let answer = mapping.load_u32(512)?;        // one load over the bus
//! assert_eq!(answer, 1);
//! # Ok::<(), gdrcopy::Error>(())
//! ```
//!
//! A kernel that keeps running is talked to through [`channel`]: messages both ways, typed questions with a deadline, and
//! the newest of a series of values.
//!
//! # Backends
//!
//! | | needs | pins | after the memory is freed |
//! |---|---|---|---|
//! | `gdrdrv` | the kernel module, version 2.0 to 2.6 | anything the driver gives to RDMA | SIGBUS, or the old bytes stay: the module's setting; small `cudaMalloc` blocks alias |
//! | `rm` | the stock NVIDIA driver, any user of its device files; feature `cuda` | level `vmm`: every [`DeviceBuffer`], exportable `cuMemCreate` memory; level `ipc`: also `cudaMalloc` | old bytes stay; small `cudaMalloc` blocks alias |
//! | `vulkan` | Vulkan of the stock NVIDIA driver, a large BAR1; feature `vulkan` | every [`DeviceBuffer`], exportable `cuMemCreate` memory | old bytes stay; buffers of less than 64 KiB alias |
//! | `emulated` | nothing; only on request | its own host memory | both ways, by configuration |
//!
//! What is set in the program ([`SessionBuilder`]) wins over the environment (`GDRCOPY_BACKEND`, `GDRCOPY_RM`,
//! `GDRCOPY_COPY`, `GDRCOPY_POLICY`, `GDRCOPY_EMULATED_GPUS`), which wins over probing. Memory that the backend cannot map
//! is refused by kind, with the way out: see [`MemoryKind`].
//!
//! # Safety
//!
//! - A mapping never yields a reference to device memory, and device bytes are treated as a `Cell`'s would be: anybody,
//!   a kernel above all, may change them at any time. All methods are safe.
//! - [`DeviceRange::from_raw`] is the one unsafe door: *the allocation must outlive every mapping of it*. CUDA hands small
//!   freed blocks out again, so an old mapping would read and write the next owner's bytes. Ranges made from a
//!   [`DeviceBuffer`] or a cudarc slice borrow it, and so keep the duty by themselves.
//! - Forked children inherit no window. In a child every call on an inherited handle returns
//!   [`ErrorKind::WrongProcess`], and dropping one does nothing.
//!
//! # Ordering
//!
//! Write-combined memory is weakly ordered; the table at [`Mapping`] says what each verb promises, and what waiting for the
//! device takes.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_arch = "x86_64")))]
compile_error!("gdrcopy runs on 64-bit x86 Linux only so far: the copy routines for other processors are not written");

pub mod agent;
pub mod auto;
mod backend;
mod batch;
mod buffer;
mod builder;
pub mod channel;
pub mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod gpu;
mod mapping;
mod pinned;
pub mod policy;
mod publish;
mod range;
mod session;
mod sys;
#[cfg(feature = "tools")]
#[doc(hidden)]
pub mod tool;
mod value;

#[doc(hidden)]
pub use backend::P2pTokens;
pub use backend::emulated;
pub use backend::{AfterFree, Allocator, BackendKind, MappingType, RmLevel, Semantics};
pub use batch::Batch;
pub use buffer::DeviceBuffer;
pub use builder::{ProbeReport, SessionBuilder};
pub use copy::{ParallelCopier, ParallelCopierBuilder};
pub use error::{Error, ErrorKind, Feature, MemoryKind, Result};
pub use gpu::{Bar1, GpuInfo, Link, PciAddress};
pub use mapping::{Mapping, MappingFacts};
pub use pinned::{Pinned, UnpinError};
pub use policy::{Calibration, Policy};
pub use publish::Flag;
pub use range::{DeviceRange, GpuAddr};
pub use session::{CloseError, Session};
pub use sys::cpu::CpuList;
