//! Descriptors from process to process, each with a short text. The test binaries use this file, too.

#![allow(unsafe_code, reason = "descriptor passing")]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Longest text of a message.
const TEXT: usize = 512;

/// Room for one descriptor and its header, aligned as a `cmsghdr` must be.
#[repr(C, align(8))]
struct Control([u8; 24]);

/// `CMSG_LEN(sizeof(int))` and its padded size.
const CONTROL_LEN: usize = 20;

fn failed(call: &str) -> String {
    format!("{call}: {}", std::io::Error::last_os_error())
}

/// Two ends; what is sent into the first comes out of the second, message by message.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), String> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: `ends` has room for the two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        return Err(failed("socketpair"));
    }
    // SAFETY: fresh descriptors, owned by nobody else.
    let [from, to] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    // A small buffer: what waits in it is memory that nobody uses.
    let bytes: i32 = 4096;
    let size = libc::socklen_t::try_from(size_of::<i32>()).expect("a small size");
    // SAFETY: `bytes` outlives the call, which reads one int.
    if unsafe { libc::setsockopt(from.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, (&raw const bytes).cast(), size) }
        != 0
    {
        return Err(failed("setsockopt"));
    }
    Ok((from, to))
}

/// A message of nothing yet. The pointers stay valid as long as what they were made of.
fn header(part: &mut libc::iovec, control: Option<&mut Control>) -> libc::msghdr {
    // SAFETY: all zeros is a valid msghdr: nothing to send and nothing to fill.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (part, 1);
    if let Some(control) = control {
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), control.0.len());
    }
    message
}

/// Sends one message. The descriptor stays the caller's.
pub(crate) fn send(to: BorrowedFd<'_>, text: &str, fd: Option<BorrowedFd<'_>>) -> Result<(), String> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.truncate(TEXT);
    // A message of 0 bytes would read as the end.
    bytes.push(b'\n');
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 24]);
    if let Some(fd) = fd {
        control.0[..8].copy_from_slice(&CONTROL_LEN.to_ne_bytes());
        control.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        control.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        control.0[16..20].copy_from_slice(&fd.as_raw_fd().to_ne_bytes());
    }
    let message = header(&mut part, fd.is_some().then_some(&mut control));
    // SAFETY: the message refers to `bytes` and `control`, which outlive the call.
    let sent = unsafe { libc::sendmsg(to.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(failed("sendmsg")) } else { Ok(()) }
}

/// Takes one message. `None` at the end, and, if not to `wait`, where there is none.
pub(crate) fn receive(from: BorrowedFd<'_>, wait: bool) -> Result<Option<(String, Option<OwnedFd>)>, String> {
    let mut bytes = [0_u8; TEXT + 1];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 24]);
    let mut message = header(&mut part, Some(&mut control));
    let flags = libc::MSG_CMSG_CLOEXEC | if wait { 0 } else { libc::MSG_DONTWAIT };
    // SAFETY: the message refers to `bytes` and `control`, which outlive the call.
    let got = unsafe { libc::recvmsg(from.as_raw_fd(), &mut message, flags) };
    let Ok(len) = usize::try_from(got) else {
        return match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN) => Ok(None),
            _ => Err(failed("recvmsg")),
        };
    };
    if len == 0 {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&bytes[..len]).trim_end().to_owned();
    let fd = (message.msg_controllen >= CONTROL_LEN).then(|| {
        let number = i32::from_ne_bytes(control.0[16..20].try_into().expect("4 bytes"));
        // SAFETY: the only kind of control message here is one descriptor, which the kernel just made for us.
        unsafe { OwnedFd::from_raw_fd(number) }
    });
    Ok(Some((text, fd)))
}
