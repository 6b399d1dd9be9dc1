//! The 17 functions of libgdrapi 2.6.

#![allow(unsafe_code, reason = "exported by name, and called with C's pointers")]

use std::ffi::{c_char, c_int, c_ulong, c_void};

use gdrcopy::{AfterFree, MappingType, P2pTokens, Session};

use crate::failure::{Failure, entry, entry_or};
use crate::pins::{self, GPU_PAGE, Info, Part};
use crate::pointers::{destination, output, source};
use crate::types::{Gdr, InfoV1, InfoV2, MemoryHandle};
use crate::{log, sessions};

const VERSION: (c_int, c_int) = (2, 6);

const MAPPING_TYPE_NONE: c_int = 0;
const MAPPING_TYPE_WC: c_int = 1;
const MAPPING_TYPE_CACHING: c_int = 2;
const MAPPING_TYPE_DEVICE: c_int = 3;

const ATTR_USE_PERSISTENT_MAPPING: c_int = 1;
const ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE: c_int = 2;
const ATTR_USING_DMA_BUF_MMAP: c_int = 3;

const PIN_FLAG_DEFAULT: u32 = 0;
const MAP_FLAG_DEFAULT: c_int = 0;

/// The number in a `gdr_t`.
pub(crate) fn number(g: *const Gdr) -> u64 {
    u64::try_from(g.addr()).unwrap_or(0)
}

/// A `gdr_t` made of its number.
pub(crate) fn gdr(number: u64) -> *mut Gdr {
    usize::try_from(number).map_or(std::ptr::null_mut(), std::ptr::without_provenance_mut)
}

pub(crate) fn mapping_type(found: Option<MappingType>) -> c_int {
    match found {
        None => MAPPING_TYPE_NONE,
        Some(MappingType::WriteCombining) => MAPPING_TYPE_WC,
        Some(MappingType::Cached) => MAPPING_TYPE_CACHING,
        Some(_) => MAPPING_TYPE_DEVICE,
    }
}

/// Opens the backend that the environment names, or the best there is. NULL on failure.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_open() -> *mut Gdr {
    log::init();
    entry_or("gdr_open", std::ptr::null_mut(), || Ok(gdr(sessions::open(None)?)))
}

/// Unpins what is left and closes.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_close(g: *mut Gdr) -> c_int {
    entry("gdr_close", || sessions::close(number(g)))
}

/// Whether freed memory stays alive while it is pinned.
fn is_persistent(session: &Session) -> bool {
    session.semantics().whole_object == AfterFree::Persistent
}

fn pin(g: *mut Gdr, addr: c_ulong, size: usize, tokens: P2pTokens) -> Result<MemoryHandle, Failure> {
    Ok(MemoryHandle { h: pins::pin(number(g), addr, size, tokens)? })
}

/// Pins the 64 KiB pages around a range of device memory.
///
/// # Safety
///
/// `handle` is null or writable. The memory stays allocated while it is mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_pin_buffer(
    g: *mut Gdr,
    addr: c_ulong,
    size: usize,
    p2p_token: u64,
    va_space: u32,
    handle: *mut MemoryHandle,
) -> c_int {
    entry("gdr_pin_buffer", || {
        // SAFETY: the caller's duty.
        let handle = unsafe { output(handle, "handle") }?;
        if (p2p_token != 0 || va_space != 0) && is_persistent(&sessions::find(number(g))?.session) {
            return Err(Failure::invalid("memory is pinned persistently here, which takes no P2P tokens: pass 0, 0"));
        }
        *handle = pin(g, addr, size, P2pTokens { p2p: p2p_token, va_space })?;
        Ok(())
    })
}

