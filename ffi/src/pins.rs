//! `gdr_mh_t`: pins and their mappings.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use gdrcopy::{GpuAddr, MappingFacts, MappingType, P2pTokens, Pinned};

use crate::failure::{Failure, Kind};
use crate::sessions::{self, Open, lock};
use crate::slab::Slab;
use crate::window::{Mapped, Window};

/// The page in which pins are counted, whatever the backend does.
pub(crate) const GPU_PAGE: u64 = 64 << 10;
const HOST_PAGE: usize = 4096;

static PINS: Slab<Slot> = Slab::new();

#[derive(Default)]
struct Slot {
    pin: Mutex<Option<Pin>>,
    window: Window,
}

struct Pin {
    handle: u64,
    /// Weak: a session that closes ends its pins.
    open: Weak<Open>,
    pinned: Pinned<'static>,
    /// As the caller gave them.
    addr: u64,
    size: usize,
    mapped: Option<How>,
}

/// How a pin was mapped.
#[derive(Clone, Copy)]
struct How {
    mapping_type: MappingType,
    took: Duration,
}

/// What `gdr_get_info` reports.
#[derive(Debug)]
pub(crate) struct Info {
    pub(crate) va: u64,
    pub(crate) mapped_size: u64,
    pub(crate) mapped: Option<MappingType>,
    pub(crate) map_nanoseconds: u64,
}

pub(crate) fn pin(session: u64, addr: u64, size: usize, tokens: P2pTokens) -> Result<u64, Failure> {
    let open = sessions::find(session)?;
    // SAFETY: the duty that the allocation outlives its mappings is passed on to the C caller (gdrapi.h says so).
    #[allow(unsafe_code, reason = "the duty is the C caller's")]
    let pinned = unsafe { open.session.pin_pages(GpuAddr::new(addr), size, tokens) }?;
    let full = || Failure::new(libc::ENOMEM, Kind::OutOfMemory, "a million pins are alive; unpin some");
    let (handle, slot) = PINS.claim().ok_or_else(full)?;
    *lock(&slot.pin) = Some(Pin { handle, open: Arc::downgrade(&open), pinned, addr, size, mapped: None });
    if let Err(closing) = open.add_pin(handle) {
        return unpin_left(handle).and(Err(closing));
    }
    tracing::debug!(handle, size, "gdr_pin_buffer {addr:#x}");
    Ok(handle)
}

fn with_pin<R>(
    session: u64,
    handle: u64,
    body: impl FnOnce(&mut Pin, &'static Window) -> Result<R, Failure>,
) -> Result<R, Failure> {
    // Checked first: a bad `gdr_t` is an error of its own.
    let open = sessions::find(session)?;
    let slot = PINS.find_own(handle)?;
    let mut place = lock(&slot.pin);
    let pin = place.as_mut().filter(|pin| pin.handle == handle).ok_or_else(Failure::unknown_handle)?;
    if !std::ptr::eq(pin.open.as_ptr(), Arc::as_ptr(&open)) {
        return Err(Failure::new(libc::EINVAL, Kind::InvalidHandle, "the pin belongs to another gdr_t"));
    }
    body(pin, &slot.window)
}

/// Lets go of a pin, mapped or not.
pub(crate) fn unpin(session: u64, handle: u64) -> Result<(), Failure> {
    let open = with_pin(session, handle, |pin, _| Ok(pin.open.upgrade()))?;
    unpin_left(handle)?;
    if let Some(open) = open {
        open.remove_pin(handle);
    }
    tracing::debug!(handle, "gdr_unpin_buffer");
    Ok(())
}

/// As `unpin`, for a pin whose session is closing.
pub(crate) fn unpin_left(handle: u64) -> Result<Option<&'static Window>, Failure> {
    let slot = PINS.retire(handle)?;
    let pin = lock(&slot.pin).take();
    let (mapped, is_free) = slot.window.retire_for_good(handle);
    let unmapped = mapped.map_or(Ok(()), |mapped| mapped.mapping.unmap());
    if is_free {
        PINS.recycle(handle);
    }
    let unpinned = match pin.map(|pin| pin.pinned.unpin()) {
        // A copy that races with this call keeps the memory until it is done.
        Some(Err(error)) if error.error().kind() != gdrcopy::ErrorKind::Mapped => Err(gdrcopy::Error::from(error)),
        _ => Ok(()),
    };
    unmapped.and(unpinned)?;
    Ok((!is_free).then_some(&slot.window))
}

/// Which part of the pin a caller wants.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    /// So many bytes from the start of the first page, which the pin's address must be.
    Pages(usize),
    /// The bytes that were pinned, wherever they start.
    Exact,
}

