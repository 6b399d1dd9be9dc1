//! Host memory standing in for GPUs: backend `emulated`.
//!
//! It is a full peer of the others: it has its own allocators (whole objects, and small blocks that share one), device
//! addresses that the CPU cannot dereference, 64 KiB pages, several GPUs, a BAR1 aperture that can run out, both ways
//! in which a backend may treat freed memory, and faults on request. What it cannot show is the ordering and the speed
//! of write-combined memory: its windows are ordinary cached memory.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::backend::{
    AfterFree, Allocation, Allocator, Backend, BackendKind, MappingType, P2pTokens, Pin, PinFacts, Semantics, View,
    only,
};
use crate::error::{Error, ErrorKind, MemoryKind, Result};
use crate::gpu::{Bar1, GpuInfo};
use crate::range::{GpuAddr, Span, page_cover};
use crate::sys::num::{u64_of, usize_of};
use crate::sys::process::Owner;
use crate::sys::window::{PAGE, Window};

mod device;

use device::{Device, Located, Object};

/// How many there can be.
const GPUS: RangeInclusive<usize> = 1..=64;

/// Settings of the emulated GPUs.
#[derive(Clone, Debug)]
pub struct EmulatedConfig {
    gpus: usize,
    after_free: AfterFree,
    memory_bytes: u64,
    bar1_bytes: u64,
}

impl Default for EmulatedConfig {
    fn default() -> Self {
        Self { gpus: 1, after_free: AfterFree::Persistent, memory_bytes: 64 << 30, bar1_bytes: 64 << 30 }
    }
}

impl EmulatedConfig {
    /// How many GPUs there are, 1 to 64; 1 by default. Environment: `GDRCOPY_EMULATED_GPUS`.
    #[must_use]
    pub fn gpus(mut self, gpus: usize) -> Self {
        self.gpus = gpus;
        self
    }

    /// Access to freed memory raises SIGBUS, as on backends that are told of the free. By default the old bytes stay,
    /// and small blocks alias, as on backend `rm`.
    #[must_use]
    pub fn sigbus_after_free(mut self) -> Self {
        self.after_free = AfterFree::Sigbus;
        self
    }

    /// Device memory of each GPU in bytes; 64 GiB by default. Host memory is used only as it is written.
    #[must_use]
    pub fn memory_bytes(mut self, bytes: u64) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// BAR1 aperture of each GPU in bytes; 64 GiB by default.
    #[must_use]
    pub fn bar1_bytes(mut self, bytes: u64) -> Self {
        self.bar1_bytes = bytes;
        self
    }

    pub(crate) fn from_env(gpus: Option<&str>) -> Result<Self> {
        let Some(text) = gpus else { return Ok(Self::default()) };
        match text.trim().parse() {
            Ok(gpus) if GPUS.contains(&gpus) => Ok(Self::default().gpus(gpus)),
            _ => {
                let cause = format!("GDRCOPY_EMULATED_GPUS is '{text}', not a number from 1 to 64");
                Err(Error::new("open", ErrorKind::InvalidArgument, cause).remedy("set it to one, or unset it"))
            }
        }
    }
}

/// An operation that can be made to fail.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultAt {
    /// The next allocation.
    Alloc,
    /// The next free.
    Free,
    /// The next pin.
    Pin,
    /// The next map.
    Map,
    /// The next unmap: it happens, and reports the fault.
    Unmap,
    /// The next unpin: it happens, and reports the fault.
    Unpin,
}

/// What is alive on the emulated GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Live {
    /// Allocations not yet freed.
    pub allocations: usize,
    /// Pins.
    pub pins: usize,
    /// Windows.
    pub windows: usize,
    /// BAR1 bytes in use, over all GPUs.
    pub bar1_bytes: u64,
}

/// The emulated GPUs of one session, seen from the device's side.
///
/// ```
/// use gdrcopy::{BackendKind, DeviceRange, Session};
///
/// let session = Session::builder().backend(BackendKind::Emulated).open()?;
/// let gpus = session.emulated().expect("the backend just asked for");
/// let block = gpus.alloc_raw(0, 100)?;
/// // SAFETY: the block is freed after the mapping is gone.
/// let range = unsafe { DeviceRange::from_raw(block, 100)? };
/// let mapping = session.pin(range)?.map()?;
/// mapping.write(3, b"hello")?;
/// let mut seen = [0; 5];
/// gpus.device_read(block.checked_add(3).expect("in range"), &mut seen)?;
/// assert_eq!(&seen, b"hello");
/// drop(mapping);
/// gpus.free_raw(block)?;
/// # Ok::<(), gdrcopy::Error>(())
/// ```
pub struct Emulated {
    device: Arc<Device>,
    owner: Owner,
}