/// As `gdr_pin_buffer`, with flags.
///
/// # Safety
///
/// As `gdr_pin_buffer`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_pin_buffer_v2(
    g: *mut Gdr,
    addr: c_ulong,
    size: usize,
    flags: u32,
    handle: *mut MemoryHandle,
) -> c_int {
    entry("gdr_pin_buffer_v2", || {
        // SAFETY: the caller's duty.
        let handle = unsafe { output(handle, "handle") }?;
        if flags != PIN_FLAG_DEFAULT {
            return Err(Failure::invalid(format!("pin flags {flags:#x} are not supported; retry with 0")));
        }
        *handle = pin(g, addr, size, P2pTokens::default())?;
        Ok(())
    })
}

/// Lets go of a pin, mapped or not.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_unpin_buffer(g: *mut Gdr, handle: MemoryHandle) -> c_int {
    entry("gdr_unpin_buffer", || pins::unpin(number(g), handle.h))
}

/// 1 if the driver took the memory away from the pin because it was freed; never where pins are persistent.
///
/// # Safety
///
/// `flag` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_callback_flag(g: *mut Gdr, handle: MemoryHandle, flag: *mut c_int) -> c_int {
    entry("gdr_get_callback_flag", || {
        // SAFETY: the caller's duty.
        let flag = unsafe { output(flag, "flag") }?;
        *flag = c_int::from(pins::is_revoked(number(g), handle.h)?);
        Ok(())
    })
}

fn info_v1(info: &Info) -> InfoV1 {
    let wc = info.mapped == Some(MappingType::WriteCombining);
    InfoV1 {
        va: info.va,
        mapped_size: info.mapped_size,
        page_size: u32::try_from(GPU_PAGE).unwrap_or(0),
        // A cycle of the clock behind this is a nanosecond.
        tm_cycles: info.map_nanoseconds,
        cycles_per_ms: 1_000_000,
        bits: u32::from(info.mapped.is_some()) | u32::from(wc) << 1,
    }
}

/// What is known of a pin, in 40 bytes: the form that programs built before 2.4 call by this name.
///
/// # Safety
///
/// `info` is null, or 40 bytes are writable there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_info(g: *mut Gdr, handle: MemoryHandle, info: *mut InfoV1) -> c_int {
    entry("gdr_get_info", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(info, "info") }?;
        *out = info_v1(&pins::info(number(g), handle.h)?);
        Ok(())
    })
}

/// What is known of a pin, in 48 bytes.
///
/// # Safety
///
/// `info` is null, or 48 bytes are writable there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_info_v2(g: *mut Gdr, handle: MemoryHandle, info: *mut InfoV2) -> c_int {
    entry("gdr_get_info_v2", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(info, "info") }?;
        let found = pins::info(number(g), handle.h)?;
        *out = InfoV2 { v1: info_v1(&found), mapping_type: mapping_type(found.mapped) };
        Ok(())
    })
}

unsafe fn map(
    g: *mut Gdr,
    handle: MemoryHandle,
    va: *mut *mut c_void,
    size: usize,
    flags: c_int,
) -> Result<(), Failure> {
    if va.is_null() {
        return Err(Failure::invalid("va is NULL"));
    }
    // SAFETY: not null, and the caller's to write.
    unsafe { va.write(std::ptr::null_mut()) };
    if flags != MAP_FLAG_DEFAULT {
        return Err(Failure::invalid(format!("map flags {flags:#x} are not supported; retry with 0")));
    }
    let (at, _) = pins::map(number(g), handle.h, Part::Pages(size))?;
    // SAFETY: as above.
    unsafe { va.write(at.cast()) };
    Ok(())
}

/// Maps a pin that starts on a page.
///
/// # Safety
///
/// `va` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_map(g: *mut Gdr, handle: MemoryHandle, va: *mut *mut c_void, size: usize) -> c_int {
    // SAFETY: the caller's duty.
    entry("gdr_map", || unsafe { map(g, handle, va, size, MAP_FLAG_DEFAULT) })
}

/// As `gdr_map`, with flags.
///
/// # Safety
///
/// As `gdr_map`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_map_v2(
    g: *mut Gdr,
    handle: MemoryHandle,
    va: *mut *mut c_void,
    size: usize,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's duty.
    entry("gdr_map_v2", || unsafe { map(g, handle, va, size, flags) })
}

