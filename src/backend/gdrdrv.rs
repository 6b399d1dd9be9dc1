//! Backend `gdrdrv`: the kernel module of that name, ours or upstream's.
//!
//! The module pins whole GPU pages of 64 KiB and maps from the first of them, so ranges are rounded here and the
//! mapping starts inside. What it can pin is what the GPU's driver gives to RDMA: any allocation of a capable GPU.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::backend::{
    AfterFree, Allocation, Allocator, Backend, BackendKind, MappingType, P2pTokens, Pin, PinFacts, Semantics, View,
    no_such_type,
};
use crate::error::{Error, ErrorKind, MemoryKind, Result};
use crate::gpu::{GpuInfo, PciAddress};
use crate::range::Span;
use crate::sys::gdrdrv::{Mapped, Module};
use crate::sys::num::{u64_of, usize_of};
use crate::sys::window::{HUGE, PAGE, Window};

#[cfg(feature = "cuda")]
use crate::cuda::{
    context::Device,
    driver::Driver,
    pointer::{Block, Pools},
};

/// The backend.
#[derive(Debug)]
pub(crate) struct Gdrdrv {
    module: Arc<Module>,
}

impl Gdrdrv {
    pub(crate) fn open() -> Result<Self> {
        let module = Module::open()?;
        tracing::debug!(version = %module.version(), persistent = module.persistent(), "gdrdrv is open");
        Ok(Self { module: Arc::new(module) })
    }
}

impl Gdrdrv {
    /// Pins the pages around `asked`, and shows `shown` of them.
    fn hold(&self, asked: Span, shown: Span, known: Known, tokens: P2pTokens) -> Result<Box<dyn Pin>> {
        let pages = asked.gpu_pages("pin")?;
        let handle = self
            .module
            .pin(pages.addr.raw(), u64_of(pages.len), (tokens.p2p, tokens.va_space))
            .map_err(|errno| refused(errno, asked))?;
        let head = usize_of(shown.addr.raw() - pages.addr.raw());
        Ok(Box::new(GdrPin { module: Arc::clone(&self.module), handle, asked, span: shown, head, known }))
    }
}

/// What CUDA knows of the memory, where CUDA is there to ask.
#[derive(Debug, Default)]
struct Known {
    #[cfg(feature = "cuda")]
    block: Option<(Block, Device)>,
}

#[cfg(feature = "cuda")]
impl Known {
    /// Refuses what CUDA says cannot be pinned, or reaches past its allocation: the module sees whole pages only.
    fn of(span: Span) -> Result<Self> {
        let Ok(driver) = Driver::get() else { return Ok(Self::default()) };
        let block = Block::of(driver, span.addr, Pools::Fine)?.around(driver, span.addr);
        block.contains(span)?;
        Ok(Self { block: Some((block, Device::new(driver, block.ordinal)?)) })
    }

