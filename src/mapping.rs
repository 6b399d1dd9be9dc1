//! The window through which device memory is written and read.

#![allow(unsafe_code, reason = "bounds are checked here, then raw copies run on the window")]

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::backend::{AfterFree, MappingType, View};
use crate::copy::{self, Routine, fence};
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
/// | [`write`](Self::write), [`store_u32`](Self::store_u32), [`store_u64`](Self::store_u64) | stored, then `SFENCE`: what this thread writes later is seen after these bytes |
/// | [`write_posted`](Self::write_posted), `store_*_posted` | no fence: bytes leave in any order, a partly filled line possibly late |
/// | [`batch`](Self::batch) | posted writes, one `SFENCE` at the end |
/// | [`publish`](Self::publish) | data, `SFENCE`, flag, `SFENCE`: whoever sees the flag sees the data |
/// | [`post_line`](Self::post_line) | one 64-byte store, no fence |
/// | [`read`](Self::read), [`load_u32`](Self::load_u32), [`load_u64`](Self::load_u64) | `MFENCE` before, `LFENCE` after: every byte was fetched after the call began; lines within one call in any order |
/// | [`flush`](Self::flush) | `MFENCE` and a 4-byte load: this thread's earlier writes have arrived at the device |
///
/// Write-combining buffers are drained by `SFENCE` (Intel SDM vol. 3A, 12.3.1); a PCIe read does not pass an earlier
/// write (PCI Express Base Specification, transaction ordering).
pub struct Mapping<'a> {
    base: *mut u8,
    len: usize,
    routine: &'static Routine,
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
        let publish = Publish::decide(core.facts().ordered_writes, core.session.allow_cuda_flush());
        let base = view.ptr().as_ptr();
        debug_assert_eq!(base.addr() % 64, crate::sys::num::usize_of(span.addr.raw()) % 64, "alignment carries over");
        Self {
            base,
            len: span.len,
            routine: routines.store(copy::LINE_BYTES),
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
    #[inline]
    pub(crate) fn at(&self, op: &'static str, offset: usize, len: usize) -> Result<*mut u8> {
        if offset > self.len || len > self.len - offset {
            return Err(self.out_of_bounds(op, offset, len));
        }
        if !self.owner.is_here() {
            return Err(wrong_process(op));
        }
        // SAFETY: offset <= self.len, the length of the window from `base`.
        Ok(unsafe { self.base.add(offset) })
    }

    #[inline]
    pub(crate) fn aligned(&self, op: &'static str, offset: usize, size: usize) -> Result<*mut u8> {
        let at = self.at(op, offset, size)?;
        if at.addr().is_multiple_of(size) { Ok(at) } else { Err(self.misaligned(op, offset, size)) }
    }

    #[cold]
    fn out_of_bounds(&self, op: &'static str, offset: usize, len: usize) -> Error {
        let cause = format!("{len} bytes at offset {offset} reach past the end of a mapping of {} bytes", self.len);
        Error::new(op, ErrorKind::OutOfBounds, cause)
    }

    #[cold]
    fn misaligned(&self, op: &'static str, offset: usize, size: usize) -> Error {
        let cause = format!("offset {offset} puts a {size}-byte access at an address that is not a multiple of {size}");
        Error::new(op, ErrorKind::InvalidArgument, cause).remedy("choose an aligned offset, or use write and read")
    }

    /// Writes `from` at byte `offset`, each byte stored once, then fences (`SFENCE`). 0 bytes are no access at all.
    ///
    /// # Errors
    ///
    /// `OutOfBounds`, `WrongProcess`; nothing was written then.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.posted("write", offset, from)?;
        fence::store();
        Ok(())
    }

    /// Writes without a fence.
    ///
    /// A line that was filled leaves by itself; a partly filled one may stay in a write-combining buffer until a later
    /// fence.
    ///
    /// # Errors
    ///
    /// As [`Mapping::write`].
    #[inline]
    pub fn write_posted(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.posted("write_posted", offset, from)
    }

    #[inline]
    pub(crate) fn posted(&self, op: &'static str, offset: usize, from: &[u8]) -> Result<()> {
        let dst = self.at(op, offset, from.len())?;
        // SAFETY: `at` proved that the bytes lie in the live window; `from` is host memory, which device memory cannot
        // overlap.
        unsafe { self.routines.store(from.len()).store(dst, from) };
        Ok(())
    }

    /// Reads `to.len()` bytes from byte `offset`, all fetched from the device after the call began.
    ///
    /// Whole 64-byte lines around the range are read: one round trip of the bus for up to 16 lines or so, at any
    /// offset.
    ///
    /// # Errors
    ///
    /// `OutOfBounds`, `WrongProcess`; `to` is untouched then.
    #[inline]
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let src = self.at("read", offset, to.len())?;
        fence::full();
        // SAFETY: `at` proved that the bytes lie in the live window, which is whole pages and so whole lines.
        unsafe { self.routines.load(to.len()).load(to, src) };
        fence::load();
        Ok(())
    }

    /// Stores 4 bytes with one access at an offset where the device address is a multiple of 4, then fences.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if misaligned; otherwise as [`Mapping::write`].
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32) -> Result<()> {
        self.store_u32_posted(offset, value)?;
        fence::store();
        Ok(())
    }

    /// Stores 8 bytes with one access at an offset where the device address is a multiple of 8, then fences.
    ///
    /// # Errors
    ///
    /// As [`Mapping::store_u32`].
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.store_u64_posted(offset, value)?;
        fence::store();
        Ok(())
    }

    /// [`Mapping::store_u32`] without the fence.
    ///
    /// # Errors
    ///
    /// As [`Mapping::store_u32`].
    #[inline]
    pub fn store_u32_posted(&self, offset: usize, value: u32) -> Result<()> {
        let dst = self.aligned("store_u32", offset, 4)?;
        // SAFETY: in the live window and aligned.
        unsafe { copy::store_u32(dst.cast(), value) };
        Ok(())
    }

    /// [`Mapping::store_u64`] without the fence.
    ///
    /// # Errors
    ///
    /// As [`Mapping::store_u32`].
    #[inline]
    pub fn store_u64_posted(&self, offset: usize, value: u64) -> Result<()> {
        let dst = self.aligned("store_u64", offset, 8)?;
        // SAFETY: in the live window and aligned.
        unsafe { copy::store_u64(dst.cast(), value) };
        Ok(())
    }

    /// Loads 4 bytes with one access at an offset where the device address is a multiple of 4.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if misaligned; otherwise as [`Mapping::read`].
    #[inline]
    pub fn load_u32(&self, offset: usize) -> Result<u32> {
        let src = self.aligned("load_u32", offset, 4)?;
        fence::full();
        // SAFETY: in the live window and aligned.
        let value = unsafe { copy::load_u32(src.cast()) };
        fence::load();
        Ok(value)
    }

    /// Loads 8 bytes with one access at an offset where the device address is a multiple of 8.
    ///
    /// # Errors
    ///
    /// As [`Mapping::load_u32`].
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        let src = self.aligned("load_u64", offset, 8)?;
        fence::full();
        // SAFETY: in the live window and aligned.
        let value = unsafe { copy::load_u64(src.cast()) };
        fence::load();
        Ok(value)
    }

    /// Writes a value's bytes: [`Mapping::write`] for types without padding.
    ///
    /// # Errors
    ///
    /// As [`Mapping::write`].
    #[inline]
    pub fn write_value<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) -> Result<()> {
        self.write(offset, value.as_bytes())
    }

    /// Reads a value: [`Mapping::read`] for types that any bytes make valid.
    ///
    /// # Errors
    ///
    /// As [`Mapping::read`].
    #[inline]
    pub fn read_value<T: FromBytes + IntoBytes>(&self, offset: usize) -> Result<T> {
        let mut value = T::new_zeroed();
        self.read(offset, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Stores one whole 64-byte line, without a fence, at an offset where the device address is a multiple of 64.
    ///
    /// Where [`Mapping::post_line_is_atomic`] says no, the line still leaves as one packet as a rule, but nothing
    /// guarantees it; and a reader's four 16-byte loads of one line are four moments in any case. Repeat a sequence
    /// number in each 16-byte part.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if misaligned; otherwise as [`Mapping::write`].
    #[inline]
    pub fn post_line(&self, offset: usize, line: &[u8; 64]) -> Result<()> {
        let dst = self.aligned("post_line", offset, 64)?;
        // SAFETY: in the live window and 64-byte aligned.
        unsafe { self.routine.post_line(dst, line) };
        Ok(())
    }

    /// Whether the processor guarantees that [`Mapping::post_line`] is one write: with MOVDIR64B (Intel SDM vol. 2).
    #[must_use]
    pub fn post_line_is_atomic(&self) -> bool {
        self.routine.post_line_is_atomic()
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

    /// The copy routine in use: that which stores a line, and all else too unless the session's policy has several.
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
