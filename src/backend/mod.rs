//! Ways to make GPU memory appear in this process, behind one sealed trait.
//!
//! A backend is chosen once, when the session opens. It only ever sees ranges that are not empty and do not wrap, and
//! its objects are dropped in the process that made them and in no other: the types above see to both.

use std::fmt;
use std::ptr::NonNull;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{GpuInfo, PciAddress};
use crate::range::{GpuAddr, Span};

pub mod emulated;
pub(crate) mod gdrdrv;
#[cfg(feature = "cuda")]
pub(crate) mod rm;
#[cfg(feature = "vulkan")]
pub(crate) mod vulkan;

/// A way to make GPU memory appear in a process.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BackendKind {
    /// The kernel module `gdrdrv`, ours or upstream's, versions 2.0 to 2.6.
    Gdrdrv,
    /// The resource manager of the stock NVIDIA driver: no further kernel module. Needs feature `cuda`.
    Rm,
    /// Vulkan of the stock NVIDIA driver: public calls alone. Needs feature `vulkan`.
    Vulkan,
    /// Host memory standing in for GPUs. Only on request.
    Emulated,
}

impl BackendKind {
    /// In the order in which they are tried.
    const ALL: [Self; 4] = [Self::Gdrdrv, Self::Rm, Self::Vulkan, Self::Emulated];

    /// The name used in `GDRCOPY_BACKEND` and in every report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gdrdrv => "gdrdrv",
            Self::Rm => "rm",
            Self::Vulkan => "vulkan",
            Self::Emulated => "emulated",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for BackendKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::new("open", ErrorKind::InvalidArgument, format!("unknown backend '{text}'"))
                .remedy(format!("choose one of: {names}"))
        })
    }
}

/// What the `rm` backend may map.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RmLevel {
    /// Nothing.
    Off,
    /// Memory exported through documented CUDA calls: every [`DeviceBuffer`](crate::DeviceBuffer), and exportable
    /// `cuMemCreate` memory. The default.
    Vmm,
    /// Also `cudaMalloc` memory, through a handle layout that is learnt and proven at run time.
    Ipc,
}

impl RmLevel {
    const ALL: [Self; 3] = [Self::Off, Self::Vmm, Self::Ipc];

    /// The name used in `GDRCOPY_RM`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Vmm => "vmm",
            Self::Ipc => "ipc",
        }
    }
}

impl fmt::Display for RmLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for RmLevel {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|level| level.name() == text).ok_or_else(|| {
            Error::new("open", ErrorKind::InvalidArgument, format!("unknown rm level '{text}'"))
                .remedy("choose one of: off, vmm, ipc")
        })
    }
}

/// How the CPU caches a mapping.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MappingType {
    /// Write-combining: stores gather into 64-byte lines, loads are not cached.
    WriteCombining,
    /// Ordinary cached memory.
    Cached,
    /// Device memory: single accesses of up to 8 aligned bytes, in order, nothing gathered.
    Device,
}

impl fmt::Display for MappingType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::WriteCombining => "WC",
            Self::Cached => "cached",
            Self::Device => "device",
        })
    }
}

/// What an old mapping shows once its allocation has been freed.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AfterFree {
    /// The old bytes stay, and the device memory stays in use, until the pin is gone.
    Persistent,
    /// The block shares its memory object with others: the mapping shows the next owner's bytes.
    Aliased,
    /// Access raises SIGBUS.
    Sigbus,
}

/// After-free behaviour of a backend, by how the memory was allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Semantics {
    /// Memory that owns its whole object: [`DeviceBuffer::owns_object`](crate::DeviceBuffer::owns_object).
    pub whole_object: AfterFree,
    /// Small allocations that share an object with others: a `cudaMalloc` of less than 2 MiB, on backend `vulkan` a
    /// buffer of less than 64 KiB.
    pub shared_object: AfterFree,
}

/// How device memory is allocated.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Allocator {
    /// The library's own: line-aligned, takes the backend's easiest way. It owns its whole memory object, except for
    /// buffers of less than 64 KiB on backend `vulkan`, which share one.
    #[default]
    Buffer,
    /// `cuMemAlloc`, which is `cudaMalloc`: small blocks share an object with others.
    CuMemAlloc,
    /// `cuMemCreate` and `cuMemMap`, exportable as a file descriptor, as a program with its own VMM allocator makes it.
    CuMemCreate,
}

impl Allocator {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Buffer, "buffer"), (Self::CuMemAlloc, "cuMemAlloc"), (Self::CuMemCreate, "cuMemCreate")];

    /// The name the tools use.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }
}

impl fmt::Display for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Allocator {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.iter().find(|(_, name)| name.eq_ignore_ascii_case(text)).map(|(kind, _)| *kind).ok_or_else(|| {
            Error::new("alloc", ErrorKind::InvalidArgument, format!("unknown allocator '{text}'"))
                .remedy("choose one of: buffer, cuMemAlloc, cuMemCreate")
        })
    }
}

/// Old RDMA tokens of CUDA (`CU_POINTER_ATTRIBUTE_P2P_TOKENS`), for modules that are told of frees; 0 everywhere else.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct P2pTokens {
    /// `p2pToken`.
    pub p2p: u64,
    /// `vaSpaceToken`.
    pub va_space: u32,
}

/// Facts that a backend knows about one pin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinFacts {
    pub(crate) after_free: AfterFree,
    pub(crate) pci: Option<PciAddress>,
    /// Whether writes of the CPU become visible to the device in the order made, without a further CUDA call.
    pub(crate) ordered_writes: bool,
}

