//! The functions of `gdrapi_ext.h` for mailboxes and latest values.

#![allow(unsafe_code, reason = "exported by name, and called with C's pointers")]

use std::ffi::{c_int, c_void};
use std::time::Duration;

use crate::abi::number;
use crate::channels::{latest, mailbox};
use crate::ext_channel::state;
use crate::failure::entry;
use crate::pointers::{destination, options, output, source, write_words};
use crate::types::{ChannelOptions, Gdr, LatestHandle, MailboxHandle};

/// Makes a mailbox.
///
/// # Safety
///
/// `options` is null or as its size says; `mailbox` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_mailbox_create(
    g: *mut Gdr,
    options: *const ChannelOptions,
    request_size: usize,
    response_size: usize,
    mailbox: *mut MailboxHandle,
) -> c_int {
    entry("gdrx_mailbox_create", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(mailbox, "mailbox") }?;
        // SAFETY: the caller's duty.
        let asked = unsafe { self::options(options, "options") }?;
        out.h = mailbox::create(number(g), &asked, request_size, response_size)?;
        Ok(())
    })
}

/// What the kernel takes.
///
/// # Safety
///
/// `device` is null, or writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_mailbox_device(mailbox: MailboxHandle, device: *mut c_void, size: usize) -> c_int {
    entry("gdrx_mailbox_device", || {
        let words = mailbox::control(mailbox.h)?.device().to_words();
        // SAFETY: the caller's duty.
        unsafe { write_words(device, size, &words) }
    })
}

/// Asks and waits for the answer.
///
/// # Safety
///
/// `request` is readable, and `response` writable, for as many bytes as the mailbox was made for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_mailbox_call(
    mailbox: MailboxHandle,
    request: *const c_void,
    response: *mut c_void,
    timeout_us: u64,
) -> c_int {
    entry("gdrx_mailbox_call", || {
        mailbox::with(mailbox.h, |questions| {
            // SAFETY: the caller's duty.
            let request = unsafe { source(request, questions.request_bytes) }?;
            // SAFETY: the caller's duty.
            let response = unsafe { destination(response, questions.response_bytes) }?;
            Ok(questions.mailbox.call_into(request, response, Duration::from_micros(timeout_us))?)
        })
    })
}

/// How many answers are owed to calls that timed out.
///
/// # Safety
///
/// `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_mailbox_late(mailbox: MailboxHandle, count: *mut u64) -> c_int {
    entry("gdrx_mailbox_late", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(count, "count") }?;
        *out = mailbox::with(mailbox.h, |questions| Ok(questions.mailbox.late_answers()))?;
        Ok(())
    })
}

/// Asks the kernel to end.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_mailbox_stop(mailbox: MailboxHandle) -> c_int {
    entry("gdrx_mailbox_stop", || {
        mailbox::control(mailbox.h)?.stop();
        Ok(())
    })
}

/// What the kernel reported last.
///
/// # Safety
///
/// `state` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_mailbox_kernel(mailbox: MailboxHandle, state: *mut c_int) -> c_int {
    entry("gdrx_mailbox_kernel", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(state, "state") }?;
        *out = self::state(&mailbox::control(mailbox.h)?);
        Ok(())
    })
}

/// Asks the kernel to end and frees the memory.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_mailbox_destroy(mailbox: MailboxHandle) -> c_int {
    entry("gdrx_mailbox_destroy", || mailbox::destroy(mailbox.h))
}

/// Puts a first value in GPU memory, to be replaced.
///
/// # Safety
///
/// `first` is readable for `size` bytes; `latest` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_latest_create(
    g: *mut Gdr,
    gpu: c_int,
    first: *const c_void,
    size: usize,
    latest: *mut LatestHandle,
) -> c_int {
    entry("gdrx_latest_create", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(latest, "latest") }?;
        // SAFETY: the caller's duty.
        let first = unsafe { source(first, size) }?;
        out.h = latest::create(number(g), gpu, first)?;
        Ok(())
    })
}

/// What the kernel takes.
///
/// # Safety
///
/// `device` is null, or writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_latest_device(latest: LatestHandle, device: *mut c_void, size: usize) -> c_int {
    entry("gdrx_latest_device", || {
        let words = latest::device(latest.h)?.to_words();
        // SAFETY: the caller's duty.
        unsafe { write_words(device, size, &words) }
    })
}

/// Replaces the value.
///
/// # Safety
///
/// `value` is readable for as many bytes as the first one had.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_latest_set(latest: LatestHandle, value: *const c_void) -> c_int {
    entry("gdrx_latest_set", || {
        latest::with(latest.h, |newest| {
            // SAFETY: the caller's duty.
            let value = unsafe { source(value, newest.bytes) }?;
            Ok(newest.latest.set(value)?)
        })
    })
}

/// Frees the memory.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_latest_destroy(latest: LatestHandle) -> c_int {
    entry("gdrx_latest_destroy", || latest::destroy(latest.h))
}
