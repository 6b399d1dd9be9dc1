//! `gdrx_auto_t`: automatic copiers.

#![allow(unsafe_code, reason = "a copier borrows the buffer that is kept beside it")]

use std::ffi::c_void;
use std::sync::Arc;

use gdrcopy::DeviceBuffer;
use gdrcopy::auto::{AutoCopier, AutoOptions};
use gdrcopy::policy::CopyDirection;

use crate::failure::Failure;
use crate::sessions;
use crate::table::Table;

static AUTOS: Table<(), Auto> = Table::new("automatic copier");

/// A copier and its buffer. The copier, which borrows the buffer, is declared and so dropped first.
struct Auto {
    copier: AutoCopier<'static>,
    _buffer: Arc<DeviceBuffer>,
}

/// Measures, on the buffer that starts at `addr`.
pub(crate) fn create(session: u64, addr: u64, options: AutoOptions) -> Result<u64, Failure> {
    let open = sessions::find(session)?;
    let buffer = open.buffer(addr)?;
    // SAFETY: the buffer lies in the allocation of an Arc, which does not move, and which `Auto` keeps until the copier has
    // been dropped; nothing that borrows it leaves `Auto`.
    let borrowed: &'static DeviceBuffer = unsafe { &*Arc::as_ptr(&buffer) };
    let copier = AutoCopier::new(&open.session, borrowed, options)?;
    AUTOS.create(Some(&open), (), Auto { copier, _buffer: buffer }, (), destroy)
}

pub(crate) fn destroy(handle: u64) -> Result<(), Failure> {
    let end = |(), auto: Auto, ()| {
        drop(auto);
        Ok(())
    };
    AUTOS.destroy(handle, |()| (), end)
}

#[inline]
pub(crate) fn read(handle: u64, offset: usize, to: &mut [u8]) -> Result<(), Failure> {
    AUTOS.first(handle, |auto| auto.copier.read(offset, to).map_err(Failure::of_agent))
}

#[inline]
pub(crate) fn write(handle: u64, offset: usize, from: &[u8]) -> Result<(), Failure> {
    AUTOS.first(handle, |auto| auto.copier.write(offset, from).map_err(Failure::of_agent))
}

/// Lets the copier's agent reach memory of the caller's.
///
/// # Safety
///
/// As [`AutoCopier::register_host`].
pub(crate) unsafe fn register_host(handle: u64, memory: *mut c_void, size: usize) -> Result<(), Failure> {
    AUTOS.check_process(handle)?;
    // SAFETY: the caller's duty.
    AUTOS.first(handle, |auto| Ok(unsafe { auto.copier.register_host(memory.cast(), size) }?))
}

pub(crate) fn unregister_host(handle: u64, memory: *mut c_void) -> Result<(), Failure> {
    AUTOS.check_process(handle)?;
    AUTOS.first(handle, |auto| Ok(auto.copier.unregister_host(memory.cast_const().cast())?))
}

/// What it does with so many bytes, and why.
pub(crate) fn explain(handle: u64, direction: CopyDirection, bytes: usize) -> Result<String, Failure> {
    AUTOS.check_process(handle)?;
    AUTOS.first(handle, |auto| Ok(auto.copier.explain(direction, bytes).to_string()))
}
