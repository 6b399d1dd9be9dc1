//! The window through which device memory is written and read.

#![allow(unsafe_code, reason = "bounds are checked here, then raw copies run on the window")]

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{AfterFree, MappingType, View};
use crate::copy::fixed::{self, Inlined};
use crate::copy::{self, LINE_BYTES, Routine, fence};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::PciAddress;
use crate::pinned::PinCore;
use crate::policy::Routines;
use crate::publish::Publish;
use crate::range::{GpuAddr, Span};
use crate::sys::process::{Owner, wrong_process};

/// Device memory in this process's address space, starting at exactly the byte that was pinned.
///
/// It never yields a reference to device memory. Every copy is checked against the length, allocates nothing, takes no
/// lock and makes no system call; any number of threads may copy at once. Overlapping copies may interleave, but a
/// naturally aligned access of 1, 2, 4 or 8 bytes on the device side is a single access and does not tear.
///
/// # Ordering
///
/// Fences act for the calling thread's core only.
///
/// | verb | promise |
/// |---|---|
/// | [`write`](Self::write), [`write_value`](Self::write_value), [`store_u32`](Self::store_u32), [`store_u64`](Self::store_u64) | stored, then `SFENCE`: what this thread writes later is seen after these bytes |
/// | [`write_posted`](Self::write_posted), [`write_value_posted`](Self::write_value_posted), `store_*_posted` | no fence: bytes leave in any order, a partly filled line possibly late |
/// | [`batch`](Self::batch) | posted writes, one `SFENCE` at the end |
/// | [`publish`](Self::publish) | data, `SFENCE`, flag, `SFENCE`: whoever sees the flag sees the data |
/// | [`post_line`](Self::post_line) | one 64-byte store, no fence |
/// | [`read`](Self::read), [`read_value`](Self::read_value), [`load_u32`](Self::load_u32), [`load_u64`](Self::load_u64) | `MFENCE` before, `LFENCE` after: every byte was fetched after the call began; lines within one call in any order |
/// | [`flush`](Self::flush) | `MFENCE` and a 4-byte load: this thread's earlier writes have arrived at the device |
///
/// # Waiting for the device
///
/// Poll with [`load_u32`](Self::load_u32), [`load_u64`](Self::load_u64) or [`read`](Self::read), one call per look. Whole
/// lines are fetched with streaming loads, which may be answered from a buffer that still holds an earlier look, and pass
/// each other: the `MFENCE` makes every look a new one, and the `LFENCE` makes what is read after a flag no older than
/// the flag. One call over flag and data together gives no such order, except within 8 naturally aligned bytes; use two.
/// Code that polls through [`as_ptr`](Self::as_ptr) needs [`fence::full`](crate::copy::fence::full) before each look and
/// [`fence::load`](crate::copy::fence::load) between flag and data. Each look is a round trip of the bus,
/// about a microsecond; a flag that the device writes to host memory is seen without one.
///
/// # Sources
///
/// Write-combining buffers are drained by `SFENCE` (Intel SDM vol. 3A, 12.3.1); a PCIe read does not pass an earlier
/// write (PCI Express Base Specification, transaction ordering). A streaming load (MOVNTDQA) may be served by a buffer
/// filled before, is weakly ordered, and is fenced with `MFENCE` (Intel SDM vol. 1, "Streaming load hint
/// instruction"; vol. 2, MOVNTDQA).
pub struct Mapping<'a> {
    base: *mut u8,
    len: usize,
    /// Every access of up to a line at an offset below this is inside.
    line_room: usize,
    /// The routine's.
    pub(crate) inlined: Inlined,
    pub(crate) routine: &'static Routine,
    pub(crate) routines: Routines,
    owner: Owner,
    pub(crate) publish: Publish,
    addr: GpuAddr,
    map_time: Duration,
    /// Released in the opener's process only, and before the pin.
    view: ManuallyDrop<Box<dyn View>>,
    released: bool,
    pub(crate) core: Arc<PinCore>,
    range: PhantomData<&'a ()>,
}

// SAFETY: the window is plain address space, valid on every thread; device accesses are asm or single accesses, so
// concurrent copies are no data race; all other fields are Send.
unsafe impl Send for Mapping<'_> {}
// SAFETY: as above; shared access only reads the fields.
unsafe impl Sync for Mapping<'_> {}

/// What is known about a mapping beyond its length and address.
#[non_exhaustive]
#[derive(Clone, Copy, Debug)]
pub struct MappingFacts {
    /// What it shows once the memory has been freed.
    pub after_free: AfterFree,
    /// The GPU, where it has a PCI address.
    pub pci: Option<PciAddress>,
    /// Address space it occupies, in bytes.
    pub window_bytes: usize,
    /// How long the pin took.
    pub pin_time: Duration,
    /// How long the map took.
    pub map_time: Duration,
}

