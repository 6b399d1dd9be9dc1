//! The one place where an ioctl is made.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use crate::error::{Error, Result};

/// A structure as a driver reads it: its size, and the offset of every field, are held at compile time.
macro_rules! wire {
    ($(#[$meta:meta])* $name:ident, $size:literal { $($field:ident: $kind:ty = $offset:literal),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct $name { $($field: $kind),* }
        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
    };
}
pub(crate) use wire;

/// Opens a device file for reading and writing, not for programs started later.
pub(crate) fn open(path: &str) -> std::result::Result<File, i32> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(path);
    file.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

/// Makes a request whose argument is a structure, again if a signal came in between. Returns the `errno` of a failure.
///
/// # Safety
///
/// `request` is one that `file`'s driver defines for a structure of type `T`, and every address inside it refers to live
/// memory of the length stated beside it.
pub(crate) unsafe fn call<T>(file: &File, request: libc::c_ulong, argument: &mut T) -> std::result::Result<(), i32> {
    loop {
        // SAFETY: the caller's duty.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut *argument) };
        if result >= 0 {
            return Ok(());
        }
        match std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
            libc::EINTR => {}
            errno => return Err(errno),
        }
    }
}

/// The refusal of a device file that may be there, but not for this user.
pub(crate) fn no_permission(path: &str, errno: i32) -> Error {
    Error::from_errno("open", errno, format!("{path} cannot be opened"))
        .remedy(format!("give this user read and write access to {path}, or pass the device into the container"))
}

/// Shorthand for what may fail with an `errno`.
pub(crate) fn or_errno<T>(result: std::result::Result<T, i32>, op: &'static str, what: &'static str) -> Result<T> {
    result.map_err(|errno| Error::from_errno(op, errno, what))
}
