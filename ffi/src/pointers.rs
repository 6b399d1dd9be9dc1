//! What C's pointers lead to.

#![allow(unsafe_code, reason = "reads and writes where the caller says")]

use std::ffi::{CStr, c_char, c_void};
use std::slice;

use crate::failure::Failure;

/// An output parameter, zeroed at once so that no failure leaves it as it was.
///
/// # Safety
///
/// `out` is null, or points to a `T` that this call may write.
pub(crate) unsafe fn output<'a, T: Default>(out: *mut T, name: &str) -> Result<&'a mut T, Failure> {
    if out.is_null() {
        return Err(Failure::invalid(format!("{name} is NULL")));
    }
    // SAFETY: not null, and the caller's to write; nothing is read from it.
    unsafe { out.write(T::default()) };
    // SAFETY: just written.
    Ok(unsafe { &mut *out })
}

/// The caller's bytes to be copied to the device. 0 bytes may come with any pointer.
///
/// # Safety
///
/// `from` is null, or valid for reads of `size` bytes during `'a`.
pub(crate) unsafe fn source<'a>(from: *const c_void, size: usize) -> Result<&'a [u8], Failure> {
    if size == 0 {
        return Ok(&[]);
    }
    if from.is_null() || isize::try_from(size).is_err() {
        return Err(Failure::invalid("the host pointer is NULL, or the size is negative"));
    }
    // SAFETY: not null, and the caller's to read; bytes have no alignment.
    Ok(unsafe { slice::from_raw_parts(from.cast(), size) })
}

/// The caller's bytes to be filled from the device.
///
/// # Safety
///
/// `to` is null, or valid for writes of `size` bytes during `'a`.
pub(crate) unsafe fn destination<'a>(to: *mut c_void, size: usize) -> Result<&'a mut [u8], Failure> {
    if size == 0 {
        return Ok(&mut []);
    }
    if to.is_null() || isize::try_from(size).is_err() {
        return Err(Failure::invalid("the host pointer is NULL, or the size is negative"));
    }
    // SAFETY: not null, and the caller's to write; bytes have no alignment, and are only written.
    Ok(unsafe { slice::from_raw_parts_mut(to.cast(), size) })
}

/// An array of the caller's.
///
/// # Safety
///
/// `from` is null, or `count` values can be read there during `'a`.
pub(crate) unsafe fn array<'a, T>(from: *const T, count: usize, name: &str) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    let bytes = count.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    if from.is_null() || !from.is_aligned() || bytes.is_none() {
        return Err(Failure::invalid(format!("{name} is NULL, not aligned, or longer than memory")));
    }
    // SAFETY: not null, aligned, no longer than an object can be, and the caller's to read.
    Ok(unsafe { slice::from_raw_parts(from, count) })
}

/// A string of the caller's; `None` for null.
///
/// # Safety
///
/// `text` is null or a null-terminated string, unchanged during `'a`.
pub(crate) unsafe fn string<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and the caller's duty.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Failure::invalid(format!("{name} is not text")))
}

/// Writes a text, cut to `size` bytes with the terminating zero.
///
/// # Safety
///
/// `to` is null, or writable for `size` bytes.
pub(crate) unsafe fn write_text(
    to: *mut c_char,
    size: usize,
    text: impl FnOnce() -> Result<String, Failure>,
) -> Result<(), Failure> {
    // SAFETY: the caller's duty.
    let to = unsafe { destination(to.cast(), size) }?;
    let [first, ..] = to else { return Err(Failure::invalid("size is 0")) };
    *first = 0;
    let text = text()?;
    let len = text.len().min(size - 1);
    to[..len].copy_from_slice(&text.as_bytes()[..len]);
    to[len] = 0;
    Ok(())
}

/// Structures of options, which begin with their own size.
///
/// # Safety
///
/// Any bytes are a value, and the first field is a `usize`.
pub(crate) unsafe trait Options: Copy + Default {}

/// Options of a caller whose structure may be older, and is shorter then, or newer. Null: all defaults.
///
/// # Safety
///
/// `from` is null, or starts with a `usize`, and as many bytes can be read there as this says.
pub(crate) unsafe fn options<T: Options>(from: *const T, name: &str) -> Result<T, Failure> {
    let mut options = T::default();
    if from.is_null() {
        return Ok(options);
    }
    // SAFETY: not null, and the caller's duty.
    let size = unsafe { from.cast::<usize>().read_unaligned() };
    if size < size_of::<usize>() || isize::try_from(size).is_err() {
        return Err(Failure::invalid(format!("{name}.size is {size}; set it to sizeof of the structure")));
    }
    // SAFETY: so many bytes are the caller's to read.
    let given = unsafe { slice::from_raw_parts(from.cast::<u8>(), size) };
    let (known, newer) = given.split_at(size.min(size_of::<T>()));
    if newer.iter().any(|byte| *byte != 0) {
        return Err(Failure::invalid(format!("{name} has options that this library does not know; use a newer one")));
    }
    // SAFETY: as many bytes as there is room for at most, another object, and any bytes are a value.
    unsafe { (&raw mut options).cast::<u8>().copy_from_nonoverlapping(known.as_ptr(), known.len()) };
    Ok(options)
}

/// Writes a structure that a kernel takes by value, as words. Its size is compared, for a kernel that was compiled for
/// another one would go wrong.
///
/// # Safety
///
/// `to` is null, or writable for `size` bytes.
pub(crate) unsafe fn write_words(to: *mut c_void, size: usize, words: &[u64]) -> Result<(), Failure> {
    if size != size_of_val(words) {
        return Err(Failure::invalid(format!(
            "the kernel's structure has {size} bytes, and {} are right: build it with this library's \
             gdrcopy_channel.cuh",
            size_of_val(words)
        )));
    }
    // SAFETY: the caller's duty.
    let to = unsafe { destination(to, size) }?;
    for (to, word) in to.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::ChannelOptions;

    fn read(bytes: &[usize]) -> Result<ChannelOptions, Failure> {
        // SAFETY: each test's array has as many bytes as its first word says, or the function refuses it.
        unsafe { options(bytes.as_ptr().cast(), "options") }
    }

    #[test]
    fn options_of_older_and_newer_programs() {
        let gpu = 3;
        let whole = read(&[40, gpu, 0, 0, 77]).unwrap();
        assert_eq!((whole.gpu, whole.kernel_limit_ms), (3, 77));
        let older = read(&[16, gpu]).unwrap();
        assert_eq!((older.gpu, older.kernel_limit_ms), (3, 0));
        assert_eq!(read(&[48, gpu, 0, 0, 77, 0]).unwrap().kernel_limit_ms, 77);
        assert!(read(&[48, gpu, 0, 0, 77, 1]).is_err(), "an option that is not known");
        assert!(read(&[0, gpu]).is_err() && read(&[7]).is_err() && read(&[usize::MAX]).is_err());
        // SAFETY: null.
        assert_eq!(unsafe { options::<ChannelOptions>(std::ptr::null(), "options") }.unwrap().gpu, 0);
    }
}