impl<'a> Mapping<'a> {
    pub(crate) fn new(core: Arc<PinCore>, view: Box<dyn View>, span: Span, map_time: Duration) -> Self {
        let routines = match view.mapping_type() {
            // Wider accesses than 8 bytes are not for such memory.
            MappingType::Device => Routines::only(copy::scalar_routine()),
            _ => core.session.routines(),
        };
        let routine = routines.store(LINE_BYTES);
        let publish = Publish::decide(core.facts().ordered_writes, core.session.allow_cuda_flush());
        let base = view.ptr().as_ptr();
        debug_assert_eq!(base.addr() % 64, crate::sys::num::usize_of(span.addr.raw()) % 64, "alignment carries over");
        Self {
            base,
            len: span.len,
            line_room: span.len.saturating_sub(LINE_BYTES - 1),
            inlined: routine.inlined(),
            routine,
            routines,
            owner: core.session.owner(),
            publish,
            addr: span.addr,
            map_time,
            view: ManuallyDrop::new(view),
            released: false,
            core,
            range: PhantomData,
        }
    }

    /// The window address of `len` bytes at `offset`, if they are inside and the process is the right one.
    #[inline(always)]
    pub(crate) fn at(&self, op: &'static str, offset: usize, len: usize) -> Result<*mut u8> {
        // The first comparison is left out where the compiler knows the length, and then one decides unless the end is near.
        if len <= LINE_BYTES && offset < self.line_room {
            return self.inside(op, offset);
        }
        if offset > self.len || len > self.len - offset {
            return Err(self.out_of_bounds(offset, len, op));
        }
        self.inside(op, offset)
    }

    /// The window address of `offset`, which is not past the end.
    #[inline(always)]
    fn inside(&self, op: &'static str, offset: usize) -> Result<*mut u8> {
        if !self.owner.is_here() {
            return Err(wrong_process(op));
        }
        // SAFETY: offset <= self.len, the length of the window from `base`.
        Ok(unsafe { self.base.add(offset) })
    }

    #[inline(always)]
    pub(crate) fn aligned(&self, op: &'static str, offset: usize, size: usize) -> Result<*mut u8> {
        let at = self.at(op, offset, size)?;
        if at.addr().is_multiple_of(size) { Ok(at) } else { Err(self.misaligned(offset, size, op)) }
    }

    #[cold]
    fn out_of_bounds(&self, offset: usize, len: usize, op: &'static str) -> Error {
        let cause = format!("{len} bytes at offset {offset} reach past the end of a mapping of {} bytes", self.len);
        Error::new(op, ErrorKind::OutOfBounds, cause)
    }

    #[cold]
    fn misaligned(&self, offset: usize, size: usize, op: &'static str) -> Error {
        let cause = format!("offset {offset} puts a {size}-byte access at an address that is not a multiple of {size}");
        Error::new(op, ErrorKind::InvalidArgument, cause).remedy("choose an aligned offset, or use write and read")
    }

