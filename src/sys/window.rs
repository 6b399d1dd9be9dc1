//! Address space in which device memory appears.
//!
//! A window is reserved first (no access), so that its alignment can be chosen, and device pages are then placed in
//! it with `MAP_FIXED`. Placed pages are never inherited by a forked child.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use libc::c_void;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::error::{Error, ErrorKind, Result};
use crate::sys::num::{raw_errno, u64_of};

/// Where x86 maps with one page-table entry instead of 512.
pub(crate) const HUGE: usize = 2 << 20;

/// The smallest page, and the granularity of every mapping call.
pub(crate) const PAGE: usize = 4096;

/// A span of this process's address space, unmapped as a whole on drop.
#[derive(Debug)]
pub(crate) struct Window {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: the window owns its address range; nothing about it is tied to a thread.
unsafe impl Send for Window {}
// SAFETY: shared access only hands out the base address.
unsafe impl Sync for Window {}

impl Window {
    /// Reserves `len` bytes (a multiple of [`PAGE`]) without access rights. From 2 MiB on, the base is congruent to
    /// `phase` modulo 2 MiB.
    pub(crate) fn reserve(op: &'static str, len: usize, phase: usize) -> Result<Self> {
        let too_big = || {
            Error::new(op, ErrorKind::OutOfMemory, format!("no address space for a window of {len} bytes"))
                .remedy("map a smaller range, or raise the address-space limit (ulimit -v)")
        };
        let slack = if len >= HUGE { HUGE } else { 0 };
        let ask = len.checked_add(slack).and_then(NonZeroUsize::new).ok_or_else(too_big)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { mmap_anonymous(None, ask, ProtFlags::PROT_NONE, flags) }
            .map_err(|errno| too_big().errno(raw_errno(errno)))?;
        let skip = if slack == 0 { 0 } else { phase.wrapping_sub(start.addr().get()) % HUGE };
        // SAFETY: skip < HUGE = slack, so the result stays inside the mapping of len + slack bytes.
        let base = unsafe { start.byte_add(skip) };
        let mut window = Self { base: start, len: ask.get() };
        window.trim(base, len);
        Ok(window)
    }

    /// Gives back what lies outside `len` bytes from `base`.
    fn trim(&mut self, base: NonNull<c_void>, len: usize) {
        let head = base.addr().get() - self.base.addr().get();
        let tail = self.len - head - len;
        if head > 0 {
            // SAFETY: the first `head` bytes belong to this reservation and hold nothing.
            let _ = unsafe { munmap(self.base, head) };
        }
        if tail > 0 {
            // SAFETY: base + len lies inside the reservation, which ends `tail` bytes further on.
            let end = unsafe { base.byte_add(len) };
            // SAFETY: the last `tail` bytes belong to this reservation and hold nothing.
            let _ = unsafe { munmap(end, tail) };
        }
        (self.base, self.len) = (base, len);
    }

    /// The first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base.cast()
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Puts `len` bytes of `fd` from `file_offset` at `at` in the window, shared, readable and writable, not inherited
    /// by children.
    ///
    /// A `fork` on another thread between the two system calls made here would still copy the pages.
    pub(crate) fn place(
        &mut self,
        op: &'static str,
        at: usize,
        len: usize,
        fd: BorrowedFd<'_>,
        file_offset: u64,
    ) -> Result<()> {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len) && at.is_multiple_of(PAGE);
        let (Some(size), Ok(offset), true) = (NonZeroUsize::new(len), i64::try_from(file_offset), inside) else {
            return Err(Error::new(op, ErrorKind::InvalidArgument, "the pages do not fit the window"));
        };
        // SAFETY: `at` is inside the reservation.
        let target = unsafe { self.base.byte_add(at) };
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: MAP_FIXED replaces only pages of this reservation, which nobody else refers to.
        unsafe { mmap(NonZeroUsize::new(target.addr().get()), size, prot, flags, fd, offset) }
            .map_err(|errno| Error::from_errno(op, raw_errno(errno), format!("mmap of {len} bytes failed")))?;
        // SAFETY: the range was just mapped; the advice changes only what a child inherits.
        unsafe { madvise(target, len, MmapAdvise::MADV_DONTFORK) }
            .map_err(|errno| Error::from_errno(op, raw_errno(errno), "the window cannot be kept from forked children"))
    }

    /// Keeps the whole pages inside `len` bytes from `base` from forked children: pages that a driver mapped by itself.
    ///
    /// A page that is only partly in the range may hold somebody else's data, which a child needs.
    #[cfg(feature = "vulkan")]
    pub(crate) fn keep_from_children(op: &'static str, base: NonNull<u8>, len: usize) -> Result<()> {
        let skip = base.addr().get().next_multiple_of(PAGE) - base.addr().get();
        let whole = len.saturating_sub(skip) / PAGE * PAGE;
        if whole == 0 {
            return Ok(());
        }
        // SAFETY: skip < len, since a whole page follows it inside the range.
        let start = unsafe { base.cast::<c_void>().byte_add(skip) };
        // SAFETY: mapped, as the caller's driver said; the advice changes only what a child inherits.
        unsafe { madvise(start, whole, MmapAdvise::MADV_DONTFORK) }
            .map_err(|errno| Error::from_errno(op, raw_errno(errno), "the window cannot be kept from forked children"))
    }

    /// Replaces the whole window by pages of `fd` past its end of file: every later access raises SIGBUS.
    pub(crate) fn revoke(base: usize, len: usize, empty: BorrowedFd<'_>) -> Result<()> {
        let (Some(addr), Some(size)) = (NonZeroUsize::new(base), NonZeroUsize::new(len)) else { return Ok(()) };
        // Writable, or stores would raise SIGSEGV.
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: the caller names a live window by its base and length; pages without a file behind them replace it.
        let placed = unsafe { mmap(Some(addr), size, prot, flags, empty, 0) }
            .map_err(|errno| Error::from_errno("revoke", raw_errno(errno), "the window cannot be revoked"))?;
        // SAFETY: as in `place`.
        unsafe { madvise(placed, len, MmapAdvise::MADV_DONTFORK) }
            .map_err(|errno| Error::from_errno("revoke", raw_errno(errno), "the window cannot be kept from children"))
    }

    /// Unmaps now, reporting failure, which `Drop` could not.
    pub(crate) fn unmap(self) -> Result<()> {
        let window = std::mem::ManuallyDrop::new(self);
        // SAFETY: the window owns this range and is not used again.
        unsafe { munmap(window.base, window.len) }
            .map_err(|errno| Error::from_errno("unmap", raw_errno(errno), "munmap of the window failed"))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the window owns this range; whoever handed out its address has ended with it.
        if let Err(errno) = unsafe { munmap(self.base, self.len) } {
            tracing::error!(%errno, bytes = u64_of(self.len), "a window could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_are_congruent_and_exact() {
        for (len, phase) in [(HUGE, 0), (HUGE + PAGE, 3 * PAGE), (5 * HUGE, HUGE - PAGE)] {
            let window = Window::reserve("map", len, phase).unwrap();
            assert_eq!(window.base().addr().get() % HUGE, phase);
            assert_eq!(window.len(), len);
        }
        assert_eq!(Window::reserve("map", PAGE, 0).unwrap().len(), PAGE);
    }

    #[test]
    fn an_impossible_window_is_out_of_memory() {
        for len in [usize::MAX - PAGE + 1, 1 << 60] {
            assert_eq!(Window::reserve("map", len, 0).unwrap_err().kind(), ErrorKind::OutOfMemory);
        }
    }
}
