//! Backend `rm`: the resource manager of the stock NVIDIA driver, as CUDA itself uses it. No further kernel module.
//!
//! Level `vmm` imports what CUDA exports through documented calls. Level `ipc` duplicates the object behind
//! `cudaMalloc` memory, whose handle is learnt (see `ipc`).

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use crate::backend::{
    AfterFree, Allocation, Allocator, Backend, BackendKind, MappingType, P2pTokens, Pin, PinFacts, RmLevel, Semantics,
    View, only,
};
use crate::cuda::context::Device;
use crate::cuda::driver::Driver;
use crate::cuda::memory::{SHARED_BELOW, VmmHandle};
use crate::cuda::pointer::{Block, Pools};
use crate::error::{Error, ErrorKind, Feature, MemoryKind, Result};
use crate::gpu::{GpuInfo, PciAddress};
use crate::range::{GPU_PAGE, GpuAddr, Span};
use crate::sys::num::{u64_of, usize_of};

mod atlas;
mod ipc;
mod node;
pub(crate) mod policy;
mod prove;
mod view;

use ipc::{Identity, Secured, World, changed, inside, secure};
use node::{Held, Manager};
use prove::{Live, Prover};

/// The backend.
#[derive(Debug)]
pub(crate) struct Rm {
    manager: Arc<Manager>,
    level: RmLevel,
    /// Whether the administrator, rather than the program, set the level.
    capped: bool,
}

impl Rm {
    /// Opens a client of the resource manager. Loads no CUDA context.
    pub(crate) fn open(asked: RmLevel) -> Result<Self> {
        let cap = policy::cap(Path::new(policy::FILE), 0)?;
        let level = cap.map_or(asked, |cap| cap.min(asked));
        let capped = level < asked;
        if level == RmLevel::Off {
            let by = if capped { policy::FILE } else { "GDRCOPY_RM or the program" };
            let remedy = if capped { "ask the administrator" } else { "choose level vmm or ipc" };
            return Err(Error::new(
                "open",
                ErrorKind::PermissionDenied,
                format!("backend 'rm' is switched off by {by}"),
            )
            .remedy(remedy));
        }
        Driver::loaded()?;
        Ok(Self { manager: Arc::new(Manager::open()?), level, capped })
    }

    /// Takes hold of `span`. `anchor` lies in the allocation that `span` must be inside, or, with `whole_object`, whose
    /// memory object `span` must be inside.
    fn hold(&self, span: Span, anchor: GpuAddr, whole_object: bool) -> Result<Box<dyn Pin>> {
        let driver = Driver::get()?;
        let block = Block::of(driver, anchor, Pools::Refused)?;
        let device = Device::new(driver, block.ordinal)?;
        device.refuse_partitions(BackendKind::Rm)?;
        let exportable = VmmHandle::behind(driver, anchor);
        let block = if exportable.is_some() { block.vmm() } else { block };
        if exportable.is_none() {
            if self.level < RmLevel::Ipc {
                return Err(self.refuse_legacy(anchor));
            }
            if !whole_object {
                block.contains(span)?;
            }
        }
        let node = self.manager.node(device.pci()?)?;
        let prover = Prover::of(&device)?;
        let (held, offset, kind) = match exportable {
            Some(first) => {
                prover.prove_vmm(&self.manager, &node)?;
                let held = import_all(&self.manager, &node, driver, span, block, first)?;
                (held, distance(block.base, span.addr)?, Kind::Vmm(block))
            }
            None => {
                let world = Live { manager: &self.manager, node: &node, prover: &prover, driver };
                let secured = secure(&world, &*world.layout()?, anchor)?;
                let offset = if whole_object {
                    in_object(&secured, span)?
                } else {
                    secured.offset + inside(&secured.block, span)?
                };
                (secured.object, offset, Kind::Ipc(secured.block, prover))
            }
        };
        let ordered_writes = device.orders_writes();
        let manager = Arc::clone(&self.manager);
        Ok(Box::new(RmPin { manager, held, offset, span, anchor, kind, ordered_writes, device: Some(device) }))
    }

