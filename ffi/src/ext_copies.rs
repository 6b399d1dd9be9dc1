//! The functions of `gdrapi_ext.h` that copy through mappings.

#![allow(unsafe_code, reason = "exported by name, and called with C's pointers")]

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use gdrcopy::{Mapping, ParallelCopier};

use crate::copiers;
use crate::failure::{Failure, Kind, entry};
use crate::pins;
use crate::pointers::{destination, output, source, string};
use crate::types::{CopierHandle, MemoryHandle};

/// Stores without a fence.
///
/// # Safety
///
/// `from` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_write_posted(
    handle: MemoryHandle,
    map_d_ptr: *mut c_void,
    from: *const c_void,
    size: usize,
) -> c_int {
    entry("gdrx_write_posted", || {
        // SAFETY: the caller's duty.
        let from = unsafe { source(from, size) }?;
        pins::with_bytes(handle.h, map_d_ptr.addr(), size, |mapped, offset| mapped.mapping.write_posted(offset, from))
    })
}

/// Stores one 64-byte line without a fence.
///
/// # Safety
///
/// `line` is readable for 64 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_post_line(handle: MemoryHandle, map_d_ptr: *mut c_void, line: *const c_void) -> c_int {
    entry("gdrx_post_line", || {
        // SAFETY: the caller's duty.
        let line = unsafe { source(line, 64) }?;
        let line = line.try_into().map_err(|_| Failure::invalid("a line has 64 bytes"))?;
        pins::with_bytes(handle.h, map_d_ptr.addr(), 64, |mapped, offset| mapped.mapping.post_line(offset, line))
    })
}

/// Stores 4 bytes with one access, without a fence.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_store32_posted(handle: MemoryHandle, map_d_ptr: *mut c_void, value: u32) -> c_int {
    entry("gdrx_store32_posted", || {
        pins::with_bytes(handle.h, map_d_ptr.addr(), 4, |mapped, offset| mapped.mapping.store_u32_posted(offset, value))
    })
}

/// Stores 8 bytes with one access, without a fence.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_store64_posted(handle: MemoryHandle, map_d_ptr: *mut c_void, value: u64) -> c_int {
    entry("gdrx_store64_posted", || {
        pins::with_bytes(handle.h, map_d_ptr.addr(), 8, |mapped, offset| mapped.mapping.store_u64_posted(offset, value))
    })
}

/// Ends a batch of posted writes: what this thread writes later is seen after them.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_fence() {
    gdrcopy::copy::fence::store();
}

/// # Safety
///
/// `data` is readable for `size` bytes.
unsafe fn publish(
    handle: MemoryHandle,
    places: (*mut c_void, *mut c_void),
    data: (*const c_void, usize),
    flag_size: usize,
    run: impl FnOnce(&Mapping<'_>, usize, &[u8], usize) -> gdrcopy::Result<()>,
) -> Result<(), Failure> {
    let (data_at, flag_at) = (places.0.addr(), places.1.addr());
    // SAFETY: the caller's duty.
    let from = unsafe { source(data.0, data.1) }?;
    pins::with_mapping(handle.h, |mapped| {
        let offset = |at, len| {
            let text = "the data or the flag is not inside the mapping";
            mapped.offset(at, len).ok_or_else(|| Failure::new(libc::EINVAL, Kind::OutOfBounds, text))
        };
        Ok(run(&mapped.mapping, offset(data_at, from.len())?, from, offset(flag_at, flag_size)?)?)
    })
}

/// Data, fence, 4-byte flag, fence.
///
/// # Safety
///
/// `data` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_publish32(
    handle: MemoryHandle,
    data_d_ptr: *mut c_void,
    data: *const c_void,
    size: usize,
    flag_d_ptr: *mut c_void,
    flag: u32,
) -> c_int {
    entry("gdrx_publish32", || {
        let run = |mapping: &Mapping<'_>, at, from: &[u8], flag_at| mapping.publish(at, from, flag_at, flag);
        // SAFETY: the caller's duty.
        unsafe { publish(handle, (data_d_ptr, flag_d_ptr), (data, size), 4, run) }
    })
}

