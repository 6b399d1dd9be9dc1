//! The functions of `gdrapi_ext.h` about errors, backends, device memory and mappings.

#![allow(unsafe_code, reason = "exported by name, and called with C's pointers")]

use std::ffi::{c_char, c_int, c_void};

use gdrcopy::{AfterFree, BackendKind};

use crate::abi::{gdr, mapping_type, number};
use crate::channels::ordinal;
use crate::failure::{self, Failure, Kind, entry, entry_or};
use crate::pins::{self, Part};
use crate::pointers::{destination, output, source, string, write_text};
use crate::types::{Cost, Gdr, MappingFacts, MemoryHandle};
use crate::{cost, log, sessions};

/// Why this thread's last failed call failed, in one line; "" if none did. Valid until the next failure.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_last_error() -> *const c_char {
    failure::last_text()
}

/// The kind of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_last_error_kind() -> Kind {
    failure::last_kind()
}

/// As `gdr_open`, with a backend chosen by the program.
///
/// # Safety
///
/// `backend` is null or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_open(backend: *const c_char) -> *mut Gdr {
    log::init();
    entry_or("gdrx_open", std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        Ok(gdr(sessions::open(unsafe { string(backend, "the backend's name") }?)?))
    })
}

/// The name of the backend in use; NULL on failure.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_backend(g: *mut Gdr) -> *const c_char {
    entry_or("gdrx_backend", std::ptr::null(), || {
        Ok(match sessions::find(number(g))?.session.backend() {
            BackendKind::Gdrdrv => c"gdrdrv",
            BackendKind::Rm => c"rm",
            BackendKind::Vulkan => c"vulkan",
            BackendKind::Emulated => c"emulated",
            _ => c"other",
        }
        .as_ptr())
    })
}

/// Which backends were tried and why the others were passed over, one a line.
///
/// # Safety
///
/// `text` is null, or writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_probe_report(g: *mut Gdr, text: *mut c_char, size: usize) -> c_int {
    entry("gdrx_probe_report", || {
        let report = || Ok(sessions::find(number(g))?.session.probe_report().to_string());
        // SAFETY: the caller's duty.
        unsafe { write_text(text, size, report) }
    })
}

/// Allocates device memory that every backend can pin.
///
/// # Safety
///
/// `addr` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_alloc(g: *mut Gdr, gpu: c_int, size: usize, addr: *mut u64) -> c_int {
    entry("gdrx_alloc", || {
        // SAFETY: the caller's duty.
        let addr = unsafe { output(addr, "addr") }?;
        let open = sessions::find(number(g))?;
        let buffer = match ordinal(gpu)? {
            Some(ordinal) => open.session.alloc_on(ordinal, size)?,
            None => open.session.alloc(size)?,
        };
        *addr = open.add_buffer(buffer);
        Ok(())
    })
}

/// Frees what `gdrx_alloc` allocated.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_free(g: *mut Gdr, addr: u64) -> c_int {
    entry("gdrx_free", || sessions::find(number(g))?.free_buffer(addr))
}

/// Copies host memory to a buffer of `gdrx_alloc` the device's own way.
///
/// # Safety
///
/// `from` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_upload(g: *mut Gdr, addr: u64, from: *const c_void, size: usize) -> c_int {
    entry("gdrx_upload", || {
        // SAFETY: the caller's duty.
        let from = unsafe { source(from, size) }?;
        sessions::find(number(g))?.with_buffer(addr, |buffer, offset| buffer.upload(offset, from))
    })
}

/// Copies from a buffer of `gdrx_alloc` to host memory the device's own way.
///
/// # Safety
///
/// `to` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_download(g: *mut Gdr, addr: u64, to: *mut c_void, size: usize) -> c_int {
    entry("gdrx_download", || {
        // SAFETY: the caller's duty.
        let to = unsafe { destination(to, size) }?;
        sessions::find(number(g))?.with_buffer(addr, |buffer, offset| buffer.download(offset, to))
    })
}

/// Maps a pin at any address: `ptr` is the byte that was pinned.
///
/// # Safety
///
/// `ptr` is null or writable; `size` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_map(g: *mut Gdr, handle: MemoryHandle, ptr: *mut *mut c_void, size: *mut usize) -> c_int {
    entry("gdrx_map", || {
        if !size.is_null() {
            // SAFETY: not null, and the caller's to write.
            unsafe { size.write(0) };
        }
        if ptr.is_null() {
            return Err(Failure::invalid("ptr is NULL"));
        }
        // SAFETY: not null, and the caller's to write.
        unsafe { ptr.write(std::ptr::null_mut()) };
        let (at, len) = pins::map(number(g), handle.h, Part::Exact)?;
        // SAFETY: as above.
        unsafe { ptr.write(at.cast()) };
        if !size.is_null() {
            // SAFETY: as above.
            unsafe { size.write(len) };
        }
        Ok(())
    })
}

/// What is known of a mapping; as much of it as the caller's structure has room for.
///
/// # Safety
///
/// `facts` is null, or writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_get_mapping_facts(handle: MemoryHandle, facts: *mut MappingFacts, size: usize) -> c_int {
    entry("gdrx_get_mapping_facts", || {
        // SAFETY: the caller's duty.
        let to = unsafe { destination(facts.cast(), size) }?;
        to.fill(0);
        let found = mapping_facts(handle.h)?;
        let len = size.min(size_of::<MappingFacts>());
        // SAFETY: `found` has so many bytes at least, none of which is padding (its size is the sum of its fields'),
        // and is another object than `to`.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping((&raw const found).cast(), len) };
        Ok(())
    })
}

fn mapping_facts(handle: u64) -> Result<MappingFacts, Failure> {
    let (facts, kind, name, post_line_is_atomic) = pins::facts(handle)?;
    let nanoseconds = |took: std::time::Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    let mut routine = [0; 16];
    for (to, from) in routine.iter_mut().take(15).zip(name.bytes()) {
        *to = c_char::try_from(from).unwrap_or(0);
    }
    Ok(MappingFacts {
        window_bytes: u64::try_from(facts.window_bytes).unwrap_or(u64::MAX),
        pin_ns: nanoseconds(facts.pin_time),
        map_ns: nanoseconds(facts.map_time),
        mapping_type: mapping_type(Some(kind)),
        after_free: match facts.after_free {
            AfterFree::Persistent => 1,
            AfterFree::Aliased => 2,
            AfterFree::Sigbus => 3,
            _ => 0,
        },
        post_line_is_atomic: c_int::from(post_line_is_atomic),
        pci_domain: facts.pci.map_or(-1, |pci| c_int::try_from(pci.domain).unwrap_or(-1)),
        pci_bus: facts.pci.map_or(-1, |pci| c_int::from(pci.bus)),
        pci_device: facts.pci.map_or(-1, |pci| c_int::from(pci.device)),
        routine,
    })
}

/// Measures what puts and gets cost on this machine, on scratch memory of one GPU.
///
/// # Safety
///
/// `cost` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_estimate_cost(g: *mut Gdr, gpu: c_int, cost: *mut Cost) -> c_int {
    entry("gdrx_estimate_cost", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(cost, "cost") }?;
        *out = cost::estimate(&sessions::find(number(g))?.session, ordinal(gpu)?)?;
        Ok(())
    })
}