    fn refuse_legacy(&self, addr: GpuAddr) -> Error {
        let cause = format!("{addr} is cudaMalloc memory, which backend 'rm' maps at level ipc only");
        let error = Error::new("pin", ErrorKind::UnsupportedMemory(MemoryKind::CudaMalloc), cause);
        error.remedy(if self.capped {
            "the administrator capped the level in /etc/gdrcopy.conf: allocate with Session::alloc"
        } else {
            "set GDRCOPY_RM=ipc or SessionBuilder::rm(RmLevel::Ipc), or allocate with Session::alloc"
        })
    }
}

impl Backend for Rm {
    fn kind(&self) -> BackendKind {
        BackendKind::Rm
    }

    fn semantics(&self) -> Semantics {
        Semantics { whole_object: AfterFree::Persistent, shared_object: AfterFree::Aliased }
    }

    fn rm_level(&self) -> Option<RmLevel> {
        Some(self.level)
    }

    fn gpus(&self) -> Result<Vec<GpuInfo>> {
        crate::cuda::gpus()
    }

    fn alloc(&self, ordinal: Option<usize>, bytes: usize, how: Allocator) -> Result<Box<dyn Allocation>> {
        crate::cuda::allocate(ordinal, bytes, how)
    }

    fn pin(&self, span: Span) -> Result<Box<dyn Pin>> {
        self.hold(span, span.addr, false)
    }

    fn pin_pages(&self, asked: Span, _tokens: P2pTokens) -> Result<Box<dyn Pin>> {
        let pages = asked.gpu_pages("pin")?;
        self.hold(pages, allocated_near(Driver::get()?, asked), true)
    }