/// Data, fence, 8-byte flag, fence.
///
/// # Safety
///
/// `data` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_publish64(
    handle: MemoryHandle,
    data_d_ptr: *mut c_void,
    data: *const c_void,
    size: usize,
    flag_d_ptr: *mut c_void,
    flag: u64,
) -> c_int {
    entry("gdrx_publish64", || {
        let run = |mapping: &Mapping<'_>, at, from: &[u8], flag_at| mapping.publish(at, from, flag_at, flag);
        // SAFETY: the caller's duty.
        unsafe { publish(handle, (data_d_ptr, flag_d_ptr), (data, size), 8, run) }
    })
}

/// Returns once this thread's earlier writes through the mapping have arrived.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_flush(handle: MemoryHandle) -> c_int {
    entry("gdrx_flush", || pins::with_mapping(handle.h, |mapped| Ok(mapped.mapping.flush()?)))
}

/// Starts threads that share copies with their caller.
///
/// # Safety
///
/// `cpus` is null or a null-terminated string; `copier` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_copier_create(
    handle: MemoryHandle,
    threads: c_int,
    cpus: *const c_char,
    spin_us: c_int,
    copier: *mut CopierHandle,
) -> c_int {
    entry("gdrx_copier_create", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(copier, "copier") }?;
        let (facts, ..) = pins::facts(handle.h)?;
        let mut builder = ParallelCopier::builder().gpu(facts.pci);
        if threads != 0 {
            let negative = |_| Failure::invalid(format!("{threads} threads; 0 is as many as gain something"));
            builder = builder.threads(usize::try_from(threads).map_err(negative)?);
        }
        // SAFETY: the caller's duty.
        if let Some(list) = unsafe { string(cpus, "the list of CPUs") }? {
            builder = builder.cpus(list.parse()?);
        }
        // Negative: as it is.
        if let Ok(spin) = u64::try_from(spin_us) {
            builder = builder.spin(Duration::from_micros(spin));
        }
        out.h = copiers::create(&builder)?;
        Ok(())
    })
}

/// How many threads share a copy.
///
/// # Safety
///
/// `threads` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_copier_threads(copier: CopierHandle, threads: *mut c_int) -> c_int {
    entry("gdrx_copier_threads", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(threads, "threads") }?;
        *out = copiers::with(copier.h, |copier| Ok(c_int::try_from(copier.threads()).unwrap_or(c_int::MAX)))?;
        Ok(())
    })
}

/// Wakes the threads ahead of a copy.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_copier_wake(copier: CopierHandle) -> c_int {
    entry("gdrx_copier_wake", || {
        copiers::with(copier.h, |copier| {
            copier.wake();
            Ok(())
        })
    })
}

/// As `gdr_copy_to_mapping`, by several threads.
///
/// # Safety
///
/// `h_ptr` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_copier_write(
    copier: CopierHandle,
    handle: MemoryHandle,
    map_d_ptr: *mut c_void,
    h_ptr: *const c_void,
    size: usize,
) -> c_int {
    entry("gdrx_copier_write", || {
        // SAFETY: the caller's duty.
        let from = unsafe { source(h_ptr, size) }?;
        copiers::with(copier.h, |copier| {
            let write = |mapping: &Mapping<'_>, offset| copier.write(mapping, offset, from);
            pins::with_bytes(handle.h, map_d_ptr.addr(), size, |mapped, offset| write(&mapped.mapping, offset))
        })
    })
}

/// As `gdr_copy_from_mapping`, by several threads.
///
/// # Safety
///
/// `h_ptr` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_copier_read(
    copier: CopierHandle,
    handle: MemoryHandle,
    h_ptr: *mut c_void,
    map_d_ptr: *const c_void,
    size: usize,
) -> c_int {
    entry("gdrx_copier_read", || {
        // SAFETY: the caller's duty.
        let to = unsafe { destination(h_ptr, size) }?;
        copiers::with(copier.h, |copier| {
            let mut read = |mapping: &Mapping<'_>, offset| copier.read(mapping, offset, to);
            pins::with_bytes(handle.h, map_d_ptr.addr(), size, |mapped, offset| read(&mapped.mapping, offset))
        })
    })
}

/// Ends the threads.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_copier_destroy(copier: CopierHandle) -> c_int {
    entry("gdrx_copier_destroy", || copiers::destroy(copier.h))
}