    /// The same for a range whose ends a client rounded to pages: the first byte may be nobody's and the last too far,
    /// which the driver judges.
    fn of_pages(span: Span) -> Result<Self> {
        let Ok(driver) = Driver::get() else { return Ok(Self::default()) };
        match Block::of(driver, span.addr, Pools::Fine) {
            Ok(block) => {
                let block = block.around(driver, span.addr);
                Ok(Self { block: Some((block, Device::new(driver, block.ordinal)?)) })
            }
            Err(error) if error.kind() == ErrorKind::UnsupportedMemory(MemoryKind::Unallocated) => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    fn pci(&self) -> Option<PciAddress> {
        self.block.as_ref().and_then(|(_, device)| device.pci().ok())
    }

    fn ordered_writes(&self) -> bool {
        self.block.as_ref().is_some_and(|(_, device)| device.orders_writes())
    }

    /// Whether CUDA keeps the memory for other blocks when this one is freed: the module is not told then, and the next
    /// owner has the same bytes.
    fn shares_object(&self) -> bool {
        self.block.as_ref().is_some_and(|(block, _)| block.shares_object())
    }

    fn flush(&self) -> Option<Result<()>> {
        self.block.as_ref().map(|(_, device)| device.flush_writes())
    }

    /// Whether the address still leads to the same allocation.
    fn still(&self, span: Span) -> bool {
        self.block.as_ref().is_none_or(|(block, device)| {
            Block::of(device.driver, span.addr, Pools::Fine)
                .is_ok_and(|now| now.around(device.driver, span.addr) == *block)
        })
    }
}

#[cfg(not(feature = "cuda"))]
impl Known {
    #[allow(clippy::unnecessary_wraps, reason = "has the shape of its twin that asks CUDA")]
    fn of(_span: Span) -> Result<Self> {
        Ok(Self::default())
    }

    fn of_pages(span: Span) -> Result<Self> {
        Self::of(span)
    }

    fn pci(&self) -> Option<PciAddress> {
        None
    }

    fn ordered_writes(&self) -> bool {
        false
    }

    fn shares_object(&self) -> bool {
        false
    }

    fn flush(&self) -> Option<Result<()>> {
        None
    }

    fn still(&self, _span: Span) -> bool {
        true
    }
}

#[cfg(not(feature = "cuda"))]
fn without_cuda(op: &'static str) -> Error {
    Error::new(
        op,
        ErrorKind::UnsupportedFeature(crate::Feature::Operation),
        "built without CUDA, which knows the GPUs and allocates their memory",
    )
    .remedy("build gdrcopy with feature 'cuda', or pin memory that the program allocates itself")
}

impl Backend for Gdrdrv {
    fn kind(&self) -> BackendKind {
        BackendKind::Gdrdrv
    }

    fn semantics(&self) -> Semantics {
        Semantics { whole_object: after_free(&self.module), shared_object: AfterFree::Aliased }
    }

    fn module_version(&self) -> Option<(u32, u32)> {
        let version = self.module.version();
        Some((version.major, version.minor))
    }

    fn gpus(&self) -> Result<Vec<GpuInfo>> {
        #[cfg(feature = "cuda")]
        return crate::cuda::gpus();
        #[cfg(not(feature = "cuda"))]
        Err(without_cuda("list GPUs"))
    }

    fn alloc(&self, ordinal: Option<usize>, bytes: usize, how: Allocator) -> Result<Box<dyn Allocation>> {
        #[cfg(feature = "cuda")]
        return crate::cuda::allocate(ordinal, bytes, how);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (ordinal, bytes, how);
            Err(without_cuda("alloc"))
        }
    }

    fn pin(&self, span: Span) -> Result<Box<dyn Pin>> {
        self.hold(span, span, Known::of(span)?, P2pTokens::default())
    }

    fn pin_pages(&self, asked: Span, tokens: P2pTokens) -> Result<Box<dyn Pin>> {
        self.hold(asked, asked.gpu_pages("pin")?, Known::of_pages(asked)?, tokens)
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

fn after_free(module: &Module) -> AfterFree {
    if module.persistent() { AfterFree::Persistent } else { AfterFree::Sigbus }
}

fn refused(errno: i32, span: Span) -> Error {
    let addr = span.addr;
    match errno {
        libc::EINVAL => Error::new(
            "pin",
            ErrorKind::UnsupportedMemory(MemoryKind::Unallocated),
            format!("the GPU's driver does not pin {} bytes at {addr} for RDMA", span.len),
        )
        .errno(errno)
        .remedy(
            "pass GPU memory that this process allocated and did not free; GeForce GPUs cannot do this at all, and \
             cuMemCreate memory must be created RDMA-capable",
        ),
        libc::ENOMEM => {
            Error::new("pin", ErrorKind::Bar1Exhausted, format!("no room to pin {} bytes at {addr}", span.len))
                .errno(errno)
                .remedy("unpin other memory, pin a smaller range, or enable Resizable BAR in the firmware")
        }
        libc::EOPNOTSUPP => Error::new(
            "pin",
            ErrorKind::UnsupportedMemory(MemoryKind::Foreign),
            format!("the GPU's driver cannot pin the memory at {addr}"),
        )
        .errno(errno)
        .remedy("allocate with Session::alloc"),
        _ => Error::from_errno("pin", errno, format!("gdrdrv did not pin {} bytes at {addr}", span.len)),
    }
}

#[derive(Debug)]
struct GdrPin {
    module: Arc<Module>,
    handle: u64,
    /// What the program named, of which CUDA is asked.
    asked: Span,
    span: Span,
    /// Bytes of the first GPU page before the range.
    head: usize,
    known: Known,
}

impl GdrPin {
    fn stale(&self) -> Error {
        let cause = format!("the allocation at {} was freed or replaced since it was pinned", self.span.addr);
        Error::new("map", ErrorKind::Stale, cause)
            .remedy("keep the allocation alive while it is pinned, and pin the new one")
    }

    fn request(&self, want: MappingType) -> Result<()> {
        let wanted = match want {
            MappingType::WriteCombining => Mapped::WriteCombining,
            MappingType::Cached => Mapped::Cached,
            MappingType::Device => Mapped::Device,
        };
        match self.module.request(self.handle, wanted) {
            // Modules that cannot be asked map as they do; what came of it is checked afterwards.
            Ok(_) => Ok(()),
            Err(libc::EOPNOTSUPP | libc::EINVAL) => Err(no_such_type(BackendKind::Gdrdrv, want)),
            Err(errno) => Err(Error::from_errno("map", errno, "gdrdrv did not take the mapping type")),
        }
    }
}

impl Pin for GdrPin {
    fn facts(&self) -> PinFacts {
        PinFacts {
            after_free: if self.known.shares_object() { AfterFree::Aliased } else { after_free(&self.module) },
            pci: self.known.pci(),
            ordered_writes: self.known.ordered_writes(),
        }
    }

    fn cuda_flush(&self) -> Result<()> {
        self.known.flush().unwrap_or_else(|| {
            Err(Error::new(
                "publish",
                ErrorKind::UnsupportedFeature(crate::Feature::Publish),
                "CUDA is not there to flush writes",
            )
            .remedy("keep data and flag in one 64-byte line (post_line)"))
        })
    }

    fn is_revoked(&self) -> Result<bool> {
        self.module.freed(self.handle)
    }

    fn map(&self, want: Option<MappingType>) -> Result<Box<dyn View>> {
        if self.module.freed(self.handle)? || !self.known.still(self.asked) {
            return Err(self.stale());
        }
        if let Some(want) = want {
            self.request(want)?;
        }
        let bytes = (self.head + self.span.len).checked_next_multiple_of(PAGE).ok_or_else(|| {
            Error::new("map", ErrorKind::OutOfMemory, format!("no address space for {} bytes", self.span.len))
        })?;
        let phase = usize_of((self.span.addr.raw() - u64_of(self.head)) % u64_of(HUGE));
        let mut window = Window::reserve("map", bytes, phase)?;
        window.place("map", 0, bytes, self.module.fd(), self.handle << PAGE.trailing_zeros()).map_err(|error| {
            // The memory can have gone since it was asked after.
            if self.module.freed(self.handle).unwrap_or(false) { self.stale() } else { error }
        })?;
        let mapping_type = match self.module.mapped(self.handle)? {
            Mapped::WriteCombining => MappingType::WriteCombining,
            Mapped::Cached => MappingType::Cached,
            Mapped::Device => MappingType::Device,
            Mapped::Not => {
                return Err(Error::new("map", ErrorKind::Stale, "the window was revoked while it was made")
                    .remedy("keep the allocation alive while it is mapped"));
            }
        };
        match want {
            Some(want) if want != mapping_type => Err(no_such_type(BackendKind::Gdrdrv, want)),
            _ => Ok(Box::new(GdrView { head: self.head, mapping_type, window: Some(window) })),
        }
    }

    fn release(&mut self) -> Result<()> {
        self.module.unpin(self.handle)
    }
}

#[derive(Debug)]
struct GdrView {
    head: usize,
    mapping_type: MappingType,
    window: Option<Window>,
}

impl View for GdrView {
    fn ptr(&self) -> NonNull<u8> {
        let base = self.window.as_ref().map_or(NonNull::dangling(), Window::base);
        base.map_addr(|addr| addr.saturating_add(self.head))
    }

    fn mapping_type(&self) -> MappingType {
        self.mapping_type
    }

    fn window_bytes(&self) -> usize {
        self.window.as_ref().map_or(0, Window::len)
    }

    fn release(&mut self) -> Result<()> {
        self.window.take().map_or(Ok(()), Window::unmap)
    }
}