    fn pin_export(&self, fd: BorrowedFd<'_>, gpu: PciAddress, bytes: usize) -> Result<Box<dyn Pin>> {
        let node = self.manager.node(gpu)?;
        let mut held = Held::none(&self.manager, &node);
        let found = held.import(fd)?;
        if u64_of(bytes) > found {
            let cause = format!("{bytes} bytes are more than the {found} bytes that were exported");
            return Err(Error::new("pin", ErrorKind::OutOfBounds, cause).remedy("pin only what was exported"));
        }
        let manager = Arc::clone(&self.manager);
        let span = Span::new("pin", GpuAddr::new(crate::pinned::EXPORT_BASE), bytes)?;
        // Without CUDA nobody says how the GPU orders writes.
        let ordered_writes = false;
        let (offset, anchor) = (0, span.addr);
        Ok(Box::new(RmPin { manager, held, offset, span, anchor, kind: Kind::Import, ordered_writes, device: None }))
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// Bytes from `base` to `addr`.
fn distance(base: GpuAddr, addr: GpuAddr) -> Result<u64> {
    addr.offset_from(base).map(u64_of).ok_or_else(|| {
        Error::new(
            "pin",
            ErrorKind::OutOfBounds,
            format!("{addr} lies before the memory object, which starts at {base}"),
        )
        .remedy("pin only what was allocated")
    })
}

/// An address of the first page of `asked` that is allocated: callers round down to a page, and the page's first byte
/// may be nobody's. Every allocation in the page is in the same memory object, since objects are made of whole pages.
fn allocated_near(driver: &Driver, asked: Span) -> GpuAddr {
    /// What `cudaMalloc` aligns to (CUDA C++ Programming Guide: at least 256 bytes).
    const ALIGN: usize = 256;
    let in_page = GPU_PAGE - usize_of(asked.addr.raw()) % GPU_PAGE;
    let candidates = (0..asked.len.min(in_page)).step_by(ALIGN).filter_map(|offset| asked.addr.checked_add(offset));
    candidates.into_iter().find(|&addr| Block::of(driver, addr, Pools::Refused).is_ok()).unwrap_or(asked.addr)
}

/// The offset of `span` in the object, which it must be inside.
fn in_object(secured: &Secured<Held>, span: Span) -> Result<u64> {
    let start = GpuAddr::new(secured.block.base.raw() - secured.offset);
    let offset = distance(start, span.addr)?;
    if offset.checked_add(u64_of(span.len)).is_some_and(|end| end <= secured.block.object_bytes) {
        return Ok(offset);
    }
    let cause = format!("{} bytes from {} reach past the end of a memory object", span.len, span.addr);
    Err(Error::new("pin", ErrorKind::OutOfBounds, cause).remedy("pin only what was allocated"))
}

/// Imports the memory behind every mapping that `span` covers, in order.
fn import_all(
    manager: &Arc<Manager>,
    node: &Arc<node::Node>,
    driver: &'static Driver,
    span: Span,
    first: Block,
    handle: VmmHandle,
) -> Result<Held> {
    let mut held = Held::none(manager, node);
    let (mut block, mut handle) = (first, handle);
    loop {
        let added = held.import(handle.export()?.as_fd())?;
        if span.end() <= block.end() {
            return Ok(held);
        }
        // The next mapping follows this one's memory only if this one shows all of it.
        let whole = added == u64_of(block.bytes);
        let next = GpuAddr::new(block.end());
        let following = Block::of(driver, next, Pools::Refused)
            .ok()
            .map(Block::vmm)
            .filter(|next| whole && next.ordinal == block.ordinal);
        let found = following.and_then(|block| Some((block, VmmHandle::behind(driver, next)?)));
        match found {
            Some(found) => (block, handle) = found,
            None => return block.contains(span).map(|()| held),
        }
    }
}

/// How the memory was reached.
#[derive(Debug)]
enum Kind {
    Vmm(Block),
    Ipc(Identity, Arc<Prover>),
    Import,
}

#[derive(Debug)]
struct RmPin {
    manager: Arc<Manager>,
    held: Held,
    /// Of the range, in the held memory.
    offset: u64,
    span: Span,
    /// In the allocation by which the memory was found.
    anchor: GpuAddr,
    kind: Kind,
    ordered_writes: bool,
    /// Absent for memory that another process exported.
    device: Option<Device>,
}

impl RmPin {
    /// Whether the address still leads to the memory that was pinned.
    fn still(&self) -> Result<bool> {
        let Some(device) = &self.device else { return Ok(true) };
        let gone = |error: &Error| error.kind() == ErrorKind::UnsupportedMemory(MemoryKind::Unallocated);
        match &self.kind {
            Kind::Vmm(block) => match Block::of(device.driver, self.anchor, Pools::Refused) {
                Ok(now) => Ok(now.vmm() == *block),
                Err(error) if gone(&error) => Ok(false),
                Err(error) => Err(error),
            },
            Kind::Ipc(block, prover) => {
                let world = Live { manager: &self.manager, node: self.held.node(), prover, driver: device.driver };
                match world.identity(self.anchor) {
                    Ok(now) => Ok(now == *block),
                    Err(error) if gone(&error) => Ok(false),
                    Err(error) => Err(error),
                }
            }
            Kind::Import => Ok(true),
        }
    }
}

impl Pin for RmPin {
    fn facts(&self) -> PinFacts {
        let after_free = match &self.kind {
            Kind::Ipc(block, _) if block.bytes < u64_of(SHARED_BELOW) => AfterFree::Aliased,
            _ => AfterFree::Persistent,
        };
        PinFacts { after_free, pci: Some(self.held.node().pci), ordered_writes: self.ordered_writes }
    }

    fn cuda_flush(&self) -> Result<()> {
        let Some(device) = &self.device else {
            return Err(Error::new(
                "publish",
                ErrorKind::UnsupportedFeature(Feature::Publish),
                "memory of another process cannot be flushed through CUDA",
            )
            .remedy("keep data and flag in one 64-byte line (post_line)"));
        };
        device.flush_writes()
    }

    fn map(&self, want: Option<MappingType>) -> Result<Box<dyn View>> {
        only(BackendKind::Rm, MappingType::WriteCombining, want)?;
        let view = self.held.map(self.offset, self.span.len)?;
        // Read after the window exists: what it shows is what the address leads to at this moment.
        if !self.still()? {
            return Err(changed(self.anchor));
        }
        Ok(Box::new(view))
    }

    fn release(&mut self) -> Result<()> {
        self.held.release()
    }
}
