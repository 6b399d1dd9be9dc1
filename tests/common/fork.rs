//! Forked children, and memory that may not be there.

#![allow(unsafe_code, reason = "fork, and system calls on addresses that may be invalid")]

use std::any::Any;
use std::fs::File;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::unistd::pipe;

/// A child that hangs is killed after this many seconds.
const PATIENCE: u32 = 30;

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself.
    Well,
    /// By a panic with this message.
    Panicked(String),
    /// By this signal.
    Killed(i32),
}

/// Runs `work` in a forked child. Nothing of the parent's is dropped there but what `work` itself drops.
pub fn fork(work: impl FnOnce()) -> Ended {
    let (from_child, to_parent) = pipe().expect("a pipe");
    // SAFETY: the child leaves by `_exit` below, so that nothing of the parent's is torn down twice.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: plain values.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core) };
        // SAFETY: the default action of SIGALRM ends the child.
        unsafe { libc::alarm(PATIENCE) };
        let ended = catch_unwind(AssertUnwindSafe(work));
        if let Err(panic) = ended {
            let _ = File::from(to_parent).write_all(words(&*panic).as_bytes());
        }
        // SAFETY: ends the child without running exit handlers or destructors.
        unsafe { libc::_exit(0) };
    }
    assert!(pid > 0, "fork: {}", std::io::Error::last_os_error());
    drop(to_parent);
    let mut message = String::new();
    File::from(from_child).read_to_string(&mut message).expect("the child's words");
    let mut status = 0;
    // SAFETY: waits for our own child.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid, "waitpid: {}", std::io::Error::last_os_error());
    match (libc::WIFSIGNALED(status), message.is_empty()) {
        (true, _) => Ended::Killed(libc::WTERMSIG(status)),
        (false, true) => Ended::Well,
        (false, false) => Ended::Panicked(message),
    }
}

/// Runs `work` in a forked child, which has to end well.
pub fn in_child(work: impl FnOnce()) {
    assert_eq!(fork(work), Ended::Well);
}

/// What a panic said.
pub fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

/// Whether the byte can be loaded: the kernel tries it, and answers EFAULT where the process itself would fault.
pub fn is_readable(at: *const u8) -> bool {
    let (_read, write) = pipe().expect("a pipe");
    // SAFETY: the kernel copies one byte from this address or refuses.
    let copied = unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&write), at.cast(), 1) };
    accessed(copied)
}

/// Whether the byte can be stored, as [`is_readable`]; it is overwritten with `byte` if so.
pub fn is_writable(at: *mut u8, byte: u8) -> bool {
    let (read, write) = pipe().expect("a pipe");
    File::from(write).write_all(&[byte]).expect("room for a byte");
    // SAFETY: the kernel copies one byte to this address, which the caller gives up, or refuses.
    let copied = unsafe { libc::read(std::os::fd::AsRawFd::as_raw_fd(&read), at.cast(), 1) };
    accessed(copied)
}

fn accessed(copied: isize) -> bool {
    let error = std::io::Error::last_os_error();
    assert!(copied == 1 || error.raw_os_error() == Some(libc::EFAULT), "{error}");
    copied == 1
}