/// Maps, and gives the address of the part's first byte and its length.
pub(crate) fn map(session: u64, handle: u64, part: Part) -> Result<(*mut u8, usize), Failure> {
    with_pin(session, handle, |pin, window| {
        let head = usize::try_from(pin.addr % GPU_PAGE).unwrap_or(0);
        let (first, len) = match part {
            Part::Pages(size) => (0, checked_size(pin, size, head)?),
            Part::Exact => (head, pin.size),
        };
        let mapping = pin.pinned.map()?;
        let how = How { mapping_type: mapping.mapping_type(), took: mapping.facts().map_time };
        let at = mapping.as_ptr().map_addr(|base| base + first);
        window.install(Box::new(Mapped { handle, mapping, first, len })).map_err(|_| {
            let text = "copies through this handle's last mapping are still at work";
            Failure::new(libc::EAGAIN, Kind::AlreadyMapped, text)
        })?;
        pin.mapped = Some(how);
        tracing::debug!(handle, len, "gdr_map: {} at {at:p}", how.mapping_type);
        Ok((at, len))
    })
}

fn checked_size(pin: &Pin, size: usize, head: usize) -> Result<usize, Failure> {
    if head != 0 {
        return Err(Failure::invalid(format!(
            "gdr_map takes pins that start on a 64 KiB page, and {:#x} does not; gdrx_map takes any",
            pin.addr
        )));
    }
    let rounded = size.checked_next_multiple_of(HOST_PAGE).filter(|rounded| (1..=pin.pinned.len()).contains(rounded));
    rounded.ok_or_else(|| {
        Failure::invalid(format!("{size} bytes cannot be mapped of a pin of {} bytes", pin.pinned.len()))
    })
}

/// Unmaps whatever the pin's mapping is.
pub(crate) fn unmap(session: u64, handle: u64) -> Result<(), Failure> {
    with_pin(session, handle, |pin, window| {
        pin.mapped.take().ok_or_else(Failure::not_mapped)?;
        tracing::debug!(handle, "gdr_unmap");
        Ok(window.retire().map_or(Ok(()), |mapped| mapped.mapping.unmap())?)
    })
}

/// Whether the driver took the memory away because it was freed.
pub(crate) fn is_revoked(session: u64, handle: u64) -> Result<bool, Failure> {
    with_pin(session, handle, |pin, _| Ok(pin.pinned.is_revoked()?))
}

pub(crate) fn info(session: u64, handle: u64) -> Result<Info, Failure> {
    with_pin(session, handle, |pin, _| {
        Ok(Info {
            va: pin.pinned.addr().raw(),
            mapped_size: u64::try_from(pin.pinned.len()).unwrap_or(u64::MAX),
            mapped: pin.mapped.map(|how| how.mapping_type),
            map_nanoseconds: pin.mapped.map_or(0, |how| u64::try_from(how.took.as_nanos()).unwrap_or(u64::MAX)),
        })
    })
}

/// Runs `copy` on a pin's mapping, without a lock, a system call or an allocation.
#[inline]
pub(crate) fn with_mapping<R>(handle: u64, copy: impl FnOnce(&Mapped) -> Result<R, Failure>) -> Result<R, Failure> {
    let slot = PINS.find(handle).ok_or_else(Failure::unknown_handle)?;
    let result = slot.window.with(handle, copy);
    if slot.window.has_leftover() {
        clear(&slot.window);
    }
    result.unwrap_or_else(|| Err(Failure::not_mapped()))
}

/// The last copy to leave a window that was unmapped under it drops the mapping.
#[cold]
fn clear(window: &Window) {
    let reaped = window.reap();
    drop(reaped.mapped);
    if let Some(orphan) = reaped.orphan {
        PINS.recycle(orphan);
    }
}

/// As `with_mapping`, with the offset in the mapping of `len` bytes at `at`.
#[inline]
pub(crate) fn with_bytes<R>(
    handle: u64,
    at: usize,
    len: usize,
    copy: impl FnOnce(&Mapped, usize) -> gdrcopy::Result<R>,
) -> Result<R, Failure> {
    with_mapping(handle, |mapped| {
        let offset = mapped.offset(at, len).ok_or_else(|| outside(at, len, mapped))?;
        Ok(copy(mapped, offset)?)
    })
}

#[cold]
fn outside(at: usize, len: usize, mapped: &Mapped) -> Failure {
    let start = mapped.mapping.as_ptr().addr() + mapped.first;
    let text = format!("{len} bytes at {at:#x} are not inside the mapping of {} bytes at {start:#x}", mapped.len);
    Failure::new(libc::EINVAL, Kind::OutOfBounds, text)
}

pub(crate) fn facts(handle: u64) -> Result<(MappingFacts, MappingType, &'static str, bool), Failure> {
    with_mapping(handle, |mapped| {
        let mapping = &mapped.mapping;
        Ok((mapping.facts(), mapping.mapping_type(), mapping.routine().name(), mapping.post_line_is_atomic()))
    })
}