impl fmt::Debug for Emulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Emulated").field("config", self.device.config()).finish_non_exhaustive()
    }
}

impl Emulated {
    pub(crate) fn new(config: EmulatedConfig) -> Result<Self> {
        if !GPUS.contains(&config.gpus) {
            let cause = format!("{} emulated GPUs", config.gpus);
            return Err(Error::new("open", ErrorKind::InvalidArgument, cause).remedy("ask for 1 to 64"));
        }
        Ok(Self { device: Arc::new(Device::new(config)?), owner: Owner::here() })
    }

    /// Allocates as `cudaMalloc` does: blocks of less than 2 MiB share an object with others.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for 0 bytes, `NoDevice`, `OutOfMemory`, `WrongProcess`.
    pub fn alloc_raw(&self, gpu: usize, bytes: usize) -> Result<GpuAddr> {
        self.owner.check("alloc")?;
        self.device.alloc(gpu, bytes, Allocator::CuMemAlloc).map(|block| block.addr)
    }

    /// Frees a block by its first address.
    ///
    /// # Errors
    ///
    /// `UnsupportedMemory(Unallocated)` if no live block starts there, `WrongProcess`.
    pub fn free_raw(&self, addr: GpuAddr) -> Result<()> {
        self.owner.check("free")?;
        self.device.free(addr)
    }

    /// Reads device memory as a kernel would.
    ///
    /// # Errors
    ///
    /// `UnsupportedMemory(Unallocated)`, `OutOfBounds`, `WrongProcess`.
    pub fn device_read(&self, addr: GpuAddr, to: &mut [u8]) -> Result<()> {
        self.owner.check("device read")?;
        self.device.read(addr, to)
    }

    /// Writes device memory as a kernel would.
    ///
    /// # Errors
    ///
    /// As [`Emulated::device_read`].
    pub fn device_write(&self, addr: GpuAddr, from: &[u8]) -> Result<()> {
        self.owner.check("device write")?;
        self.device.write(addr, from)
    }

    /// Makes the next operation of this kind fail with `kind`.
    pub fn fail_next(&self, at: FaultAt, kind: ErrorKind) {
        self.device.fail_next(at, kind);
    }

    /// Counts what is alive.
    #[must_use]
    pub fn live(&self) -> Live {
        self.device.live()
    }
}

impl Backend for Emulated {
    fn kind(&self) -> BackendKind {
        BackendKind::Emulated
    }

    fn semantics(&self) -> Semantics {
        match self.device.config().after_free {
            AfterFree::Sigbus => Semantics { whole_object: AfterFree::Sigbus, shared_object: AfterFree::Sigbus },
            _ => Semantics { whole_object: AfterFree::Persistent, shared_object: AfterFree::Aliased },
        }
    }

    fn emulated(&self) -> Option<&Emulated> {
        Some(self)
    }

    fn gpus(&self) -> Result<Vec<GpuInfo>> {
        let config = self.device.config();
        Ok((0..config.gpus)
            .map(|ordinal| GpuInfo {
                ordinal,
                name: format!("emulated GPU {ordinal} (host memory)"),
                pci: None,
                total_bytes: config.memory_bytes,
                bar1: Some(Bar1 { total_bytes: config.bar1_bytes, used_bytes: self.device.bar1_used(ordinal) }),
                link: None,
                driver: None,
            })
            .collect())
    }

    fn alloc(&self, ordinal: Option<usize>, bytes: usize, how: Allocator) -> Result<Box<dyn Allocation>> {
        let ordinal = ordinal.unwrap_or(0);
        let block = self.device.alloc(ordinal, bytes, how)?;
        let owns_object = block.object.is_whole();
        Ok(Box::new(Buffer { device: Arc::clone(&self.device), addr: block.addr, ordinal, owns_object }))
    }

    fn pin(&self, span: Span) -> Result<Box<dyn Pin>> {
        let found = self.device.pin(span)?;
        Ok(Box::new(EmulatedPin { device: Arc::clone(&self.device), span, found }))
    }

