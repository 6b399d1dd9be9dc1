//! The emulated GPUs themselves: memory objects, blocks, and who is looking at them.

#![allow(unsafe_code, reason = "the device's own view of its memory is raw, as a GPU's is")]

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use memmap2::{MmapOptions, MmapRaw};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;

use super::{AfterFree, Allocator, EmulatedConfig, FaultAt, Live, foreign, offset, unallocated};
use crate::copy;
use crate::error::{Error, ErrorKind, Result};
use crate::range::{GPU_PAGE as GPU_PAGE_BYTES, GpuAddr, Span};
use crate::sys::num::{raw_errno, u64_of, usize_of};
use crate::sys::window::Window;

const GPU_PAGE: u64 = u64_of(GPU_PAGE_BYTES);
/// Object that small blocks share, and the size from which a block gets one of its own; as CUDA does it.
const SHARED_OBJECT: u64 = 2 << 20;
/// Granularity of small blocks.
const SMALL: u64 = 512;
/// Device addresses start above what a CPU with 47-bit user addresses can hold, so that using one by mistake faults.
const FIRST_ADDR: u64 = 1 << 50;
const END_ADDR: u64 = 1 << 63;
const ADDRS_PER_GPU: u64 = 1 << 42;

/// Addresses for the GPUs of one session. No other session has the same, so that a pointer taken to the wrong one is
/// refused; used again only after some two million GPUs.
fn fresh_addrs(gpus: usize) -> Range<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(FIRST_ADDR);

    let size = u64_of(gpus) * ADDRS_PER_GPU;
    let after = |start: u64| if start + size <= END_ADDR { start } else { FIRST_ADDR } + size;
    let end = match NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |start| Some(after(start))) {
        Ok(start) | Err(start) => after(start),
    };
    end - size..end
}

/// A memory object: what pins and windows keep alive, whatever happens to its address.
#[derive(Debug)]
pub(super) struct Object {
    gpu: usize,
    fd: OwnedFd,
    bytes: u64,
    whole: bool,
    device_view: MmapRaw,
}

impl Object {
    fn new(gpu: usize, bytes: u64, whole: bool) -> Result<Self> {
        let failed = |errno: nix::Error| {
            Error::from_errno(
                "alloc",
                raw_errno(errno),
                format!("no host memory for an emulated object of {bytes} bytes"),
            )
        };
        let fd = memfd_create(c"gdrcopy-emulated-gpu", MFdFlags::MFD_CLOEXEC).map_err(failed)?;
        let size = i64::try_from(bytes).map_err(|_| failed(nix::Error::EFBIG))?;
        ftruncate(&fd, size).map_err(failed)?;
        let device_view = MmapOptions::new()
            .len(usize_of(bytes))
            .map_raw(&fd)
            .map_err(|error| failed(nix::Error::from_raw(error.raw_os_error().unwrap_or(libc::ENOMEM))))?;
        Ok(Self { gpu, fd, bytes, whole, device_view })
    }

    pub(super) fn gpu(&self) -> usize {
        self.gpu
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    fn device_ptr(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.device_view.len()), "blocks lie in their object");
        // SAFETY: just checked to be inside the view.
        unsafe { self.device_view.as_mut_ptr().add(offset) }
    }
}

/// Where a device address leads.
#[derive(Clone, Debug)]
pub(super) struct Located {
    pub(super) object: Arc<Object>,
    /// In the object, in bytes.
    pub(super) offset: usize,
    /// The block's identity: a freed and reallocated block has another.
    block: NonZeroU64,
    /// A byte of that block.
    inside: Span,
}

/// A fresh block.
pub(super) struct NewBlock {
    pub(super) addr: GpuAddr,
    pub(super) object: Arc<Object>,
}

#[derive(Debug)]
struct Block {
    bytes: u64,
    id: NonZeroU64,
    /// Base address of the object it is in.
    object: u64,
}

#[derive(Debug)]
struct LiveView {
    block: NonZeroU64,
    base: usize,
    bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    /// By base address.
    objects: BTreeMap<u64, Arc<Object>>,
    /// Freed, and in use for as long as pins and windows hold them.
    held: Vec<Weak<Object>>,
    /// By first address.
    blocks: BTreeMap<u64, Block>,
    views: BTreeMap<NonZeroU64, LiveView>,
    faults: Vec<(FaultAt, ErrorKind)>,
    bar1_used: Vec<u64>,
    pins: usize,
    last_id: u64,
}