/// One way to reach device memory. Private, and so sealed.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    fn kind(&self) -> BackendKind;

    fn semantics(&self) -> Semantics;

    /// The level, for `rm`.
    fn rm_level(&self) -> Option<RmLevel> {
        None
    }

    /// The version of the kernel module in use, major and minor.
    fn module_version(&self) -> Option<(u32, u32)> {
        None
    }

    fn emulated(&self) -> Option<&emulated::Emulated> {
        None
    }

    fn gpus(&self) -> Result<Vec<GpuInfo>>;

    fn alloc(&self, ordinal: Option<usize>, bytes: usize, how: Allocator) -> Result<Box<dyn Allocation>>;

    /// Takes hold of the device memory of `span`.
    fn pin(&self, span: Span) -> Result<Box<dyn Pin>>;

    /// Takes hold of the whole GPU pages around `asked`, which parts of an allocation, or the rest of its memory object,
    /// may share: what a driver pins when it is asked for less.
    fn pin_pages(&self, asked: Span, tokens: P2pTokens) -> Result<Box<dyn Pin>> {
        let _ = tokens;
        self.pin(asked.gpu_pages("pin")?)
    }

    /// Takes hold of memory that another process exported as a file descriptor.
    fn pin_export(&self, fd: std::os::fd::BorrowedFd<'_>, gpu: PciAddress, bytes: usize) -> Result<Box<dyn Pin>> {
        let _ = (fd, gpu, bytes);
        Err(Error::new(
            "pin",
            ErrorKind::UnsupportedFeature(crate::Feature::Operation),
            format!("backend '{}' cannot import exported memory", self.kind()),
        )
        .remedy("use backend 'rm'"))
    }

    /// Gives everything back; called once, when nothing else refers to the backend.
    fn close(&self) -> Result<()>;
}

/// Device memory that a backend holds.
pub(crate) trait Pin: fmt::Debug + Send + Sync {
    fn facts(&self) -> PinFacts;

    /// Makes earlier writes over PCIe visible to the device by a call into CUDA.
    fn cuda_flush(&self) -> Result<()> {
        Ok(())
    }

    /// Whether the memory was taken away from the pin because it was freed. Never, where pins keep memory alive.
    fn is_revoked(&self) -> Result<bool> {
        Ok(false)
    }

    /// Makes the whole range appear, mapped as wanted, or as the backend does it by itself.
    fn map(&self, want: Option<MappingType>) -> Result<Box<dyn View>>;

    /// Lets go. Called once, with no view left.
    fn release(&mut self) -> Result<()>;
}

/// Refuses a mapping type that a backend with but one does not have.
pub(crate) fn only(kind: BackendKind, has: MappingType, want: Option<MappingType>) -> Result<()> {
    match want {
        Some(want) if want != has => Err(no_such_type(kind, want)),
        _ => Ok(()),
    }
}

#[cold]
pub(crate) fn no_such_type(kind: BackendKind, want: MappingType) -> Error {
    let cause = format!("backend '{kind}' cannot map this memory as '{want}'");
    Error::new("map", ErrorKind::UnsupportedFeature(crate::Feature::MappingType), cause)
        .remedy("map it without asking for a type")
}

/// Device memory in this process's address space.
pub(crate) trait View: fmt::Debug + Send + Sync {
    /// The first byte asked for.
    fn ptr(&self) -> NonNull<u8>;

    fn mapping_type(&self) -> MappingType;

    /// Address space used, in bytes.
    fn window_bytes(&self) -> usize;

    /// Unmaps. Called once.
    fn release(&mut self) -> Result<()>;
}

/// Device memory that the library allocated.
pub(crate) trait Allocation: fmt::Debug + Send + Sync {
    fn addr(&self) -> GpuAddr;

    fn ordinal(&self) -> usize;

    /// Whether no other allocation can be in the same memory object.
    fn owns_object(&self) -> bool;

    /// Host to device through the device's own copy engine, complete on return.
    fn upload(&self, offset: usize, from: &[u8]) -> Result<()>;

    /// Device to host through the device's own copy engine.
    fn download(&self, offset: usize, to: &mut [u8]) -> Result<()>;

    /// Makes the memory's CUDA context current on this thread.
    fn make_current(&self) -> Result<()> {
        Ok(())
    }

    /// A file descriptor through which another process can pin the memory.
    fn export(&self) -> Result<std::os::fd::OwnedFd> {
        Err(Error::new(
            "export",
            ErrorKind::UnsupportedFeature(crate::Feature::Operation),
            "this memory cannot be exported as a file descriptor",
        )
        .remedy("allocate it with Session::alloc on backend 'rm'"))
    }

    /// Frees. Called once.
    fn free(&mut self) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_list_the_choices() {
        for kind in BackendKind::ALL {
            assert_eq!(kind.name().parse::<BackendKind>().unwrap(), kind);
        }
        for level in RmLevel::ALL {
            assert_eq!(level.name().parse::<RmLevel>().unwrap(), level);
        }
        for (how, name) in Allocator::ALL {
            assert_eq!(name.parse::<Allocator>().unwrap(), how);
        }
        let error = "rdma".parse::<BackendKind>().unwrap_err().to_string();
        assert!(error.contains("unknown backend 'rdma'") && error.contains("gdrdrv, rm, vulkan, emulated"), "{error}");
    }
}