    fn pin_pages(&self, asked: Span, _tokens: P2pTokens) -> Result<Box<dyn Pin>> {
        let (found, span) = self.device.pin_pages(asked)?;
        Ok(Box::new(EmulatedPin { device: Arc::clone(&self.device), span, found }))
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct Buffer {
    device: Arc<Device>,
    addr: GpuAddr,
    ordinal: usize,
    owns_object: bool,
}

impl Buffer {
    fn at(&self, offset: usize) -> Result<GpuAddr> {
        self.addr.checked_add(offset).ok_or_else(|| Error::new("copy", ErrorKind::OutOfBounds, "the offset wraps"))
    }
}

impl Allocation for Buffer {
    fn addr(&self) -> GpuAddr {
        self.addr
    }

    fn ordinal(&self) -> usize {
        self.ordinal
    }

    fn owns_object(&self) -> bool {
        self.owns_object
    }

    fn upload(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.device.write(self.at(offset)?, from)
    }

    fn download(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.device.read(self.at(offset)?, to)
    }

    fn free(&mut self) -> Result<()> {
        self.device.free(self.addr)
    }
}

#[derive(Debug)]
struct EmulatedPin {
    device: Arc<Device>,
    span: Span,
    found: Located,
}

impl Pin for EmulatedPin {
    fn facts(&self) -> PinFacts {
        let after_free = match (self.device.config().after_free, self.found.object.is_whole()) {
            (AfterFree::Sigbus, _) => AfterFree::Sigbus,
            (_, true) => AfterFree::Persistent,
            (_, false) => AfterFree::Aliased,
        };
        PinFacts { after_free, pci: None, ordered_writes: true }
    }

    fn is_revoked(&self) -> Result<bool> {
        Ok(self.device.config().after_free == AfterFree::Sigbus && self.device.is_gone(&self.found))
    }

    fn map(&self, want: Option<MappingType>) -> Result<Box<dyn View>> {
        only(BackendKind::Emulated, MappingType::Cached, want)?;
        let offset = self.found.offset;
        let (head, total) = page_cover(u64_of(offset), self.span.len, PAGE)
            .ok_or_else(|| Error::new("map", ErrorKind::InvalidArgument, "the range wraps"))?;
        let reserved = self.device.reserve_bar1(self.found.object.gpu(), u64_of(total))?;
        let mut window = Window::reserve("map", total, offset - head)?;
        window.place("map", 0, total, self.found.object.fd(), u64_of(offset - head))?;
        let id = self.device.publish_view(&self.found, &window)?;
        Ok(Box::new(EmulatedView {
            device: Arc::clone(&self.device),
            head,
            id,
            window: Some(window),
            _object: Arc::clone(&self.found.object),
            _reserved: reserved,
        }))
    }

    fn release(&mut self) -> Result<()> {
        self.device.unpin()
    }
}

#[derive(Debug)]
struct EmulatedView {
    device: Arc<Device>,
    head: usize,
    id: NonZeroU64,
    window: Option<Window>,
    _object: Arc<Object>,
    _reserved: device::Bar1Share,
}

impl View for EmulatedView {
    fn ptr(&self) -> NonNull<u8> {
        let base = self.window.as_ref().map_or(NonNull::dangling(), Window::base);
        base.map_addr(|addr| addr.saturating_add(self.head))
    }

    fn mapping_type(&self) -> MappingType {
        MappingType::Cached
    }

    fn window_bytes(&self) -> usize {
        self.window.as_ref().map_or(0, Window::len)
    }

    fn release(&mut self) -> Result<()> {
        match self.window.take() {
            Some(window) => self.device.unmap(self.id, window),
            None => Ok(()),
        }
    }
}

fn unallocated(op: &'static str, addr: GpuAddr) -> Error {
    Error::new(
        op,
        ErrorKind::UnsupportedMemory(MemoryKind::Unallocated),
        format!("{addr} belongs to no live allocation of this session's emulated GPUs"),
    )
    .remedy("pass a pointer that this session allocated and that was not freed")
}

fn foreign(op: &'static str, addr: GpuAddr) -> Error {
    Error::new(
        op,
        ErrorKind::UnsupportedMemory(MemoryKind::Foreign),
        format!("{addr} is not on this session's emulated GPUs"),
    )
    .remedy("use the session that allocated it: each has emulated GPUs of its own")
}

/// The offset of `addr` from `base`, which is not higher.
fn offset(addr: GpuAddr, base: GpuAddr) -> usize {
    usize_of(addr.raw() - base.raw())
}