impl State {
    fn next_id(&mut self) -> NonZeroU64 {
        self.last_id += 1;
        NonZeroU64::new(self.last_id).expect("counts up from 1")
    }

    fn fault(&mut self, at: FaultAt, op: &'static str) -> Result<()> {
        let Some(index) = self.faults.iter().position(|(place, _)| *place == at) else { return Ok(()) };
        let (_, kind) = self.faults.remove(index);
        Err(Error::new(op, kind, "a fault was injected"))
    }

    fn locate(&self, op: &'static str, span: Span) -> Result<Located> {
        let addr = span.addr.raw();
        let Some((&start, block)) = self.blocks.range(..=addr).next_back() else {
            return Err(unallocated(op, span.addr));
        };
        if addr >= start + block.bytes {
            return Err(unallocated(op, span.addr));
        }
        if span.end() > start + block.bytes {
            return Err(Error::new(
                op,
                ErrorKind::OutOfBounds,
                format!(
                    "{} bytes from {} reach past the end of an allocation of {} bytes at {start:#x}",
                    span.len, span.addr, block.bytes
                ),
            )
            .remedy("pin only what was allocated"));
        }
        let object = self.objects.get(&block.object).ok_or_else(|| unallocated(op, span.addr))?;
        let offset = offset(span.addr, GpuAddr::new(block.object));
        let inside = Span { addr: span.addr, len: 1 };
        Ok(Located { object: Arc::clone(object), offset, block: block.id, inside })
    }

    /// Whether the block that was found is still allocated.
    fn is_there(&self, found: &Located) -> bool {
        self.locate("map", found.inside).is_ok_and(|now| now.block == found.block)
    }

    /// Finds the GPU pages around `asked`, of which at least one byte must be allocated.
    fn locate_pages(&self, op: &'static str, asked: Span) -> Result<(Located, Span)> {
        let pages = asked.gpu_pages(op)?;
        let below = self.blocks.range(..=asked.addr.raw()).next_back();
        let at = below.filter(|(start, block)| asked.addr.raw() - **start < block.bytes);
        let (&start, block) = at
            .or_else(|| self.blocks.range(asked.addr.raw()..asked.end()).next())
            .ok_or_else(|| unallocated(op, asked.addr))?;
        let object = self.objects.get(&block.object).ok_or_else(|| unallocated(op, asked.addr))?;
        if pages.addr.raw() < block.object || pages.end() > block.object + object.bytes {
            let cause = format!("{} bytes from {} reach past the end of a memory object", asked.len, asked.addr);
            return Err(Error::new(op, ErrorKind::OutOfBounds, cause).remedy("pin only what was allocated"));
        }
        let offset = offset(pages.addr, GpuAddr::new(block.object));
        let inside = Span { addr: asked.addr.max(GpuAddr::new(start)), len: 1 };
        Ok((Located { object: Arc::clone(object), offset, block: block.id, inside }, pages))
    }
}

/// All emulated GPUs of one session.
#[derive(Debug)]
pub(super) struct Device {
    config: EmulatedConfig,
    addrs: Range<u64>,
    /// A file without pages: what revoked windows show.
    empty: OwnedFd,
    state: Mutex<State>,
}

/// A share of a GPU's BAR1 aperture, given back on drop.
#[derive(Debug)]
pub(super) struct Bar1Share {
    device: Arc<Device>,
    gpu: usize,
    bytes: u64,
}

impl Drop for Bar1Share {
    fn drop(&mut self) {
        if let Some(used) = self.device.state().bar1_used.get_mut(self.gpu) {
            *used -= self.bytes;
        }
    }
}

/// The lowest address in `from..to` with `bytes` free after it, given the taken ranges in order.
fn first_fit(mut taken: impl Iterator<Item = (u64, u64)>, from: u64, to: u64, bytes: u64) -> Option<u64> {
    let mut at = from;
    loop {
        let next = taken.next();
        if next.map_or(to, |(start, _)| start).checked_sub(at)? >= bytes {
            return Some(at);
        }
        at = next.map(|(start, len)| start + len)?;
    }
}

impl Device {
    pub(super) fn new(config: EmulatedConfig) -> Result<Self> {
        let empty = memfd_create(c"gdrcopy-revoked", MFdFlags::MFD_CLOEXEC)
            .map_err(|errno| Error::from_errno("open", raw_errno(errno), "no memory file can be made"))?;
        let state = State { bar1_used: vec![0; config.gpus], ..State::default() };
        Ok(Self { addrs: fresh_addrs(config.gpus), config, empty, state: Mutex::new(state) })
    }