    /// Writes `from` at byte `offset`, each byte stored once, then fences (`SFENCE`). 0 bytes are no access at all.
    ///
    /// A naturally aligned 1, 2, 4 or 8 bytes, and 64 at a multiple of 64, are stored by the caller's own code; other
    /// sizes take a call, unless the compiler knows them: see [`Mapping::write_value`].
    ///
    /// # Errors
    ///
    /// `OutOfBounds`, `WrongProcess`; nothing was written then.
    #[inline(always)]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let dst = self.at("write", offset, from.len())?;
        // SAFETY: `at` proved that the bytes lie in the live window.
        if unsafe { self.store_inlined(dst, from) } {
            fence::store();
            Ok(())
        } else {
            // SAFETY: as above.
            unsafe { self.store_called(dst, from, true) }
        }
    }

    /// Writes without a fence.
    ///
    /// A line that was filled leaves by itself; a partly filled one may stay in a write-combining buffer until a later
    /// fence.
    ///
    /// # Errors
    ///
    /// As [`Mapping::write`].
    #[inline(always)]
    pub fn write_posted(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.posted("write_posted", offset, from)
    }

    #[inline(always)]
    pub(crate) fn posted(&self, op: &'static str, offset: usize, from: &[u8]) -> Result<()> {
        let dst = self.at(op, offset, from.len())?;
        // SAFETY: `at` proved that the bytes lie in the live window.
        if unsafe { self.store_inlined(dst, from) } {
            Ok(())
        } else {
            // SAFETY: as above.
            unsafe { self.store_called(dst, from, false) }
        }
    }

    /// Stores what takes one access, and a message that fills its line: neither needs a plan or a call. Says whether it
    /// did.
    ///
    /// # Safety
    ///
    /// As many bytes as `from` has lie in the live window at `dst`.
    #[inline(always)]
    unsafe fn store_inlined(&self, dst: *mut u8, from: &[u8]) -> bool {
        if from.len() == LINE_BYTES && dst.addr().is_multiple_of(LINE_BYTES) {
            // SAFETY: a line in the live window, at a multiple of 64.
            unsafe { fixed::store_line(&self.inlined, dst, from.as_ptr()) }
        } else {
            // SAFETY: in the live window.
            unsafe { copy::store_single(dst, from) }
        }
    }

    /// What is not inlined, as the last thing that a verb does: the inlined part then needs no stack frame.
    ///
    /// # Safety
    ///
    /// As for [`Self::store_inlined`].
    #[inline(never)]
    pub(crate) unsafe fn store_called(&self, dst: *mut u8, from: &[u8], then_fence: bool) -> Result<()> {
        // SAFETY: in the live window by contract; `from` is host memory, which device memory cannot overlap; a routine in
        // use is available.
        unsafe { self.routines.store(from.len()).store_called(dst, from) };
        if then_fence {
            fence::store();
        }
        Ok(())
    }

    /// Reads `to.len()` bytes from byte `offset`, all fetched from the device after the call began.
    ///
    /// Whole 64-byte lines around the range are read: one round trip of the bus for up to 16 lines or so, at any
    /// offset. `MFENCE` before and `LFENCE` after, so it may be called in a loop to wait for a value, and what the next
    /// call returns is no older; lines within one call are in no order. A naturally aligned 1, 2, 4 or 8 bytes is one
    /// load.
    ///
    /// # Errors
    ///
    /// `OutOfBounds`, `WrongProcess`; `to` is untouched then.
    #[inline]
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let src = self.at("read", offset, to.len())?;
        fence::full();
        // SAFETY: `at` proved that the bytes lie in the live window.
        if !unsafe { copy::load_single(to, src) } {
            // SAFETY: as above.
            unsafe { self.load_called(to, src) };
        }
        fence::load();
        Ok(())
    }

    /// What takes more than one access.
    ///
    /// # Safety
    ///
    /// As many bytes as `to` has lie in the live window at `src`.
    #[inline(never)]
    unsafe fn load_called(&self, to: &mut [u8], src: *const u8) {
        // SAFETY: in the live window by contract, which is whole pages and so whole lines; a routine in use is available.
        unsafe { self.routines.load(to.len()).load(to, src) };
    }

    /// Returns once this thread's earlier writes through this mapping have arrived at the device: `MFENCE`, then one
    /// aligned 4-byte load of the window. It says nothing about the writes of others, such as a NIC's.
    ///
    /// # Errors
    ///
    /// `WrongProcess`.
    #[inline]
    pub fn flush(&self) -> Result<()> {
        let at = self.at("flush", 0, 1)?;
        let word = at.map_addr(|addr| addr & !3);
        fence::full();
        // SAFETY: the aligned word around the first byte lies in the window, which is whole pages.
        let _arrived = unsafe { copy::load_u32(word.cast()) };
        fence::load();
        Ok(())
    }

    /// The length in bytes; never 0.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The device address of byte 0.
    #[must_use]
    pub fn gpu_addr(&self) -> GpuAddr {
        self.addr
    }

    /// How the CPU caches the window.
    #[must_use]
    pub fn mapping_type(&self) -> MappingType {
        self.view.mapping_type()
    }

    /// The copy routine that stores whole lines ([`Mapping::post_line`], values and writes of an aligned 64 bytes). It
    /// does all else too unless the session's policy has several, as the [built-in one](crate::Policy::built_in) has on
    /// Sapphire Rapids and later; [`Policy::explain`](crate::Policy::explain) names that of each size and direction.
    #[must_use]
    pub fn routine(&self) -> &'static Routine {
        self.routine
    }

    /// What else is known.
    #[must_use]
    pub fn facts(&self) -> MappingFacts {
        let pin = self.core.facts();
        MappingFacts {
            after_free: pin.after_free,
            pci: pin.pci,
            window_bytes: self.view.window_bytes(),
            pin_time: self.core.pin_time(),
            map_time: self.map_time,
        }
    }

    /// The window's address of byte 0, for code that brings its own instructions; valid while the mapping lives, in
    /// this process. Make no Rust reference of it: the device writes there at any time.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Unmaps and reports failure, which dropping cannot.
    ///
    /// # Errors
    ///
    /// `WrongProcess`, or what the system reports; the window is gone in any case in the process it belongs to.
    pub fn unmap(mut self) -> Result<()> {
        self.owner.check("unmap")?;
        self.released = true;
        self.view.release()
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // Not inherited: there is nothing here to unmap, and the parent's objects are the parent's.
            return;
        }
        if !self.released
            && let Err(error) = self.view.release()
        {
            self.core.session.note(&error);
        }
        // SAFETY: this is the value's own drop; the field is not used again.
        unsafe { ManuallyDrop::drop(&mut self.view) };
        self.core.unmapped();
    }
}

impl fmt::Debug for Mapping<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("gpu_addr", &self.addr)
            .field("len", &self.len)
            .field("mapping_type", &self.mapping_type())
            .field("routine", &self.routine.name())
            .finish_non_exhaustive()
    }
}