/// Unmaps the pin's mapping, whatever `va` and `size` say: DPDK passes the device address.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_unmap(g: *mut Gdr, handle: MemoryHandle, _va: *mut c_void, _size: usize) -> c_int {
    entry("gdr_unmap", || pins::unmap(number(g), handle.h))
}

/// Stores `size` bytes, then fences.
///
/// # Safety
///
/// `h_ptr` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_copy_to_mapping(
    handle: MemoryHandle,
    map_d_ptr: *mut c_void,
    h_ptr: *const c_void,
    size: usize,
) -> c_int {
    entry("gdr_copy_to_mapping", || {
        // SAFETY: the caller's duty.
        let from = unsafe { source(h_ptr, size) }?;
        pins::with_bytes(handle.h, map_d_ptr.addr(), size, |mapped, offset| mapped.mapping.write(offset, from))
    })
}

/// Loads `size` bytes, all fetched after the call began.
///
/// # Safety
///
/// `h_ptr` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_copy_from_mapping(
    handle: MemoryHandle,
    h_ptr: *mut c_void,
    map_d_ptr: *const c_void,
    size: usize,
) -> c_int {
    entry("gdr_copy_from_mapping", || {
        // SAFETY: the caller's duty.
        let to = unsafe { destination(h_ptr, size) }?;
        pins::with_bytes(handle.h, map_d_ptr.addr(), size, |mapped, offset| mapped.mapping.read(offset, to))
    })
}

unsafe fn write_version(major: *mut c_int, minor: *mut c_int, version: (c_int, c_int)) {
    for (out, value) in [(major, version.0), (minor, version.1)] {
        if !out.is_null() {
            // SAFETY: not null, and the caller's to write.
            unsafe { out.write(value) };
        }
    }
}

/// The version of this interface. Needs nothing open.
///
/// # Safety
///
/// Each pointer is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_runtime_get_version(major: *mut c_int, minor: *mut c_int) {
    // SAFETY: the caller's duty.
    unsafe { write_version(major, minor, VERSION) };
}

/// The version of the driver that clients compare with 2.1 and 2.5: that of this interface on backends without one.
///
/// # Safety
///
/// Each pointer is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_driver_get_version(g: *mut Gdr, major: *mut c_int, minor: *mut c_int) -> c_int {
    entry("gdr_driver_get_version", || {
        // SAFETY: the caller's duty.
        unsafe { write_version(major, minor, (0, 0)) };
        if major.is_null() || minor.is_null() {
            return Err(Failure::invalid("major or minor is NULL"));
        }
        let version = match sessions::find(number(g))?.session.module_version() {
            Some((major, minor)) => (c_int::try_from(major).unwrap_or(0), c_int::try_from(minor).unwrap_or(0)),
            None => VERSION,
        };
        // SAFETY: the caller's duty.
        unsafe { write_version(major, minor, version) };
        Ok(())
    })
}

/// Asks for a property of the open backend.
///
/// # Safety
///
/// `v` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_attribute(g: *mut Gdr, attr: c_int, v: *mut c_int) -> c_int {
    entry("gdr_get_attribute", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(v, "v") }?;
        let open = sessions::find(number(g))?;
        *out = match attr {
            ATTR_USE_PERSISTENT_MAPPING => c_int::from(is_persistent(&open.session)),
            ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE | ATTR_USING_DMA_BUF_MMAP => 0,
            _ => return Err(Failure::invalid(format!("attribute {attr} is not known"))),
        };
        Ok(())
    })
}

/// The name of a mapping type; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_get_mapping_type_string(mapping_type: c_int) -> *const c_char {
    match mapping_type {
        MAPPING_TYPE_NONE => c"NONE",
        MAPPING_TYPE_WC => c"WC",
        MAPPING_TYPE_CACHING => c"CACHING",
        MAPPING_TYPE_DEVICE => c"DEVICE",
        _ => c"UNKNOWN",
    }
    .as_ptr()
}