    pub(super) fn config(&self) -> &EmulatedConfig {
        &self.config
    }

    /// Addresses outside the emulated range altogether belong to nobody.
    fn check_addr(&self, op: &'static str, addr: GpuAddr) -> Result<()> {
        let emulated = (FIRST_ADDR..END_ADDR).contains(&addr.raw());
        if emulated && !self.addrs.contains(&addr.raw()) { Err(foreign(op, addr)) } else { Ok(()) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fail_next(&self, at: FaultAt, kind: ErrorKind) {
        self.state().faults.push((at, kind));
    }

    pub(super) fn live(&self) -> Live {
        let state = self.state();
        Live {
            allocations: state.blocks.len(),
            pins: state.pins,
            windows: state.views.len(),
            bar1_bytes: state.bar1_used.iter().sum(),
        }
    }

    pub(super) fn bar1_used(&self, gpu: usize) -> u64 {
        self.state().bar1_used.get(gpu).copied().unwrap_or(0)
    }

    pub(super) fn alloc(&self, gpu: usize, bytes: usize, how: Allocator) -> Result<NewBlock> {
        let mut state = self.state();
        state.fault(FaultAt::Alloc, "alloc")?;
        if bytes == 0 {
            return Err(Error::new("alloc", ErrorKind::InvalidArgument, "an allocation of 0 bytes")
                .remedy("ask for at least 1 byte"));
        }
        if gpu >= self.config.gpus {
            let cause = format!("there is no emulated GPU {gpu}");
            return Err(Error::new("alloc", ErrorKind::NoDevice, cause)
                .remedy(format!("choose 0 to {} or set GDRCOPY_EMULATED_GPUS", self.config.gpus - 1)));
        }
        let full = || {
            Error::new(
                "alloc",
                ErrorKind::OutOfMemory,
                format!("emulated GPU {gpu} of {} bytes has no room for {bytes} bytes", self.config.memory_bytes),
            )
        };
        let size = u64_of(bytes);
        let shares = how == Allocator::CuMemAlloc && size < SHARED_OBJECT;
        if shares
            && let Some(found) = state.objects.iter().find_map(|(&base, object)| {
                let fits = !object.whole && object.gpu == gpu;
                let inside = state.blocks.range(base..base + object.bytes);
                let taken = inside.map(|(&start, block)| (start, block.bytes.next_multiple_of(SMALL)));
                let addr = first_fit(taken, base, base + object.bytes, size).filter(|_| fits)?;
                Some((addr, base, Arc::clone(object)))
            })
        {
            let (addr, base, object) = found;
            let id = state.next_id();
            state.blocks.insert(addr, Block { bytes: size, id, object: base });
            return Ok(NewBlock { addr: GpuAddr::new(addr), object });
        }
        let granule = if shares { SHARED_OBJECT } else { GPU_PAGE };
        let object_bytes = size.checked_next_multiple_of(granule).ok_or_else(full)?;
        let mine = || state.objects.iter().filter(|(_, object)| object.gpu == gpu);
        let held = state.held.iter().filter_map(Weak::upgrade).filter(|object| object.gpu == gpu);
        let used = mine().map(|(_, object)| object.bytes).sum::<u64>() + held.map(|object| object.bytes).sum::<u64>();
        if used.checked_add(object_bytes).is_none_or(|sum| sum > self.config.memory_bytes) {
            return Err(full());
        }
        let first = self.addrs.start + u64_of(gpu) * ADDRS_PER_GPU;
        let taken = mine().map(|(&base, object)| (base, object.bytes));
        let base = first_fit(taken, first, first + ADDRS_PER_GPU, object_bytes).ok_or_else(full)?;
        let object = Arc::new(Object::new(gpu, object_bytes, !shares)?);
        let id = state.next_id();
        state.objects.insert(base, Arc::clone(&object));
        state.blocks.insert(base, Block { bytes: size, id, object: base });
        Ok(NewBlock { addr: GpuAddr::new(base), object })
    }

    pub(super) fn free(&self, addr: GpuAddr) -> Result<()> {
        let mut state = self.state();
        state.fault(FaultAt::Free, "free")?;
        self.check_addr("free", addr)?;
        let Some(block) = state.blocks.remove(&addr.raw()) else { return Err(unallocated("free", addr)) };
        let emptied = state.objects.get(&block.object).is_some_and(|object| {
            object.whole || state.blocks.range(block.object..block.object + object.bytes).next().is_none()
        });
        if emptied
            && let Some(object) = state.objects.remove(&block.object)
            && self.config.after_free == AfterFree::Persistent
        {
            state.held.retain(|object| object.strong_count() > 0);
            state.held.push(Arc::downgrade(&object));
        }
        if self.config.after_free == AfterFree::Sigbus {
            for view in state.views.values().filter(|view| view.block == block.id) {
                Window::revoke(view.base, view.bytes, self.empty.as_fd())?;
            }
        }
        Ok(())
    }

    fn with_bytes<R>(
        &self,
        op: &'static str,
        addr: GpuAddr,
        len: usize,
        run: impl FnOnce(*mut u8) -> R,
    ) -> Result<Option<R>> {
        if len == 0 {
            return Ok(None);
        }
        self.check_addr(op, addr)?;
        let found = self.state().locate(op, Span::new(op, addr, len)?)?;
        // The object is kept alive while `run` works on it, without the lock.
        Ok(Some(run(found.object.device_ptr(found.offset, len))))
    }

    pub(super) fn read(&self, addr: GpuAddr, to: &mut [u8]) -> Result<()> {
        let len = to.len();
        // SAFETY: `with_bytes` hands out `len` bytes of the live object; its view is whole pages, and so whole lines.
        self.with_bytes("device read", addr, len, |src| unsafe { copy::preferred().load(to, src) })?;
        copy::fence::full();
        Ok(())
    }

    pub(super) fn write(&self, addr: GpuAddr, from: &[u8]) -> Result<()> {
        // SAFETY: `with_bytes` hands out as many bytes of the live object as `from` has.
        self.with_bytes("device write", addr, from.len(), |dst| unsafe { copy::preferred().store(dst, from) })?;
        copy::fence::full();
        Ok(())
    }

    pub(super) fn pin(&self, span: Span) -> Result<Located> {
        let mut state = self.state();
        state.fault(FaultAt::Pin, "pin")?;
        self.check_addr("pin", span.addr)?;
        let found = state.locate("pin", span)?;
        state.pins += 1;
        Ok(found)
    }

    pub(super) fn pin_pages(&self, asked: Span) -> Result<(Located, Span)> {
        let mut state = self.state();
        state.fault(FaultAt::Pin, "pin")?;
        let found = state.locate_pages("pin", asked)?;
        state.pins += 1;
        Ok(found)
    }

    pub(super) fn unpin(&self) -> Result<()> {
        let mut state = self.state();
        state.pins -= 1;
        state.fault(FaultAt::Unpin, "unpin")
    }

    pub(super) fn reserve_bar1(self: &Arc<Self>, gpu: usize, bytes: u64) -> Result<Bar1Share> {
        let mut state = self.state();
        state.fault(FaultAt::Map, "map")?;
        let total = self.config.bar1_bytes;
        let used = state.bar1_used.get_mut(gpu).expect("objects are on GPUs that exist");
        match used.checked_add(bytes) {
            Some(sum) if sum <= total => *used = sum,
            _ => {
                let cause = format!("no room for {bytes} bytes in BAR1: {used} of {total} bytes are in use");
                return Err(Error::new("map", ErrorKind::Bar1Exhausted, cause)
                    .remedy("unmap other windows or map a smaller range"));
            }
        }
        drop(state);
        Ok(Bar1Share { device: Arc::clone(self), gpu, bytes })
    }

    pub(super) fn is_gone(&self, found: &Located) -> bool {
        !self.state().is_there(found)
    }

    /// Makes a window known, unless its block was freed meanwhile.
    pub(super) fn publish_view(&self, found: &Located, window: &Window) -> Result<NonZeroU64> {
        let mut state = self.state();
        if !state.is_there(found) {
            let cause = format!("the memory at {} was freed since it was pinned", found.inside.addr);
            return Err(Error::new("map", ErrorKind::Stale, cause).remedy("pin the new allocation"));
        }
        let id = state.next_id();
        let view = LiveView { block: found.block, base: window.base().addr().get(), bytes: window.len() };
        state.views.insert(id, view);
        Ok(id)
    }

    /// Forgets a window before its address space is given back, so that it is never revoked afterwards.
    pub(super) fn unmap(&self, id: NonZeroU64, window: Window) -> Result<()> {
        let mut state = self.state();
        state.views.remove(&id);
        let fault = state.fault(FaultAt::Unmap, "unmap");
        drop(state);
        window.unmap().and(fault)
    }
}
