//! The functions of `gdrapi_ext.h` for channels.

#![allow(unsafe_code, reason = "exported by name, and called with C's pointers")]

use std::ffi::{c_int, c_void};
use std::time::Duration;

use gdrcopy::channel::{Control, LINE_PAYLOAD};

use crate::abi::number;
use crate::channels::channel;
use crate::failure::{Failure, entry};
use crate::pointers::{Options, array, destination, options, output, source, write_words};
use crate::types::{ChannelHandle, ChannelOptions, Gdr};

// SAFETY: integers, after one that is the size.
unsafe impl Options for ChannelOptions {}

type Line = [u8; LINE_PAYLOAD];

/// A line of the caller's.
///
/// # Safety
///
/// `from` is null, or readable for 48 bytes during `'a`.
unsafe fn line<'a>(from: *const c_void) -> Result<&'a Line, Failure> {
    // SAFETY: the caller's duty.
    let line = unsafe { source(from, LINE_PAYLOAD) }?;
    line.try_into().map_err(|_| Failure::invalid("a line has 48 bytes of payload"))
}

/// 0: not started; 1: runs; 2: ended.
pub(crate) fn state(control: &Control) -> c_int {
    match (control.kernel_has_started(), control.kernel_has_ended()) {
        (_, true) => 2,
        (true, false) => 1,
        (false, false) => 0,
    }
}

/// Makes a channel.
///
/// # Safety
///
/// `options` is null or as its size says; `channel` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_create(
    g: *mut Gdr,
    options: *const ChannelOptions,
    channel: *mut ChannelHandle,
) -> c_int {
    entry("gdrx_channel_create", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(channel, "channel") }?;
        // SAFETY: the caller's duty.
        let asked = unsafe { self::options(options, "options") }?;
        out.h = channel::create(number(g), &asked)?;
        Ok(())
    })
}

/// What the kernel takes.
///
/// # Safety
///
/// `device` is null, or writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_device(channel: ChannelHandle, device: *mut c_void, size: usize) -> c_int {
    entry("gdrx_channel_device", || {
        let words = channel::control(channel.h)?.device().to_words();
        // SAFETY: the caller's duty.
        unsafe { write_words(device, size, &words) }
    })
}

/// Sends one line.
///
/// # Safety
///
/// `line` is readable for 48 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_send_line(channel: ChannelHandle, line: *const c_void, timeout_us: u64) -> c_int {
    entry("gdrx_channel_send_line", || {
        // SAFETY: the caller's duty.
        let line = unsafe { self::line(line) }?;
        channel::send(channel.h, |sender| {
            let sent = match timeout_us {
                0 => sender.try_send_line(line),
                _ => sender.send_line(line, Duration::from_micros(timeout_us)),
            };
            sent.map_err(Failure::from)
        })
    })
}

/// Sends as many of the lines as there is room for.
///
/// # Safety
///
/// `lines` is readable for `count` times 48 bytes; `sent` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_send_lines(
    channel: ChannelHandle,
    lines: *const c_void,
    count: usize,
    sent: *mut usize,
) -> c_int {
    entry("gdrx_channel_send_lines", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(sent, "sent") }?;
        // SAFETY: the caller's duty.
        let lines = unsafe { array(lines.cast::<Line>(), count, "lines") }?;
        *out = channel::send(channel.h, |sender| Ok(sender.try_send_lines(lines)?))?;
        if *out == 0 && count != 0 { Err(Failure::full()) } else { Ok(()) }
    })
}

/// Sends a message with its length.
///
/// # Safety
///
/// `message` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_send(
    channel: ChannelHandle,
    message: *const c_void,
    size: usize,
    timeout_us: u64,
) -> c_int {
    entry("gdrx_channel_send", || {
        // SAFETY: the caller's duty.
        let message = unsafe { source(message, size) }?;
        channel::send(channel.h, |sender| {
            let sent = match timeout_us {
                0 => sender.try_send(message),
                _ => sender.send(message, Duration::from_micros(timeout_us)),
            };
            sent.map_err(Failure::from)
        })
    })
}

/// How many lines there is room for.
///
/// # Safety
///
/// `lines` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_free_lines(channel: ChannelHandle, lines: *mut u32) -> c_int {
    entry("gdrx_channel_free_lines", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(lines, "lines") }?;
        *out = channel::send(channel.h, |sender| Ok(sender.free_lines()))?;
        Ok(())
    })
}

/// Receives one line.
///
/// # Safety
///
/// `line` is writable for 48 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_recv_line(channel: ChannelHandle, line: *mut c_void, timeout_us: u64) -> c_int {
    entry("gdrx_channel_recv_line", || {
        // SAFETY: the caller's duty.
        let to = unsafe { destination(line, LINE_PAYLOAD) }?;
        channel::recv(channel.h, |receiver| {
            let line = match timeout_us {
                0 => receiver.try_recv_line()?.ok_or_else(Failure::empty)?,
                _ => receiver.recv_line(Duration::from_micros(timeout_us))?,
            };
            to.copy_from_slice(&line);
            Ok(())
        })
    })
}

/// Receives as many lines as are there.
///
/// # Safety
///
/// `lines` is writable for `count` times 48 bytes; `received` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_recv_lines(
    channel: ChannelHandle,
    lines: *mut c_void,
    count: usize,
    received: *mut usize,
) -> c_int {
    entry("gdrx_channel_recv_lines", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(received, "received") }?;
        let size = count.checked_mul(LINE_PAYLOAD).ok_or_else(|| Failure::invalid("more lines than memory"))?;
        // SAFETY: the caller's duty.
        let to = unsafe { destination(lines, size) }?;
        channel::recv(channel.h, |receiver| {
            for to in to.chunks_exact_mut(LINE_PAYLOAD) {
                let Some(line) = receiver.try_recv_line()? else { break };
                to.copy_from_slice(&line);
                *out += 1;
            }
            if *out == 0 && count != 0 { Err(Failure::empty()) } else { Ok(()) }
        })
    })
}

/// Receives a message with its length.
///
/// # Safety
///
/// `to` is writable for `room` bytes; `size` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_recv(
    channel: ChannelHandle,
    to: *mut c_void,
    room: usize,
    size: *mut usize,
    timeout_us: u64,
) -> c_int {
    entry("gdrx_channel_recv", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(size, "size") }?;
        // SAFETY: the caller's duty.
        let to = unsafe { destination(to, room) }?;
        *out = channel::recv(channel.h, |receiver| {
            Ok(match timeout_us {
                0 => receiver.try_recv(to)?.ok_or_else(Failure::empty)?,
                _ => receiver.recv(to, Duration::from_micros(timeout_us))?,
            })
        })?;
        Ok(())
    })
}

/// Asks the kernel to end.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_channel_stop(channel: ChannelHandle) -> c_int {
    entry("gdrx_channel_stop", || {
        channel::control(channel.h)?.stop();
        Ok(())
    })
}

/// What the kernel reported last.
///
/// # Safety
///
/// `state` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_channel_kernel(channel: ChannelHandle, state: *mut c_int) -> c_int {
    entry("gdrx_channel_kernel", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(state, "state") }?;
        *out = self::state(&channel::control(channel.h)?);
        Ok(())
    })
}

/// Asks the kernel to end and frees the memory.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_channel_destroy(channel: ChannelHandle) -> c_int {
    entry("gdrx_channel_destroy", || channel::destroy(channel.h))
}
